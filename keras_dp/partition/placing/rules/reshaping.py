"""Place operations that change a tensor's shape."""

from typing import Any

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Facts, Need, Partial, Replicate, Shard
from keras_dp.partition.facts.rows import GLOBAL, Number, Rows, depends_on_rows, divide, exactly, multiply, product
from keras_dp.partition.placing.rules.labels import axes, by_labels
from keras_dp.partition.placing.rules.linearity import linear
from keras_dp.partition.placing.rules.registry import rule

# Each segment is gathered by itself.
_MOST_SEGMENTS = 64


@rule("Reshape")
def reshape(node: Node) -> Plan | None:
    """Plans a reshape. Rows stay rows if the entries of each row stay together, in their order, along one axis."""
    plan = linear(node)
    if plan:
        return plan
    placement, sizes, target = node.inputs[0].placement, node.sizes(0), node.inputs[1].numbers
    if not isinstance(placement, Shard) or sizes is None or target is None or node.inputs[1].entries.ndim != 1:  # type: ignore[union-attr]
        return None
    target = _without_minus_one(sizes, target)
    where = None if target is None else _rows_in(sizes, placement, target)
    if target is None or where is None:
        return None
    return Plan([Facts(where, shape=_plain(target))], [placement, LOCAL_SHAPE])


def _without_minus_one(sizes: list[Number], target: list[Number]) -> list[Number] | None:
    """Returns the target of a reshape with the size that -1 stands for; None if the size is not known."""
    if -1 not in target:
        return target
    at = target.index(-1)
    rest = product([*target[:at], *target[at + 1 :]])
    missing = divide(product(sizes), rest)
    return None if depends_on_rows([missing]) and not isinstance(missing, Rows) else [*target[:at], missing, *target[at + 1 :]]


def _rows_in(sizes: list[Number], placement: Shard, target: list[Number]) -> Shard | None:
    """Finds the axis of the rows after a reshape to `target`; None if they do not lie along one axis.

    Before and after the reshape, the entries are a sequence of segments. A segment has a fixed number of entries for each row.
    """
    axis = _only_rows(target)
    if axis is None:
        return None
    before, after = product(sizes[: placement.axis]), product(sizes[placement.axis + 1 :])
    before_target, after_target = product(target[:axis]), product(target[axis + 1 :])
    if before == before_target:
        blocks = placement.blocks
    elif isinstance(before, int) and isinstance(before_target, int) and 0 < before <= _MOST_SEGMENTS and before_target > 0:
        sequence = placement.blocks * before
        blocks = sequence[: len(sequence) // before_target]
        if blocks * before_target != sequence:
            return None
    else:
        return None
    blocks = tuple(exactly(multiply(block, after), after_target) for block in blocks)
    if None in blocks or Rows(blocks).total != target[axis].total:
        return None
    return Shard(axis, blocks)


def _plain(numbers: list[Number]) -> list[Any]:
    """Returns a shape with None for each number that depends on rows, and for -1."""
    return [None if depends_on_rows([number]) or number == -1 else number for number in numbers]


@rule("Transpose")
def transpose(node: Node) -> Plan | None:
    """Plans a permutation of the axes."""
    order, rank = node.inputs[1].integers, node.rank(0)
    if order is None or rank is None:
        return linear(node)
    labels = axes(rank)
    return linear(node) or by_labels(node, [labels, REPLICATE], [tuple(labels[i] for i in order)])


@rule("ExpandDims")
def expand_dims(node: Node) -> Plan | None:
    """Plans a new axis of one entry."""
    numbers, rank = node.inputs[1].integers, node.rank(0)
    if numbers is None or rank is None:
        return linear(node)
    labels, at = axes(rank), numbers[0] % (rank + 1)
    plan = linear(node) or by_labels(node, [labels, REPLICATE], [(*labels[:at], None, *labels[at:])])
    return plan.with_ones([at]) if plan else None


@rule("Squeeze")
def squeeze(node: Node) -> Plan | None:
    """Plans the removal of axes of one entry. They have to be named: a tower may have one row where the batch has more."""
    rank = node.rank(0)
    if rank is None or not node.integers("squeeze_dims"):
        return linear(node)
    gone = {axis % rank for axis in node.integers("squeeze_dims")}
    labels = tuple(None if i in gone else label for i, label in enumerate(axes(rank)))
    return linear(node) or by_labels(node, [labels], [tuple(label for i, label in enumerate(labels) if i not in gone)])


@rule("Pack")
def pack(node: Node) -> Plan | None:
    """Plans the stack of tensors along a new axis."""
    rank = node.rank(0)
    if rank is None:
        return None
    at, labels = node.integer("axis") % (rank + 1), axes(rank)
    return linear(node) or by_labels(node, [labels] * len(node.inputs), [(*labels[:at], None, *labels[at:])], broadcasts=False)


@rule("Unpack")
def unpack(node: Node) -> Plan | None:
    """Plans a tensor for each entry along an axis."""
    rank = node.rank(0)
    if rank is None:
        return linear(node)
    axis = node.integer("axis") % rank
    labels = tuple(None if i == axis else label for i, label in enumerate(axes(rank)))
    return linear(node) or by_labels(node, [labels], [labels[:axis] + labels[axis + 1 :]] * len(node.results))


@rule("Tile")
def tile(node: Node) -> Plan | None:
    """Plans the repetition of all rows, one batch after the other, or of a replicated tensor for each row."""
    multiples, rank, placement = node.inputs[1].numbers, node.rank(0), node.inputs[0].placement
    if multiples is None or rank is None or len(multiples) != rank:
        return None
    if isinstance(placement, Shard):
        times = multiples[placement.axis]
        if depends_on_rows(multiples) or not isinstance(times, int) or times < 1:
            return None
        result = Facts(Shard(placement.axis, placement.blocks * times), shape=_tiled(node, multiples, placement.axis))
        return Plan([result], [placement, REPLICATE])
    along = _only_rows(multiples)
    if along is None or not isinstance(placement, Replicate | Partial):
        return None
    size = (node.shape(0) or [])[along]
    if len(multiples[along].blocks) != 1 and size != 1:
        return None
    blocks = tuple(multiply(block, size) for block in multiples[along].blocks)
    result = Facts(Shard(along, blocks), shape=_tiled(node, multiples, along))
    return Plan([result], [REPLICATE, LOCAL_SHAPE], also_at_home=True)


def _tiled(node: Node, multiples: list[Number], rows: int) -> list[Any] | None:
    """Returns the sizes after a repetition, with None for the axis of the rows."""
    pairs = enumerate(zip(node.shape(0) or [], multiples, strict=True))
    return _plain([GLOBAL if axis == rows else multiply(size, times) for axis, (size, times) in pairs])


@rule("BroadcastTo")
def broadcast_to(node: Node) -> Plan | None:
    """Plans the broadcast of a tensor to a shape that counts rows."""
    target, rank, placement = node.inputs[1].numbers, node.rank(0), node.inputs[0].placement
    along = None if target is None else _only_rows(target)
    if target is None or rank is None or along is None:
        return None
    blocks, axis = target[along].blocks, along - (len(target) - rank)
    result = Facts(Shard(along, blocks), shape=_plain(target))
    need: Need = Shard(axis, blocks)
    if isinstance(placement, Shard):
        return Plan([result], [need, LOCAL_SHAPE]) if placement == need else None
    size = 1 if axis < 0 else (node.shape(0) or [])[axis]
    return Plan([result], [REPLICATE, LOCAL_SHAPE], also_at_home=True) if size == 1 else None


@rule("Fill")
def fill(node: Node) -> Plan | None:
    """Plans a tensor with the same number for each row."""
    target = node.inputs[0].numbers
    along = None if target is None else _only_rows(target)
    if target is None or along is None or node.inputs[1].placement != REPLICATE:
        return None
    result = Facts(Shard(along, target[along].blocks), shape=_plain(target))
    return Plan([result], [LOCAL_SHAPE, REPLICATE], also_at_home=True)


def _only_rows(numbers: list[Number]) -> int | None:
    """Finds the index of the only number that depends on rows, if it is a multiple of the number of rows; else None."""
    rows = [i for i, number in enumerate(numbers) if depends_on_rows([number])]
    return rows[0] if len(rows) == 1 and isinstance(numbers[rows[0]], Rows) else None
