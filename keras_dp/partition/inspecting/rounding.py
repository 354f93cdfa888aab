"""Tell how far rounding may move the tensors of a step."""

import math

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.node import Static
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.names import Output, data_inputs, output_of
from keras_dp.partition.tracing.traced import Traced

# The relative size of the last place of a number.
LAST_PLACES = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# The kernels of CPUs round each of their additions.
_ADDING_IN_SEQUENCE = ("BiasAddGrad", "SegmentSum", "UnsortedSegmentSum")
_PASSING_ON = ("Cast", "Identity", "Reshape")
UNITS = 16  # of the last place, that a few operations may add up to
_WHOLE = 2.0  # times a number: rounding has turned its sign


class Rounding:
    """Tells how far rounding may move the tensors of a step, and rounds numbers otherwise than they are.

    In full precision, by some units of the last place. In half precision, a step rounds numbers on their way: there, by so much
    that every few numbers are rounded to a neighbour.

    Args:
        traced: the step.
        batch_rows: B.

    Attributes:
        times: how many times as much as by this rounding a tensor may differ.
        half: the relative size of the last place of numbers in half precision; 0 if the step has none.
        addends: for each node whose numbers are sums in half precision, the tensor of the numbers that were added.
    """

    def __init__(self, traced: Traced, batch_rows: int):
        dtypes = {static.dtype.name for node in traced.nodes for static in traced.statics[node.name]}
        half = [LAST_PLACES[name] for name in ("bfloat16", "float16") if name in dtypes]
        self.half = half[0] if half else 0.0
        self._sums = _longest_sums(traced, batch_rows) if half else {}
        self.addends = _addends(traced) if half else {}
        # Rounding by neighbours moves numbers as far as the step itself does; by units, only as far as the least that it may.
        self.times = 10 if half else 100

    def of(self, value: np.ndarray) -> np.ndarray:
        """Returns floating-point numbers that are rounded otherwise, and others as they are."""
        # Whole numbers may be classes, tokens or masks, which mean something else if they are not whole.
        if value.dtype.name not in LAST_PLACES or np.array_equal(value, np.round(value.astype(np.float64)), equal_nan=True):
            return value
        return _moved(value, self._relative(value.dtype) * np.abs(value.astype(np.float64)))

    def of_weights(self, value: np.ndarray) -> np.ndarray:
        """Returns trainable numbers that are rounded otherwise, whole ones too.

        Zeros move by units of the last place of the largest number, or of 1. Otherwise the layers of zeros that many models
        begin with would hide how a step rounds its sums.
        """
        if value.dtype.name not in LAST_PLACES or not value.size:
            return value
        sizes = np.abs(value.astype(np.float64))
        of_zeros = UNITS * LAST_PLACES[value.dtype.name] * (sizes.max() or 1.0)
        return _moved(value, np.where(sizes > 0.0, self._relative(value.dtype) * sizes, of_zeros))

    def _relative(self, dtype: np.dtype) -> float:
        units = UNITS * LAST_PLACES[dtype.name] if dtype.itemsize > 2 else 0.0
        # One number in four is then rounded to a neighbour in half precision.
        return max(units, self.half / 8)

    def of_sums(self, name: str, value: np.ndarray, start: np.ndarray | None) -> float:
        """Returns how far sums in half precision may move the tensor of a node: they round after each addition.

        That is up to n units of the last place for n numbers that are added one after the other (Higham, Accuracy and Stability
        of Numerical Algorithms, section 4.2), and at most twice the sum.

        Args:
            name: the name of the node, or of a variable's argument.
            value: the tensor.
            start: the variable's value before the step; None for other tensors.
        """
        additions = self._sums.get(name, 0)
        if not additions or value.dtype.name not in LAST_PLACES:
            return 0.0
        made = np.abs(value.astype(np.float64) - (0.0 if start is None else start.astype(np.float64)))
        largest = float(np.max(made, initial=0.0, where=np.isfinite(made)))
        # The first steps of Adam and the like have one size: rounding may turn the sign of those whose gradient is almost 0.
        moved = made[made > 0.0]
        are_several = moved.size > 1 or made.size == moved.size == 1
        has_one_size = start is not None and are_several and np.median(moved) > 0.9 * largest
        return (_WHOLE if has_one_size else min(max(UNITS, additions) * self.half, _WHOLE)) * largest

    def of_addends(self, sizes: float, sums: int) -> float:
        """Returns how far rounding may move sums in half precision, also where the numbers that were added cancel each other.

        What is left of these depends on their order alone, as the gradient of a bias before batch normalization. It is some
        units of the last place of what was added.

        Args:
            sizes: the sum of the absolute values of all numbers that were added.
            sums: the number of sums.
        """
        return UNITS * self.half * sizes / max(1, sums)


def _moved(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=value.shape)
    return np.asarray(value.astype(np.float64) + signs * by).astype(value.dtype)


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
