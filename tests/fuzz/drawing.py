"""Draw random programs: statement by statement, each of which runs on batches of several sizes."""

import random
from collections import Counter

import numpy as np
import tensorflow as tf

from fuzz.kinds import DRAWS
from fuzz.programs import OPTIMIZERS, WIDTH, Body, Program, Scope, State, Statement

SAMPLES = (7, 4)  # the numbers of rows of the batches on which statements are tried
_MOST_ENTRIES = 3000
_LARGEST = 1e4
# How often a kind is drawn, where it is not once in a while: there are many layers.
_SHARES = {"fails": 0.1, "of unknown rank": 0.1, "checked": 0.3, "layer": 4.0}
# Functions of unary statements that are rare, since much is not compared well after them.
_RARE_FUNCTIONS = {"not a number": 0.2, "half precision": 0.2, "single precision": 0.3}


def batch(rows, seed):
    """Draws a batch: numbers of shape (rows, 3), and integers of shape (rows,)."""
    draw = np.random.default_rng([seed, rows])
    return draw.normal(size=(rows, WIDTH)), draw.integers(0, 5, size=rows)


def _is_of(value, dtype):
    """Returns whether a value is of a dtype; "integer" is int32 or int64."""
    return value.dtype in (tf.int32, tf.int64) if dtype == "integer" else value.dtype.name == dtype


class Pool:
    """The values of a program so far, with examples for each size of batch."""

    def __init__(self, rng, scopes, names, weights, prefix):
        self.rng, self.scopes = rng, scopes  # a scope for each size of batch
        self.names, self.prefix = names, prefix  # of the values, oldest first, and the first part of new names
        self.weights = weights  # how often each kind is to be drawn
        self.statements = []

    def pick(self, dtype, rank=None, least=0):
        """Returns the name of a value of a dtype, more often a recent one."""
        ranks = {name: self.scopes[0].values[name].shape.rank for name in self._names_of(self.names, dtype)}
        found = [name for name, own in ranks.items() if rank in (None, own) and (own >= least or dtype == "integer")]
        if not found:
            raise _NothingError
        if self.rng.random() < 0.7:
            return found[-1 - min(int(self.rng.expovariate(0.35)), len(found) - 1)]
        return self.rng.choice(found)

    def like(self, name, dtype):
        """Returns the name of a value with the shapes of another one."""
        shapes = {other: [scope.values[other].shape for scope in self.scopes] for other in self.names}
        found = self._names_of([other for other in self.names if shapes[other] == shapes[name]], dtype)
        if not found:
            raise _NothingError
        return self.rng.choice(found)

    def _names_of(self, names, dtype):
        return [name for name in names if _is_of(self.scopes[0].values[name], dtype)]

    def body(self, name):
        """Draws a body of a few statements, which returns a value like one of the pool."""
        if self.prefix.count("_") > 1:
            raise _NothingError
        argument = f"{self.prefix}a{len(self.names)}_"
        scopes = [Scope(scope.state, {**scope.values, argument: scope.values[name]}) for scope in self.scopes]
        inner = Pool(self.rng, scopes, [*self.names, argument], self.weights, argument)
        inner.draw(self.rng.randint(1, 3))
        last = inner.names[-1]
        values = [scope.values for scope in scopes]
        is_like = all(v[last].shape == v[argument].shape and v[last].dtype == v[argument].dtype for v in values)
        if not is_like or last == argument:
            inner.add("scaled by the mean", (argument, last))
        return Body((argument,), tuple(inner.statements), inner.names[-1])

    def draw(self, count):
        """Draws statements that run on each size of batch."""
        weights = [self.weights.get(kind, 1.0) * _SHARES.get(kind, 1.0) for kind in DRAWS]
        enough = len(self.statements) + count
        for _ in range(count * 30):
            if len(self.statements) == enough:
                return
            (kind,) = self.rng.choices(list(DRAWS), weights)
            try:
                names, parameters, bodies = DRAWS[kind](self.rng, self)
                if self.rng.random() < _RARE_FUNCTIONS.get(parameters.get("function"), 1.0):
                    self.add(kind, names, parameters, bodies)
            except (_NothingError, ValueError, TypeError, IndexError, tf.errors.OpError):
                continue

    def add(self, kind, names, parameters=None, bodies=()):
        """Runs a statement on each size of batch, and keeps it if its values can be used."""
        statement = Statement(kind, f"{self.prefix}v{len(self.names)}", tuple(names), parameters or {}, tuple(bodies))
        made = [scope.run(statement) for scope in self.scopes]
        if not all(map(_is_usable, made)) or len({value.shape.rank for value in made}) > 1:
            raise _NothingError
        for scope, value in zip(self.scopes, made, strict=True):
            scope.values[statement.result] = value
        self.names.append(statement.result)
        self.statements.append(statement)


class _NothingError(Exception):
    """Reports that no value is there for a statement, or that its value cannot be used."""


def _is_usable(value):
    if not tf.is_tensor(value) or value.shape.rank > 4 or value.shape.num_elements() > _MOST_ENTRIES:
        return False
    if value.dtype != tf.float64:
        return _is_of(value, "integer")
    array = value.numpy()
    return array.size == 0 or bool(np.isnan(array).mean() < 0.3 and np.nanmax(np.abs(array), initial=0.0) < _LARGEST)


def draw_program(seed):
    """Draws a program; the same seed gives the same one.

    Each program has a part of the kinds only (Groce et al. 2012, Swarm testing), so that some programs have much of what others
    have too little of to go wrong.
    """
    rng = random.Random(seed)
    weights = {kind: rng.choice([0.0, 0.0, 1.0, 1.0, 3.0]) for kind in DRAWS}
    statements = rng.randint(6, 30)
    batches = [map(tf.constant, batch(rows, seed)) for rows in SAMPLES]
    scopes = [Scope(State(), dict(zip(("x", "labels"), values, strict=True))) for values in batches]
    pool = Pool(rng, scopes, ["x", "labels"], weights, "")
    pool.draw(statements)
    named = pool.names[2:]
    floats = [name for name in named if scopes[0].values[name].dtype == tf.float64]
    results = rng.sample(named, min(len(named), rng.randint(1, 6)))
    smooth = [name for name in floats[len(floats) // 2 :] if np.isfinite(scopes[0].values[name].numpy()).all()]
    loss = rng.choice(smooth) if smooth and rng.random() < 0.7 else None
    return Program(tuple(pool.statements), tuple(results), loss, rng.choice(list(OPTIMIZERS)))


def kinds_of(statements):
    """Counts the kinds of statements, those in bodies included, and their functions."""
    counts = Counter()
    for statement in statements:
        counts[statement.kind] += 1
        if "function" in statement.parameters:
            counts[f"{statement.kind}: {statement.parameters['function']}"] += 1
        for body in statement.bodies:
            counts += kinds_of(body.statements)
    return counts
