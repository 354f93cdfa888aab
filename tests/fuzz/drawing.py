"""Draw random programs: statement by statement, each of which runs on batches of several sizes."""

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from fuzz import keras_kinds  # noqa: F401
from fuzz.kinds import DRAWS
from fuzz.programs import OPTIMIZERS, RUNS, WIDTH, Body, Program, Scope, State, Statement

SAMPLES = (7, 4)  # the numbers of rows of the batches on which statements are tried
_MOST_ENTRIES = 3000
_LARGEST = 1e4
# How often a kind is drawn, where it is not once in a while: there are many layers.
_SHARES = {"fails": 0.1, "of unknown rank": 0.1, "checked": 0.3, "layer": 4.0}
# Functions of unary statements that are rare, since much is not compared well after them.
_RARE_FUNCTIONS = {"not a number": 0.2, "half precision": 0.2, "single precision": 0.3}


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws a batch: numbers of shape (rows, 3), and integers of shape (rows,)."""
    draw = np.random.default_rng([seed, rows])
    return draw.normal(size=(rows, WIDTH)), draw.integers(0, 5, size=rows)


def is_integer(value: Any) -> bool:
    """Returns whether a value is int32 or int64."""
    return value.dtype in (tf.int32, tf.int64)


class Pool:
    """The values of a program so far, with examples for each size of batch.

    Args:
        rng: the generator of random numbers.
        scopes: for each size of batch, the values.
        names: the names of the values, oldest first.
        weights: how often each kind is to be drawn.
        prefix: the first part of the names of new values.
    """

    def __init__(self, rng: random.Random, scopes: list[Scope], names: list[str], weights: Mapping[str, float], prefix: str):
        self.rng, self.scopes, self.names, self.weights, self.prefix = rng, scopes, names, weights, prefix
        self.statements: list[Statement] = []

    def pick(self, dtype: str, rank: int | None = None, least: int = 0) -> str:
        """Returns the name of a value of a dtype, more often a recent one."""
        found = []
        for name in self.names:
            value = self.scopes[0].values[name]
            is_right = is_integer(value) if dtype == "integer" else value.dtype.name == dtype
            has_rank = value.shape.rank >= (least if dtype != "integer" else 0) and rank in (None, value.shape.rank)
            if is_right and has_rank:
                found.append(name)
        if not found:
            raise _NothingError
        return (
            found[-1 - min(int(self.rng.expovariate(0.35)), len(found) - 1)]
            if self.rng.random() < 0.7
            else self.rng.choice(found)
        )

    def like(self, name: str, dtype: str) -> str:
        """Returns the name of a value with the shapes of another one."""
        shapes = [scope.values[name].shape for scope in self.scopes]
        found = [other for other in self.names if [scope.values[other].shape for scope in self.scopes] == shapes]
        values = self.scopes[0].values
        found = [o for o in found if (is_integer(values[o]) if dtype == "integer" else values[o].dtype.name == dtype)]
        if not found:
            raise _NothingError
        return self.rng.choice(found)

    def body(self, name: str) -> Body:
        """Draws a body of a few statements, which returns a value like one of the pool."""
        if self.prefix.count("_") > 1:
            raise _NothingError
        argument = f"{self.prefix}a{len(self.names)}_"
        scopes = [Scope(scope.state, {**scope.values, argument: scope.values[name]}) for scope in self.scopes]
        inner = Pool(self.rng, scopes, [*self.names, argument], self.weights, f"{argument}")
        inner.draw(self.rng.randint(1, 3))
        last = inner.names[-1]
        values = [scope.values for scope in scopes]
        is_like = all(v[last].shape == v[argument].shape and v[last].dtype == v[argument].dtype for v in values)
        if not is_like or last == argument:
            inner.add(Statement("scaled by the mean", inner.new_name(), (argument, last)))
        return Body((argument,), tuple(inner.statements), inner.names[-1])

    def draw(self, count: int) -> None:
        """Draws statements that run on each size of batch."""
        kinds = list(DRAWS)
        weights = [self.weights.get(kind, 1.0) * _SHARES.get(kind, 1.0) for kind in kinds]
        drawn = 0
        for _ in range(count * 30):
            if drawn == count:
                return
            (kind,) = self.rng.choices(kinds, weights)
            try:
                names, parameters, *bodies = DRAWS[kind](self.rng, self)
                function = parameters.get("function")
                if self.rng.random() < _RARE_FUNCTIONS.get(function, 1.0):
                    self.add(Statement(kind, self.new_name(), tuple(names), parameters, tuple(*bodies)))
                    drawn += 1
            except (_NothingError, ValueError, TypeError, IndexError, tf.errors.OpError):
                continue

    def new_name(self) -> str:
        """Returns a name that no value has."""
        return f"{self.prefix}v{len(self.names)}"

    def add(self, statement: Statement) -> None:
        """Runs a statement on each size of batch, and keeps it if its values can be used."""
        made = []
        for scope in self.scopes:
            arguments = [scope.values[name] for name in statement.arguments]
            value = RUNS[statement.kind](statement, arguments, scope.state, scope)
            if not _is_usable(value):
                raise _NothingError
            made.append(value)
        if len({value.shape.rank for value in made}) > 1:
            raise _NothingError
        for scope, value in zip(self.scopes, made, strict=True):
            scope.values[statement.result] = value
        self.names.append(statement.result)
        self.statements.append(statement)


class _NothingError(Exception):
    """Reports that no value is there for a statement, or that its value cannot be used."""


def _is_usable(value: Any) -> bool:
    if not tf.is_tensor(value) or value.shape.rank > 4 or value.shape.num_elements() > _MOST_ENTRIES:
        return False
    if is_integer(value):
        return True
    if value.dtype != tf.float64:
        return False
    array = value.numpy()
    return array.size == 0 or bool(np.isnan(array).mean() < 0.3 and np.nanmax(np.abs(array), initial=0.0) < _LARGEST)


def draw_program(seed: int) -> Program:
    """Draws a program; the same seed gives the same one.

    Each program has a part of the kinds only (Groce et al. 2012, Swarm testing), so that some programs have much of what others
    have too little of to go wrong.
    """
    rng = random.Random(seed)
    weights = {kind: rng.choice([0.0, 0.0, 1.0, 1.0, 3.0]) for kind in DRAWS}
    statements = rng.randint(6, 30)
    scopes = []
    for rows in SAMPLES:
        x, labels = batch(rows, seed)
        scopes.append(Scope(State(), {"x": tf.constant(x), "labels": tf.constant(labels)}))
    pool = Pool(rng, scopes, ["x", "labels"], weights, "")
    pool.draw(statements)
    named = pool.names[2:]
    floats = [name for name in named if pool.scopes[0].values[name].dtype == tf.float64]
    results = rng.sample(named, min(len(named), rng.randint(1, 6)))
    smooth = [name for name in floats[len(floats) // 2 :] if np.isfinite(pool.scopes[0].values[name].numpy()).all()]
    loss = rng.choice(smooth) if smooth and rng.random() < 0.7 else None
    return Program(tuple(pool.statements), tuple(results), loss, rng.choice(list(OPTIMIZERS)))


def kinds_of(program: Program) -> Counter[str]:
    """Counts the kinds of statements of a program, and their functions."""
    counts: Counter[str] = Counter()

    def count(statement: Statement) -> None:
        counts[statement.kind] += 1
        if "function" in statement.parameters:
            counts[f"{statement.kind}: {statement.parameters['function']}"] += 1
        for body in statement.bodies:
            for inner in body.statements:
                count(inner)

    for statement in program.statements:
        count(statement)
    return counts
