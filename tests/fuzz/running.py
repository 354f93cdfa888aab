"""Run a program plainly and partitioned, and compare its results and the variables that it leaves."""

import contextlib
import dataclasses
import functools
import json
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from partitioned_steps import partitioned_step, reading_at_random

from fuzz.drawing import batch, kinds_of
from fuzz.programs import Program, State, Statement, step_of
from fuzz.workers import InMemory, Meeting
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.partition.inspecting.both_ways import difference

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
    """The way in which a program is partitioned.

    Attributes:
        towers: the number of towers.
        rows: the numbers of rows of the batches, one after the other.
        is_static: whether the number of rows is known while the step is traced; all batches have as many then.
        is_packed: whether devices send packed messages.
        is_sharded: whether variables are on several devices.
        is_compiled: whether XLA compiles the towers' operations.
        fails: whether the checks of the program fail.
        reads_at_random: whether integers are read as row counts at random; see `readings`.
        is_optimized: whether TensorFlow's graph optimizer changes the graph.
        workers: the number of workers, each of which has so many towers.
    """

    towers: int
    rows: tuple[int, ...]
    is_static: bool = False
    is_packed: bool = False
    is_sharded: bool = False
    is_compiled: bool = False
    fails: bool = False
    reads_at_random: bool = False
    is_optimized: bool = True
    workers: int = 1


def draw_setting(seed: int) -> Setting:
    """Draws a setting."""
    rng = random.Random(seed + 1)
    towers, is_static = rng.randint(1, 4), rng.random() < 0.5
    few = rng.choice([7, 8, 5, 6, 9, 3, 2, 1])
    rows = (few, few) if is_static else (rng.choice([7, 8, 5]), rng.choice([1, 2, 3, 4]), few)
    packed, sharded, compiled, fails, reads = (rng.random() < share for share in (0.5, 0.4, 0.06, 0.3, 0.5))
    workers = rng.choice([1, 1, 1, 1, 1, 1, 2, 3])
    towers = towers if workers == 1 else min(towers, 2)
    return Setting(towers, rows, is_static, packed, sharded, compiled, fails, is_static and reads, workers)


def of_kept(path: Path) -> tuple[Program, Setting, int]:
    """Reads a program that failed once, its setting and its seed."""
    kept = json.loads(path.read_text())
    setting = {**kept["setting"], "rows": tuple(kept["setting"]["rows"])}
    return Program.from_json(json.dumps(kept["program"])), Setting(**setting), kept["seed"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A difference between the plain and the partitioned program.

    Attributes:
        symptom: "differs", "fails" or "changes variables"; with the first line of an error.
        details: numbers or a traceback.
    """

    symptom: str
    details: str


def check(program: Program, setting: Setting, seed: int, outcomes: Counter[str] | None = None) -> Failure | None:
    """Compares a program on towers with the plain one; None if they are the same, or if they cannot be compared.

    Args:
        program: the program.
        setting: the way in which it is partitioned.
        seed: the seed of the batches.
        outcomes: counts why a program is not compared, and how many are.
    """
    outcomes = Counter() if outcomes is None else outcomes
    if setting.is_sharded and any(map(_is_compiled, program.statements)):
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
    towers = _run(program, setting, batches, [f"CPU:{1 + i}" for i in range(setting.towers)])
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
    if apart <= tolerance_of(program):
        return None
    draw = np.random.default_rng(seed)
    nudged = [(x * (1 + _NUDGE * draw.choice([-1, 1], size=x.shape)), labels) for x, labels in batches]
    own = _run(program, setting, nudged, None)
    if own.error is not None or 1000 * _apart(plain, own) >= apart:
        outcomes["amplifies rounding"] += 1
        return None
    return Failure("differs", f"by {apart:.1e}, and plainly by {_apart(plain, own):.1e} with rounded inputs")


def check_packing(program: Program, setting: Setting, seed: int) -> Failure | None:
    """Compares a program whose devices send packed messages with the same one without, bit for bit.

    Where a program rounds much, this sees more than a comparison with the plain program.
    """
    batches = [batch(rows, seed + i) for i, rows in enumerate(setting.rows)]
    devices = [f"CPU:{1 + i}" for i in range(setting.towers)]
    # TensorFlow's graph optimizer rounds otherwise where it knows more, and XLA where it compiles other parts.
    ways = [dataclasses.replace(setting, is_compiled=False, is_optimized=False, is_packed=packs) for packs in (False, True)]
    seen: list[set[bytes]] = [set(), set()]
    # Some kernels round otherwise from run to run: a difference is one that stays.
    for _ in range(_PACKING_RUNS):
        apart, packed = (_run(program, way, batches, devices) for way in ways)
        if bool(apart.error) != bool(packed.error):
            return Failure("packs otherwise", f"{apart.error} and packed {packed.error}")
        for results, outcome in zip(seen, (apart, packed), strict=True):
            results.add(b"".join(array.tobytes() for array in outcome.arrays))
        if not seen[0].isdisjoint(seen[1]):
            return None
    return Failure("packs otherwise", f"by {_apart(apart, packed):.1e}")


def _is_compiled(statement: Statement) -> bool:
    """Returns whether a statement, or one in its bodies, is a function that XLA compiles."""
    inner = [one for body in statement.bodies for one in body.statements]
    return bool(statement.parameters.get("compiled")) or any(map(_is_compiled, inner))


def tolerance_of(program: Program) -> float:
    """Returns the largest difference that rounding may make."""
    kinds = kinds_of(program)
    return max([_TOLERANCE, *(tolerance for kind, tolerance in _TOLERANCES.items() if kind in kinds)])


@dataclasses.dataclass
class _Outcome:
    results: list[list[np.ndarray]]
    variables: list[np.ndarray]
    error: str | None = None
    is_unchanged: bool = True
    fails_as_asked: bool = False
    nodes: int = 0

    def is_same(self, other: "_Outcome") -> bool:
        """Returns whether two workers have the same results and variables, or both failed and left the same behind."""
        if self.error or other.error:
            return bool(self.error) == bool(other.error) and self.is_unchanged == other.is_unchanged
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(np.array_equal(one, another, equal_nan=True) for one, another in pairs)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The results of all steps, and the variables after them."""
        return [*(array for arrays in self.results for array in arrays), *self.variables]


def _run(program: Program, setting: Setting, batches: Any, devices: list[str] | None) -> _Outcome:
    if devices is None or setting.workers == 1:
        return _Run(program, setting, devices).prepared(batches).on(batches)
    meeting = Meeting(setting.workers)
    # Traced one after the other, so that none waits at a meeting for the traces of others.
    workers = [InMemory(meeting, index) for index in range(setting.workers)]
    runs = [_Run(program, setting, devices, worker).prepared(batches) for worker in workers]
    outcomes = meeting.run([functools.partial(run.on, batches) for run in runs])
    first = min(outcomes, key=lambda outcome: "BrokenBarrier" in (outcome.error or ""))
    if all(outcome.is_same(first) for outcome in outcomes):
        return first
    return dataclasses.replace(first, error="WorkersDiffer: " + "; ".join(str(outcome.error) for outcome in outcomes))


class _Run:
    """A program's step and variables, ready to run.

    Args:
        program: the program.
        setting: the way in which it is partitioned.
        devices: the devices of the towers; None for the plain program.
        collectives: the collectives of one of several workers.
    """

    def __init__(self, program: Program, setting: Setting, devices: list[str] | None, collectives: InMemory | None = None):
        # TensorFlow itself may wait forever in a plain loop that reads variables of several devices.
        is_sharded = setting.is_sharded and devices is not None
        self.state = State([f"CPU:{i}" for i in range(setting.towers + 1)] if is_sharded else [HOME])
        self.state.fails = setting.fails
        self._step, self._setting, self._devices = step_of(program, self.state), setting, devices
        self._collectives = collectives
        self._function: Callable[..., Any] | Exception

    def function(self, shape: Sequence[int]) -> Callable[..., Any]:
        """Traces the step for batches of a shape, and partitions it."""
        setting = self._setting
        sizes = shape if setting.is_static else (None, *shape[1:])
        specs = [tf.TensorSpec(sizes, tf.float64), tf.TensorSpec(sizes[:1], tf.int64)]
        if self._devices is None:
            return tf.function(self._step, autograph=False).get_concrete_function(*specs)
        known_rows = setting.rows[0] if setting.is_static else None
        options = {"jit_compile": setting.is_compiled, "pack_copies": setting.is_packed, "collectives": self._collectives}
        with reading_at_random(setting.rows[0]) if setting.reads_at_random else contextlib.nullcontext():
            return partitioned_step(self._step, specs, [True, True], known_rows, self._devices, HOME, **options)[0]

    def prepared(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> "_Run":
        """Traces and partitions the step for some batches. An error is raised when it runs."""
        try:
            self._function = self.function(batches[0][0].shape)
        except Exception as error:
            self._function = error
        return self

    def on(self, batches: Sequence[tuple[np.ndarray, np.ndarray]]) -> _Outcome:
        """Runs the step on batches, one after the other, up to the first error."""
        results: list[list[np.ndarray]] = []
        try:
            function = self._function
            if isinstance(function, Exception):
                raise function
            # The optimizer's options are those of one thread, and each worker has its own.
            with contextlib.nullcontext() if self._setting.is_optimized else graph_optimizer(disable_meta_optimizer=True):
                for x, labels in batches:
                    tensors = tf.nest.flatten(function(tf.constant(x), tf.constant(labels)))
                    results.append([np.array(tensor) for tensor in tensors])
        except Exception as error:
            is_asked = isinstance(error, tf.errors.InvalidArgumentError) and "x < y" in str(error) and not results
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, tf.errors.OpError):
                text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
            return _Outcome(results, [], text, self.state.is_first(), is_asked)
        return _Outcome(results, self.state.values(), nodes=_nodes(function))


def _nodes(function: Any) -> int:
    """Returns the number of nodes of a function and those that it calls."""
    graph = function.graph.as_graph_def()
    return len(graph.node) + sum(len(inner.node_def) for inner in graph.library.function)


def _apart(one: _Outcome, other: _Outcome) -> float:
    return max(difference(a, b) for a, b in zip(one.arrays, other.arrays, strict=True))
