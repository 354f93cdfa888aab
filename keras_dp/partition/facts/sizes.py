"""Compute shapes and axes as far as they are known before there is a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts import rows
from keras_dp.partition.facts.node import Node
from keras_dp.partition.facts.placements import array_of
from keras_dp.partition.facts.rows import GLOBAL, Number, Rows, Size

Entries = np.ndarray

LARGEST = 64  # the most entries of a tensor that is evaluated
_LARGEST_COEFFICIENT = 2**20  # of a number that is not known; a kernel's product may wrap around with a larger one


@dataclasses.dataclass(frozen=True)
class BroadcastAxes:
    """The axes over which the gradient of a broadcast operand is summed.

    Attributes:
        surely: the axes over which it is known to be summed.
        perhaps: these axes, and the axes for which this is unknown.
    """

    surely: frozenset[int]
    perhaps: frozenset[int]


def evaluate(node: Node) -> list[Entries | None] | None:
    """Computes the entries of each output of a node from its inputs' sizes and entries; None if nothing is known."""
    if node.type in ("Shape", "ShapeN"):
        sizes = [node.sizes(i) for i in range(len(node.inputs))]
        return [None if size is None else array_of(size) for size in sizes]
    if node.type == "Size":
        size = node.sizes(0)
        return None if size is None else [array_of(rows.product(size))]
    if node.type == "Rank":
        return None if node.rank(0) is None else [array_of(node.rank(0))]
    entries = [facts.entries for facts in node.inputs]
    if node.type not in EVALUATORS or not entries or any(known is None for known in entries):
        return None
    if any(isinstance(number, BroadcastAxes) for known in entries for number in known.flat):  # type: ignore[union-attr]
        return None
    try:
        results = EVALUATORS[node.type](node, *entries)
    except (_NotPlainError, IndexError, ValueError, ZeroDivisionError):
        return None
    if results is None:
        return None
    results = results if isinstance(results, list) else [results]
    return [_fitting(_array(result), static.dtype) for result, static in zip(results, node.results, strict=False)]


def _fitting(entries: Entries, dtype: tf.DType) -> Entries | None:
    """Returns the entries if they fit into their dtype; None if not, since the kernel computes other numbers."""
    if all(isinstance(number, BroadcastAxes) or _fits(number, dtype) for number in entries.flat):
        return entries
    return None


def _fits(number: Number, dtype: tf.DType) -> bool:
    if isinstance(number, int):
        return bool(dtype == tf.bool or dtype.min <= number <= dtype.max)
    blocks = number.blocks if isinstance(number, Rows) else () if number is GLOBAL else (number,)
    coefficients = [block.coefficient if isinstance(block, Size) else block for block in blocks]
    return all(abs(coefficient) <= _LARGEST_COEFFICIENT for coefficient in coefficients)


class _NotPlainError(Exception):
    """Reports that a number has to be a plain integer, but depends on unknown sizes."""


def _plain(entries: Entries) -> list[int]:
    numbers = list(entries.flat)
    if any(not isinstance(number, int) for number in numbers):
        raise _NotPlainError
    return numbers


def _plain_array(entries: Entries) -> np.ndarray:
    return np.array(_plain(entries), dtype=object).reshape(entries.shape)


EVALUATORS: dict[str, Callable[..., Any]] = {}


def _evaluates(*types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        EVALUATORS.update(dict.fromkeys(types, function))
        return function

    return register


def _each(operation: Callable[..., Number]) -> Callable[..., Entries]:
    function = np.frompyfunc(operation, 2, 1)

    def evaluate_each(node: Node, a: Entries, b: Entries) -> Entries:
        result = function(a, b)
        return result if isinstance(result, np.ndarray) else array_of(result)

    return evaluate_each


for _types, _operation in (
    (("Mul",), rows.multiply),
    (("Add", "AddV2"), rows.add),
    (("Sub",), rows.subtract),
    (("FloorDiv",), rows.divide),
    (("Maximum",), rows.larger),
):
    EVALUATORS.update(dict.fromkeys(_types, _each(_operation)))


@_evaluates("Identity", "StopGradient", "Snapshot")
def _same(node: Node, value: Entries) -> Entries:
    return value


@_evaluates("Cast")
def _cast(node: Node, value: Entries) -> Entries | None:
    return None if node.result_dtype() == tf.bool != node.dtype(0) else value


@_evaluates("Neg")
def _negative(node: Node, value: Entries) -> Entries:
    return np.array([rows.multiply(-1, number) for number in value.flat] + [None], object)[:-1].reshape(value.shape)


@_evaluates("Prod", "Sum", "Max", "Min")
def _reduced(node: Node, value: Entries, axes: Entries) -> Entries | None:
    reduced = _plain(axes)
    if value.ndim > 1:
        return None
    if value.ndim == 1 and not reduced:
        return value
    if node.type in ("Max", "Min"):
        numbers = _plain(value)
        result: Number = max(numbers) if node.type == "Max" else min(numbers)
    elif node.type == "Prod":
        result = rows.product(value.flat)
    else:
        result = 0
        for number in value.flat:
            result = rows.add(result, number)
    return array_of([result]) if node.flag("keep_dims") and value.ndim else array_of(result)


@_evaluates("Pack")
def _pack(node: Node, *values: Entries) -> Entries:
    return np.stack(values, node.integer("axis"))


@_evaluates("Unpack")
def _unpack(node: Node, value: Entries) -> list[Entries]:
    return [_array(part) for part in np.moveaxis(value, node.integer("axis"), 0)]


@_evaluates("Split")
def _split(node: Node, axis: Entries, value: Entries) -> list[Entries]:
    return np.split(value, len(node.results), _plain(axis)[0])


@_evaluates("SplitV")
def _split_by_sizes(node: Node, value: Entries, sizes: Entries, axis: Entries) -> list[Entries]:
    lengths = _plain(sizes)
    if -1 in lengths:
        lengths[lengths.index(-1)] = value.shape[_plain(axis)[0]] - sum(lengths) - 1
    return np.split(value, np.cumsum(lengths)[:-1], _plain(axis)[0])


@_evaluates("ConcatV2")
def _concat(node: Node, *values: Entries) -> Entries:
    return np.concatenate(values[:-1], _plain(values[-1])[0])


@_evaluates("Reshape")
def _reshape(node: Node, value: Entries, shape: Entries) -> Entries:
    return value.reshape(_plain(shape))


@_evaluates("ExpandDims")
def _expand_dims(node: Node, value: Entries, axis: Entries) -> Entries:
    return np.expand_dims(value, _plain(axis)[0])


@_evaluates("Squeeze")
def _squeeze(node: Node, value: Entries) -> Entries:
    return value.squeeze(tuple(node.integers("squeeze_dims")) or None)


@_evaluates("GatherV2")
def _gather(node: Node, value: Entries, indices: Entries, axis: Entries) -> Entries | None:
    if node.integer("batch_dims") or min(_plain(indices), default=0) < 0:
        return None
    return _array(np.take(value, np.array(_plain(indices), int).reshape(indices.shape), axis=_plain(axis)[0]))


@_evaluates("DynamicStitch")
def _stitch(node: Node, *values: Entries) -> Entries:
    half = len(values) // 2
    numbers: dict[int, Number] = {}
    for indices, data in zip(values[:half], values[half:], strict=True):
        numbers |= dict(zip(_plain(indices), data.flat, strict=True))
    return array_of([numbers.get(i, 0) for i in range(max(numbers) + 1)])


@_evaluates("Slice")
def _slice(node: Node, value: Entries, begin: Entries, size: Entries) -> Entries | None:
    ranges = []
    for count, start, length in zip(value.shape, _plain(begin), _plain(size), strict=True):
        stop = count if length == -1 else start + length
        if not 0 <= start <= stop <= count:
            return None
        ranges.append(slice(start, stop))
    return value[tuple(ranges)]


@_evaluates("StridedSlice")
def _strided_slice(node: Node, value: Entries, *numbers: Entries) -> Entries:
    masks = {name: node.integer(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    index: list[Any] = []
    for i, (begin, end, stride) in enumerate(zip(*map(_plain, numbers), strict=True)):
        bit = {name: mask >> i & 1 for name, mask in masks.items()}
        if bit["ellipsis"]:
            index.append(Ellipsis)
        elif bit["new_axis"]:
            index.append(None)
        elif bit["shrink_axis"]:
            index.append(begin)
        else:
            index.append(slice(None if bit["begin"] else begin, None if bit["end"] else end, stride))
    return _array(value[tuple(index)])


@_evaluates("Range")
def _range(node: Node, *values: Entries) -> Entries | None:
    numbers = range(*(_plain(value)[0] for value in values))
    return array_of(list(numbers)) if len(numbers) <= LARGEST else None


@_evaluates("FloorMod")
def _modulo(node: Node, a: Entries, b: Entries) -> Entries:
    return np.mod(_plain_array(a), _plain_array(b))


@_evaluates("InvertPermutation")
def _inverse(node: Node, value: Entries) -> Entries:
    order = _plain(value)
    return array_of([order.index(i) for i in range(len(order))])


@_evaluates("Fill")
def _fill(node: Node, shape: Entries, value: Entries) -> Entries | None:
    sizes = _plain(shape)
    if int(np.prod(sizes)) > LARGEST:
        return None
    result = np.empty(sizes, object)
    result.fill(value.item())
    return result


@_evaluates("OnesLike", "ZerosLike")
def _constant_like(node: Node, value: Entries) -> Entries:
    result = np.empty(value.shape, object)
    result.fill(int(node.type == "OnesLike"))
    return result


@_evaluates("Tile")
def _tile(node: Node, value: Entries, multiples: Entries) -> Entries | None:
    times = _plain(multiples)
    return np.tile(value, times) if value.size * int(np.prod(times)) <= LARGEST else None


@_evaluates("ConcatOffset")
def _offsets(node: Node, axis: Entries, *shapes: Entries) -> list[Entries]:
    (along,) = _plain(axis)
    total: Number = 0
    results = []
    for shape in shapes:
        offsets: list[Number] = [0] * len(shape)
        offsets[along] = total
        results.append(array_of(offsets))
        total = rows.add(total, shape[along])
    return results


@_evaluates("ReverseV2")
def _reverse(node: Node, value: Entries, axes: Entries) -> Entries | None:
    return value[::-1] if value.ndim == 1 and _plain(axes) == [0] else None


@_evaluates("Transpose")
def _transpose(node: Node, value: Entries, order: Entries) -> Entries:
    return value.transpose(_plain(order))


@_evaluates("BroadcastTo")
def _broadcast_to(node: Node, value: Entries, shape: Entries) -> Entries | None:
    sizes = _plain(shape)
    return np.broadcast_to(value, sizes).copy() if int(np.prod(sizes)) <= LARGEST else None


@_evaluates("SelectV2")
def _select(node: Node, condition: Entries, yes: Entries, no: Entries) -> Entries:
    return _array(np.where(_plain_array(condition).astype(bool), yes, no))


@_evaluates("Select")
def _select_by_first_axis(node: Node, condition: Entries, yes: Entries, no: Entries) -> Entries:
    """Selects entries, or with a vector as the condition, the entries of each index of the first axis."""
    return _select(node, condition.reshape(condition.shape + (1,) * (yes.ndim - condition.ndim)), yes, no)


@_evaluates("Minimum")
def _minimum(node: Node, a: Entries, b: Entries) -> Entries:
    return np.minimum(_plain_array(a), _plain_array(b))


_COMPARISONS = {
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
}


@_evaluates(*_COMPARISONS)
def _compare(node: Node, a: Entries, b: Entries) -> Entries:
    result = _COMPARISONS[node.type](_plain_array(a), _plain_array(b))
    return np.array([int(number) for number in np.asarray(result).flat] + [None], object)[:-1].reshape(np.shape(result))


@_evaluates("BroadcastArgs")
def _broadcast_shape(node: Node, a: Entries, b: Entries) -> Entries:
    full = max(len(a), len(b))
    numbers = []
    for x, y in zip([1] * (full - len(a)) + list(a), [1] * (full - len(b)) + list(b), strict=True):
        if x not in (1, y) and y != 1:
            raise _NotPlainError
        numbers.append(y if x == 1 else x)
    return array_of(numbers)


@_evaluates("BroadcastGradientArgs")
def _axes_of_gradients(node: Node, a: Entries, b: Entries) -> list[Entries]:
    """Returns the axes over which each operand's gradient is summed: those that it lacks or has one entry along.

    With one row, a tensor of rows is broadcast, too, where it meets more entries. Where an operation meets entries of unknown
    number, it checks in the step that they are one, or as many as the rows.
    """
    full = max(len(a), len(b))
    shapes = [[1] * (full - len(shape)) + list(shape) for shape in (a, b)]
    results = []
    for (mine, other), length in ((shapes, len(a)), (shapes[::-1], len(b))):
        surely, perhaps = set(), set()
        for axis, (size, opposite) in enumerate(zip(mine, other, strict=True)):
            if axis < full - length or size == 1:
                surely.add(axis)
            elif _may_be_broadcast(size, opposite, node.batch_rows is not None):
                perhaps.add(axis)
        results.append(array_of([BroadcastAxes(frozenset(surely), frozenset(surely | perhaps))]))
    return results


def _may_be_broadcast(size: Number, opposite: Number, has_many_rows: bool) -> bool:
    """Returns whether a size that is not known to be 1 may be, where the opposite one is not.

    Args:
        size: the size.
        opposite: the size that it meets.
        has_many_rows: whether the batch is known to have more than one row.
    """
    if isinstance(size, Rows):
        if isinstance(opposite, Rows):
            # Other lengths that are not known are checked in the step: they are the same.
            return isinstance(size.total, int) and isinstance(opposite.total, int) and size.total != opposite.total
        return not has_many_rows and (opposite is GLOBAL or (isinstance(opposite, int) and opposite > 1))
    return size is GLOBAL or (isinstance(size, Size) and size != opposite and opposite != 1)


def _array(value: Any) -> Entries:
    return value if isinstance(value, np.ndarray) else array_of(value)
