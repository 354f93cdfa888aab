"""Run a program plainly and partitioned, and compare its results and the variables that it leaves."""

import contextlib
import dataclasses
import functools
import json
import random
import traceback
from collections import Counter

import numpy as np
import tensorflow as tf
from partitioned_steps import partitioned_step, reading_at_random

from fuzz.drawing import batch, kinds_of
from fuzz.programs import WIDTH, Program, State, step_of
from fuzz.workers import InMemory, Meeting
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.partition.inspecting.tolerance import difference

HOME = "CPU:0"
ON_TOWERS = "on towers"
_TOLERANCE = 1e-9
# Programs with these functions compute in a lower precision somewhere.
_TOLERANCES = {"unary: half precision": 0.1, "unary: single precision": 1e-3}
_PACKING_RUNS = 4
_LARGE = 2000  # nodes of the plain program on each worker, beyond which a share is run on towers: ten small ones take as long
_LARGE_SHARE = 5
_NUDGE = 4e-15  # of the inputs, to see how much a program amplifies rounding


@dataclasses.dataclass(frozen=True)
class Setting:
    """The way in which a program is partitioned."""

    towers: int
    rows: tuple[int, ...]  # of the batches, one after the other
    is_static: bool = False  # whether the number of rows is known while the step is traced
    is_packed: bool = False  # whether devices send packed messages
    is_sharded: bool = False  # whether variables are on several devices
    is_compiled: bool = False  # whether XLA compiles the towers' operations
    fails: bool = False  # whether the checks of the program fail
    reads_at_random: bool = False  # whether integers are read as row counts at random; see `readings`
    is_optimized: bool = True  # whether TensorFlow's graph optimizer changes the graph
    workers: int = 1  # each of which has so many towers


def draw_setting(seed):
    rng = random.Random(seed + 1)
    towers, is_static = rng.randint(1, 4), rng.random() < 0.5
    few = rng.choice([7, 8, 5, 6, 9, 3, 2, 1])
    rows = (few, few) if is_static else (rng.choice([7, 8, 5]), rng.choice([1, 2, 3, 4]), few)
    packed, sharded, compiled, fails, reads = (rng.random() < share for share in (0.5, 0.4, 0.06, 0.3, 0.5))
    workers = rng.choice([1, 1, 1, 1, 1, 1, 2, 3])
    towers = towers if workers == 1 else min(towers, 2)
    return Setting(towers, rows, is_static, packed, sharded, compiled, fails, is_static and reads, workers=workers)


def of_kept(path):
    """Reads a program that failed once, its setting and its seed."""
    kept = json.loads(path.read_text())
    setting = {**kept["setting"], "rows": tuple(kept["setting"]["rows"])}
    return Program.of(kept["program"]), Setting(**setting), kept["seed"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A difference between the plain and the partitioned program."""

    symptom: str  # "differs", "fails" or "changes variables"; with the first line of an error
    details: str  # numbers or a traceback


def check(program, setting, seed, outcomes=None):
    """Returns how a program on towers differs from the plain one; None if they are the same, or cannot be compared.

    The seed is that of the batches. `outcomes` counts how many programs are compared, and why others are not.
    """
    outcomes = Counter() if outcomes is None else outcomes
    if setting.is_sharded and _has_compiled(program.statements):
        # XLA compiles a function for one device, that of its variables.
        setting = dataclasses.replace(setting, is_sharded=False)
    batches = [batch(rows, seed + i) for i, rows in enumerate(setting.rows)]
    plain = _run(program, setting, batches, None)
    if plain.error is not None and not (setting.fails and plain.fails_as_asked):
        outcomes[f"plain fails: {plain.error[:60]}"] += 1
        return None
    if plain.nodes * setting.workers > _LARGE and seed % _LARGE_SHARE:
        outcomes["large"] += 1
        return None
    outcomes[ON_TOWERS] += 1
    towers = _run(program, setting, batches, _devices_of(setting))
    outcomes["both fail" if plain.error else "compared"] += 1
    if plain.error is not None:
        if towers.error is None:
            return Failure("no error", f"plain: {plain.error}")
        if not towers.is_unchanged and plain.is_unchanged:
            return Failure("changes variables", f"after {towers.error}")
        return None
    if towers.error is not None:
        return Failure(f"fails: {towers.error.splitlines()[0][:100]}", towers.error)
    apart = _apart(plain, towers)
    kinds = kinds_of(program.statements)
    if apart <= max([_TOLERANCE, *(tolerance for kind, tolerance in _TOLERANCES.items() if kind in kinds)]):
        return None
    draw = np.random.default_rng(seed)
    nudged = [(x * (1 + _NUDGE * draw.choice([-1, 1], size=x.shape)), labels) for x, labels in batches]
    own = _run(program, setting, nudged, None)
    if own.error is not None or 1000 * _apart(plain, own) >= apart:
        outcomes["amplifies rounding"] += 1
        return None
    return Failure("differs", f"by {apart:.1e}, and plainly by {_apart(plain, own):.1e} with rounded inputs")


def check_packing(program, setting, seed):
    """Compares a program whose devices send packed messages with the same one without, bit for bit.

    Where a program rounds much, this sees more than a comparison with the plain program.
    """
    batches = [batch(rows, seed + i) for i, rows in enumerate(setting.rows)]
    # TensorFlow's graph optimizer rounds otherwise where it knows more, and XLA where it compiles other parts.
    ways = [dataclasses.replace(setting, is_compiled=False, is_optimized=False, is_packed=packs) for packs in (False, True)]
    seen = [set(), set()]
    # Some kernels round otherwise from run to run: a difference is one that stays.
    for _ in range(_PACKING_RUNS):
        apart, packed = (_run(program, way, batches, _devices_of(setting)) for way in ways)
        if bool(apart.error) != bool(packed.error):
            return Failure("packs otherwise", f"{apart.error} and packed {packed.error}")
        for results, outcome in zip(seen, (apart, packed), strict=True):
            results.add(b"".join(array.tobytes() for array in outcome.arrays))
        if not seen[0].isdisjoint(seen[1]):
            return None
    return Failure("packs otherwise", f"by {_apart(apart, packed):.1e}")


def _devices_of(setting):
    return [f"CPU:{1 + i}" for i in range(setting.towers)]


def _has_compiled(statements):
    """Returns whether one of the statements, or one in their bodies, is a function that XLA compiles."""
    within = any(_has_compiled(body.statements) for statement in statements for body in statement.bodies)
    return within or any(statement.parameters.get("compiled") for statement in statements)


@dataclasses.dataclass
class _Outcome:
    """The results of all steps and the variables after them, and what an error tells."""

    arrays: list[np.ndarray]
    error: str | None = None
    is_unchanged: bool = True  # whether the variables have their first values
    fails_as_asked: bool = False  # whether a check of the program failed in the first step
    nodes: int = 0  # of the program

    def is_same(self, other):
        """Returns whether two workers have the same results and variables, or both failed and left the same behind."""
        if self.error or other.error:
            return bool(self.error) == bool(other.error) and self.is_unchanged == other.is_unchanged
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(np.array_equal(one, another, equal_nan=True) for one, another in pairs)


def _run(program, setting, batches, devices):
    """Runs a program on the towers of all workers; plainly if there are no devices."""
    if devices is None or setting.workers == 1:
        return prepared(program, setting, batches, devices)()
    meeting = Meeting(setting.workers)
    # Traced one after the other, so that none waits at a meeting for the traces of others.
    workers = [InMemory(meeting, index) for index in range(setting.workers)]
    outcomes = meeting.run([prepared(program, setting, batches, devices, worker) for worker in workers])
    first = min(outcomes, key=lambda outcome: "BrokenBarrier" in (outcome.error or ""))
    if all(outcome.is_same(first) for outcome in outcomes):
        return first
    return dataclasses.replace(first, error="WorkersDiffer: " + "; ".join(str(outcome.error) for outcome in outcomes))


def prepared(program, setting, batches, devices, collectives=None):
    """Traces and partitions a program, and returns a function that runs it on the batches. That raises no error."""
    # TensorFlow itself may wait forever in a plain loop that reads variables of several devices.
    is_sharded = setting.is_sharded and devices is not None
    state = State([f"CPU:{i}" for i in range(setting.towers + 1)] if is_sharded else [HOME])
    state.fails = setting.fails
    try:
        function = _traced(step_of(program, state), setting, devices, collectives)
    except Exception as error:
        return functools.partial(_failed, error, state)
    return functools.partial(_outcome, function, state, setting, batches)


def _traced(step, setting, devices, collectives):
    rows = setting.rows[0] if setting.is_static else None
    specs = [tf.TensorSpec((rows, WIDTH), tf.float64), tf.TensorSpec((rows,), tf.int64)]
    if devices is None:
        return tf.function(step, autograph=False).get_concrete_function(*specs)
    options = {"jit_compile": setting.is_compiled, "pack_copies": setting.is_packed, "collectives": collectives}
    with reading_at_random(setting.rows[0]) if setting.reads_at_random else contextlib.nullcontext():
        return partitioned_step(step, specs, [True, True], rows, devices, HOME, **options)[0]


def _outcome(function, state, setting, batches):
    """Runs a step on batches, one after the other, up to the first error."""
    results = []
    try:
        # The optimizer's options are those of one thread, and each worker has its own.
        with contextlib.nullcontext() if setting.is_optimized else graph_optimizer(disable_meta_optimizer=True):
            for x, labels in batches:
                results += map(np.array, tf.nest.flatten(function(tf.constant(x), tf.constant(labels))))
    except Exception as error:
        return _failed(error, state, is_first=not results)
    graph = function.graph.as_graph_def()
    nodes = len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)
    return _Outcome([*results, *state.values()], nodes=nodes)


def _failed(error, state, is_first=True):
    is_asked = isinstance(error, tf.errors.InvalidArgumentError) and "x < y" in str(error) and is_first
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, tf.errors.OpError):
        text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    return _Outcome([], text, state.is_first(), is_asked)


def _apart(one, other):
    return max(difference(a, b) for a, b in zip(one.arrays, other.arrays, strict=True))
