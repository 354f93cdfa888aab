"""Say how far two results of a step may differ, and why."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.node import Static
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.names import Output, data_inputs, output_of
from keras_dp.partition.tracing.traced import Traced

# The relative size of the last place of a number.
_LAST_PLACES = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# The kernels of CPUs round each of their additions.
_ADDING_IN_SEQUENCE = ("BiasAddGrad", "SegmentSum", "UnsortedSegmentSum")
_PASSING_ON = ("Cast", "Identity", "Reshape")
_UNITS = 16  # of the last place, that a few operations may add up to
_WHOLE = 2.0  # times a number: rounding has turned its sign


def usual_tolerance(dtype: str) -> float:
    """Returns the largest difference that counts as none for a model of this dtype, if its user says no other."""
    return {"float64": 1e-9, "float32": 1e-4}.get(dtype, 1e-2)


def difference(one: Any, other: Any) -> float:
    """Returns the largest difference of two arrays, relative for numbers above 1 and absolute for others."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return float("inf")
    if np.array_equal(one, other):
        return 0.0
    if one.dtype.kind not in "fciub" and one.dtype.name not in _LAST_PLACES:
        return 1.0
    a, b = (value.astype(complex if one.dtype.kind == "c" else float) for value in (one, other))
    if one.dtype.kind in "iub":
        # A count that is wrong by one is wrong, however large it is.
        return max(1.0, float(np.abs(a - b).max()))
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(a))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart)).max())


@dataclasses.dataclass(frozen=True)
class Compared:
    """Holds what a step makes of a tensor on one device, on towers, and on one device with numbers rounded otherwise.

    Attributes:
        plain: the tensor on one device.
        on_towers: the tensor on towers.
        otherwise: the tensor on one device, if the batch and the variables are rounded otherwise.
        start: a variable before the step; None for other tensors.
        start_otherwise: the same, rounded otherwise.
        added: the sum of the absolute values of all numbers of half precision whose sums the tensor holds.
    """

    plain: np.ndarray
    on_towers: np.ndarray
    otherwise: np.ndarray
    start: Any = None
    start_otherwise: Any = None
    added: float = 0.0

    @functools.cached_property
    def has_change(self) -> bool:
        """Whether it is a variable of finite floating-point numbers that keeps its shape, so that its change is a number."""
        if self.start is None or self.plain.dtype.name not in _LAST_PLACES or not self.plain.size:
            return False
        values = (self.plain, self.on_towers, self.otherwise, self.start, self.start_otherwise)
        return len({value.shape for value in values}) == 1 and all(np.isfinite(_exact(value)).all() for value in values)

    @functools.cached_property
    def largest_change(self) -> float:
        """The largest change of an entry on one device."""
        return _apart(self.plain, self.start)


class Measured(NamedTuple):
    """Holds how far a tensor differs.

    Attributes:
        apart: the difference between one device and towers, relative for numbers above 1 and absolute for others.
        excess: the same, as a multiple of the one that is allowed.
        own: the difference on one device, if the batch and the variables are rounded otherwise.
    """

    apart: float
    excess: float
    own: float

    @property
    def is_different(self) -> bool:
        """Whether the tensor differs by more than is allowed. No number does, too."""
        return not self.excess <= 1.0


class Tolerance:
    """Tells how far rounding may move the tensors of a step: by the largest of these.

    - `least`, relative for numbers above 1 and absolute for others. For a variable, it is a share of its largest change in the
      step, or of its largest entry if it does not change, so that small variables count as much as large ones.
    - Some units of the last place of a variable: its change is rounded when it is added.
    - Many times as much as the tensor differs from itself on one device, if the batch and the variables are rounded otherwise:
      some programs amplify rounding. Numbers move by some units of the last place; if the step has some of half precision, by
      so much that every few numbers are rounded to a neighbour there.
    - What is lost in sums of half precision, which round after each addition.

    Args:
        traced: the step.
        batch_rows: B.
        least: the largest difference that always counts as none.

    Attributes:
        least: the same.
        addends: for each node whose numbers are sums in half precision, the tensor of the numbers that were added.
    """

    def __init__(self, traced: Traced, batch_rows: int, least: float):
        self.least = least
        dtypes = {static.dtype.name for node in traced.nodes for static in traced.statics[node.name]}
        # The relative size of the last place in half precision; 0 if the step has none.
        self._half = next((_LAST_PLACES[name] for name in ("bfloat16", "float16") if name in dtypes), 0.0)
        self._sums = _longest_sums(traced, batch_rows) if self._half else {}
        self.addends = _addends(traced) if self._half else {}
        # Rounding by neighbours moves numbers as far as the step itself does; by units, only as far as the least that it may.
        self._times = 10 if self._half else 100

    def rounded_otherwise(self, value: np.ndarray, is_weight: bool = False) -> np.ndarray:
        """Returns floating-point numbers that are rounded otherwise, and others as they are."""
        if value.dtype.name not in _LAST_PLACES or not value.size:
            return value
        exact, units = _exact(value), _UNITS * _LAST_PLACES[value.dtype.name]
        # Whole numbers may be classes, tokens or masks, which mean something else if they are not whole.
        if not is_weight and np.array_equal(exact, np.round(exact), equal_nan=True):
            return value
        sizes = np.abs(exact)
        # One number in four is then rounded to a neighbour in half precision.
        by = sizes * max(units if value.dtype.itemsize > 2 else 0.0, self._half / 8)
        if is_weight:
            # Otherwise the layers of zeros that many models begin with would hide how a step rounds its sums.
            by = np.where(sizes > 0.0, by, units * (sizes.max() or 1.0))
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=value.shape)
        return np.asarray(exact + signs * by).astype(value.dtype)

    def measure(self, name: str, tensor: Compared, floor: float = 0.0) -> Measured:
        """Measures a tensor of the node of this name, or the variable that is the argument of this name.

        Args:
            name: the name.
            tensor: the tensor.
            floor: the change of a variable that counts as none; see `floors`.
        """
        plain, apart, of_sums = tensor.plain, difference(tensor.plain, tensor.on_towers), self._of_sums(name, tensor)
        if not tensor.has_change:
            own = difference(plain, tensor.otherwise)
            explained = self._times * own if np.isfinite(own) else 0.0
            # What is left of numbers that cancel each other depends on their order alone.
            of_addends = _UNITS * self._half * tensor.added / max(1, plain.size)
            return Measured(apart, apart / max(self.least, explained, of_sums, of_addends), own)
        own = _apart(_exact(tensor.otherwise) - _exact(tensor.start_otherwise), _exact(plain) - _exact(tensor.start))
        if max(tensor.largest_change, _apart(tensor.on_towers, tensor.start)) < floor:
            return Measured(apart, 0.0, own)
        size = float(np.abs(_exact(plain)).max())
        least = self.least * min(1.0, tensor.largest_change or size or 1.0)
        allowed = max(least, self._times * own, of_sums, _UNITS * _LAST_PLACES[plain.dtype.name] * size)
        return Measured(apart, _apart(plain, tensor.on_towers) / allowed, own)

    def floors(self, variables: Iterable[tuple[str, Compared]]) -> dict[str, float]:
        """Returns, for each kind of variables, the change that half precision may make of nothing.

        A gradient that is zero, as that of a bias before batch normalization, is a sum of numbers of half precision that cancel
        each other. What rounding leaves of it may be any number up to the last place of other gradients; squares of it, as Adam
        keeps them, any up to the square of that.

        Args:
            variables: all variables of the step with their kinds.
        """
        changing: dict[str, list[Compared]] = {}
        for kind, variable in variables if self._half else ():
            if variable.has_change:
                changing.setdefault(kind, []).append(variable)
        powers = {kind: 2 if all(_exact(one.plain).min() >= 0.0 for one in alike) else 1 for kind, alike in changing.items()}
        return {kind: max(one.largest_change for one in changing[kind]) * self._half**power for kind, power in powers.items()}

    def _of_sums(self, name: str, tensor: Compared) -> float:
        """Returns how far sums in half precision may move a tensor.

        That is up to n units of the last place for n numbers that are added one after the other (Higham, Accuracy and Stability
        of Numerical Algorithms, section 4.2), and at most twice the sum.
        """
        additions = self._sums.get(name, 0)
        if not additions or tensor.plain.dtype.name not in _LAST_PLACES:
            return 0.0
        made = np.abs(_exact(tensor.plain) - (_exact(tensor.start) if tensor.has_change else 0.0))
        largest = float(np.max(made, initial=0.0, where=np.isfinite(made)))
        # The first steps of Adam and the like have one size: rounding may turn the sign of those whose gradient is almost 0.
        moved = made[made > 0.0]
        are_several = moved.size > 1 or made.size == moved.size == 1
        has_one_size = tensor.has_change and are_several and np.median(moved) > 0.9 * largest
        return (_WHOLE if has_one_size else min(max(_UNITS, additions) * self._half, _WHOLE)) * largest


def _exact(value: Any) -> np.ndarray:
    return np.asarray(value).astype(np.float64)


def _apart(one: Any, other: Any) -> float:
    return float(np.abs(_exact(one) - _exact(other)).max())


def _addends(traced: Traced) -> dict[str, Output]:
    found: dict[str, Output] = {}
    for node in traced.nodes:
        if node.op in (*_ADDING_IN_SEQUENCE, *_PASSING_ON):
            name, port = output_of(data_inputs(node)[0])
            if node.op in _PASSING_ON and name in found:
                found[node.name] = found[name]
            elif node.op in _ADDING_IN_SEQUENCE and _is_half(traced.statics[name][port]):
                found[node.name] = name, port
    return found


def _is_half(static: Static) -> bool:
    return bool(static.dtype.is_floating and static.dtype.size == 2)


def _longest_sums(traced: Traced, batch_rows: int) -> dict[str, int]:
    """Returns, by node, how many numbers of half precision were added one after the other, to make it or what it depends on.

    A node that depends on no number of half precision has 0, and one that adds none up has 1. A node that writes variables,
    such as a branch, counts under the names of their arguments, too.
    """

    def size(static: Static) -> int:
        return math.prod(size if isinstance(size, int) else batch_rows for size in static.shape or ())

    found: dict[str, int] = {}
    for node in traced.nodes:
        sources = list(map(output_of, data_inputs(node)))
        longest = max((found.get(name, 0) for name, _ in sources), default=0)
        if any(map(_is_half, traced.statics[node.name])):
            longest = max(longest, 1)
        if node.op in _ADDING_IN_SEQUENCE:
            taken = [traced.statics[name][port] for name, port in sources]
            made = max(1, size(traced.statics[node.name][0]))
            longest = max([longest, *(size(static) // made for static in taken if _is_half(static))])
        found[node.name] = longest
        if is_stateful(node.op):
            for handle in (name for name, port in sources if traced.statics[name][port].dtype == tf.resource):
                found[handle] = max(found.get(handle, 0), longest)
    return found
