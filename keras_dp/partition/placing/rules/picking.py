"""Place operations that take parts of a tensor, or put parts together."""

import dataclasses
from typing import Any

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Facts, Need, Partial, Shard
from keras_dp.partition.facts.rows import Number, Rows, Size, depends_on_rows, segments_between
from keras_dp.partition.placing.rules.labels import axes, by_labels
from keras_dp.partition.placing.rules.linearity import linear
from keras_dp.partition.placing.rules.registry import rule


@rule("ConcatV2")
def concat(node: Node) -> Plan | None:
    """Plans a concatenation. Along the axis of the rows, segments follow each other; along others, rows stay rows."""
    numbers = node.inputs[-1].integers
    rank = next((rank for rank in map(node.rank, range(len(node.inputs) - 1)) if rank is not None), None)
    if numbers is None or rank is None:
        return None
    plan = linear(node)
    if plan:
        return plan
    axis = numbers[0] % rank
    placements = [facts.placement for facts in node.inputs[:-1]]
    if all(isinstance(placement, Shard) and placement.axis == axis for placement in placements):
        blocks = tuple(block for placement in placements for block in placement.blocks)  # type: ignore[union-attr]
        return Plan([Facts(Shard(axis, blocks))], [*placements, REPLICATE])
    labels = tuple(None if i == axis else label for i, label in enumerate(axes(rank)))
    plan = by_labels(node, [*[labels] * len(placements), REPLICATE], [labels], broadcasts=False)
    sizes = [(node.shape(i) or [None] * rank)[axis] for i in range(len(placements))]
    shape = plan.outputs[0].shape if plan else None
    if plan and shape and all(isinstance(size, int) for size in sizes):
        return plan.with_shape([*shape[:axis], sum(sizes), *shape[axis + 1 :]])
    return plan


@rule("Split", "SplitV")
def split(node: Node) -> Plan | None:
    """Plans a split. The axis of the rows is split between segments; along other axes, each row is split by itself."""
    value, at = (1, 0) if node.type == "Split" else (0, 2)
    numbers, rank, placement = node.inputs[at].integers, node.rank(value), node.inputs[value].placement
    if numbers is None or rank is None:
        return None
    needs: list[Need] = [REPLICATE] * len(node.inputs)
    needs[value] = placement
    if placement == Partial():
        return Plan([Facts(Partial()) for _ in node.results], needs)
    if not isinstance(placement, Shard):
        return None
    axis = numbers[0] % rank
    if placement.axis != axis:
        if node.inputs[1].counts_rows():
            return None
        shape = [None if i == axis else size for i, size in enumerate(node.shape(value) or [])]
        return Plan([Facts(placement, shape=_without_rows(shape, placement)) for _ in node.results], needs)
    if node.type == "SplitV":
        needs[1] = LOCAL_SHAPE
    ends = _ends(node, placement)
    if ends is None:
        return None
    return Plan([Facts(Shard(axis, placement.blocks[a:b])) for a, b in zip([0, *ends], ends, strict=False)], needs)


def _ends(node: Node, placement: Shard) -> list[int] | None:
    """Returns the ends of a split's parts, counted in segments; None if it cuts through a segment."""
    count = len(node.results)
    if node.type == "Split":
        each, rest = divmod(len(placement.blocks), count)
        parts = [placement.blocks[i * each : (i + 1) * each] for i in range(count)]
        return (
            None if rest or len({Rows(part).total for part in parts if part}) != 1 else [each * (i + 1) for i in range(count)]
        )
    ends: list[int] = []
    for number in node.inputs[1].numbers or []:
        end = segments_between(placement.blocks, ends[-1] if ends else 0, number)
        if end is None:
            return None
        ends.append(end)
    return ends if len(ends) == count and ends[-1] == len(placement.blocks) else None


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(node: Node) -> Plan | None:
    """Plans the padding of other axes than the axis of the rows."""
    placement, paddings = node.inputs[0].placement, node.inputs[1].entries
    if not isinstance(placement, Shard):
        return linear(node) if node.type == "Pad" else None
    if paddings is None or depends_on_rows(paddings.flat) or any(number != 0 for number in paddings[placement.axis]):
        return None
    sign = -1 if node.type == "MirrorPadGrad" else 1
    shape = [
        size + sign * sum(more) if all(isinstance(number, int) for number in (size, *more)) else None
        for size, more in zip(node.shape(0) or [], paddings, strict=False)
    ]
    return Plan([Facts(placement, shape=_without_rows(shape, placement))], [placement, *[REPLICATE] * (len(node.inputs) - 1)])


@rule("Roll")
def roll(node: Node) -> Plan | None:
    """Plans a shift along other axes than the axis of the rows."""
    rank, numbers = node.rank(0), node.inputs[2].integers
    if rank is None or numbers is None:
        return None
    along = {number % rank for number in numbers}
    labels = tuple(None if i in along else label for i, label in enumerate(axes(rank)))
    return by_labels(node, [labels, REPLICATE, REPLICATE], [labels])


@rule("Slice")
def slice_by_size(node: Node) -> Plan | None:
    """Plans a range of each axis. Of the rows, the range takes all, or whole segments."""
    placement, begins, lengths = node.inputs[0].placement, node.inputs[1].numbers, node.inputs[2].numbers
    if not isinstance(placement, Shard):
        return linear(node)
    if begins is None or lengths is None:
        return None
    begin, length = begins[placement.axis], lengths[placement.axis]
    others = [number for i, number in enumerate([*begins, *lengths]) if i % len(begins) != placement.axis]
    start = 0 if begin == 0 else segments_between(placement.blocks, 0, begin)
    if start is None or depends_on_rows(others):
        return None
    stop = len(placement.blocks) if length == -1 else segments_between(placement.blocks, start, length)
    if stop is None or stop == start:
        return None
    shape = [number if isinstance(number, Size) or (isinstance(number, int) and number >= 0) else None for number in lengths]
    taken = Facts(Shard(placement.axis, placement.blocks[start:stop]), shape=_without_rows(shape, placement))
    return Plan([taken], [placement, LOCAL_SHAPE, LOCAL_SHAPE])


def _without_rows(shape: list[Any], placement: Shard) -> list[Any] | None:
    """Returns a shape without the number of rows, which differs from tower to tower; None if no size is known."""
    return [None if axis == placement.axis else size for axis, size in enumerate(shape)] if shape else None


@dataclasses.dataclass
class _Range:
    """The entries that a strided slice takes of one axis.

    Attributes:
        axis: the axis of the tensor; None for a new axis.
        result_axis: the axis of the slice; None for a removed axis.
        takes_all: whether the slice takes the whole axis.
        begin: a number; None for the start of the axis.
        end: a number; None for the end of the axis.
        stride: a number.
    """

    axis: int | None
    result_axis: int | None
    takes_all: bool
    begin: Number | None = None
    end: Number | None = None
    stride: Number = 1


def _ranges(node: Node, begins: list[Number], ends: list[Number], strides: list[Number], rank: int) -> list[_Range]:
    """Reads the range of each axis from a strided slice's three lists of numbers and its masks."""
    masks = {name: node.integer(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def has(name: str, i: int) -> bool:
        return bool(masks[name] >> i & 1)

    named = sum(not has("new_axis", i) and not has("ellipsis", i) for i in range(len(begins)))
    ranges: list[_Range] = []
    axis = result_axis = 0

    def take(known: _Range) -> None:
        nonlocal axis, result_axis
        ranges.append(known)
        axis += known.axis is not None
        result_axis += known.result_axis is not None

    for i, (begin, end, stride) in enumerate(zip(begins, ends, strides, strict=True)):
        if has("ellipsis", i):
            for _ in range(rank - named):
                take(_Range(axis, result_axis, True))
        elif has("new_axis", i):
            take(_Range(None, result_axis, True))
        elif has("shrink_axis", i):
            take(_Range(axis, None, False, begin, end))
        else:
            first = None if has("begin", i) else begin
            last = None if has("end", i) else end
            take(_Range(axis, result_axis, first is None and last is None and stride == 1, first, last, stride))
    while axis < rank:
        take(_Range(axis, result_axis, True))
    return ranges


def _segments(blocks: tuple[Any, ...], taken: _Range) -> slice | None:
    """Returns the segments of the rows that a slice takes; None if it does not take whole segments."""
    if taken.takes_all:
        return slice(0, len(blocks))
    if taken.result_axis is None or taken.stride != 1:
        return None
    start = 0 if taken.begin in (None, 0) else segments_between(blocks, 0, taken.begin)
    stop = len(blocks) if taken.end is None else segments_between(blocks, 0, taken.end)
    return None if start is None or stop is None or start >= stop else slice(start, stop)


@rule("StridedSlice")
def strided_slice(node: Node) -> Plan | None:
    """Plans a strided slice. Of the rows, it takes all, or whole segments."""
    placement, rank = node.inputs[0].placement, node.rank(0)
    numbers = [facts.numbers for facts in node.inputs[1:4]]
    if not isinstance(placement, Shard):
        return linear(node)
    if rank is None or numbers[0] is None or numbers[1] is None or numbers[2] is None:
        return None
    ranges = _ranges(node, numbers[0], numbers[1], numbers[2], rank)
    taken = next(known for known in ranges if known.axis == placement.axis)
    segments = _segments(placement.blocks, taken)
    if segments is None or taken.result_axis is None or _others_count_rows(ranges, taken):
        return None
    sizes = node.shape(0) or []
    shape = [None if known is taken else _length(known, sizes) for known in ranges if known.result_axis is not None]
    return Plan([Facts(Shard(taken.result_axis, placement.blocks[segments]), shape=shape)], [placement, *[LOCAL_SHAPE] * 3])


def _length(taken: _Range, sizes: list[Any]) -> Any:
    """Counts the entries that a slice takes of an axis; None if the number is not known."""
    if taken.axis is None:
        return 1
    size = sizes[taken.axis]
    numbers = [number for number in (size, taken.begin, taken.end, taken.stride) if number is not None]
    if taken.takes_all or not all(isinstance(number, int) for number in numbers):
        return size if taken.takes_all else None
    return len(range(*slice(taken.begin, taken.end, taken.stride).indices(size)))


@rule("StridedSliceGrad")
def gradient_of_strided_slice(node: Node) -> Plan | None:
    """Plans the gradient of a strided slice, which puts the slice back in its place among zeros."""
    shape, placement = node.inputs[0].numbers, node.inputs[4].placement
    numbers = [facts.numbers for facts in node.inputs[1:4]]
    if not isinstance(placement, Shard):
        return linear(node)
    if shape is None or numbers[0] is None or numbers[1] is None or numbers[2] is None:
        return None
    ranges = _ranges(node, numbers[0], numbers[1], numbers[2], len(shape))
    taken = next(known for known in ranges if known.result_axis == placement.axis)
    if taken.axis is None or not isinstance(shape[taken.axis], Rows) or _others_count_rows(ranges, taken):
        return None
    if depends_on_rows([*shape[: taken.axis], *shape[taken.axis + 1 :]]):
        return None
    blocks = shape[taken.axis].blocks
    segments = _segments(blocks, taken)
    if segments is None or blocks[segments] != placement.blocks:
        return None
    plain = [None if depends_on_rows([number]) else number for number in shape]
    return Plan([Facts(Shard(taken.axis, blocks), shape=plain)], [*[LOCAL_SHAPE] * 4, placement])


def _others_count_rows(ranges: list[_Range], rows: _Range) -> bool:
    numbers = [number for known in ranges if known is not rows for number in (known.begin, known.end, known.stride)]
    return depends_on_rows(numbers)
