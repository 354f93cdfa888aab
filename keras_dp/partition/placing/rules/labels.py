"""Write rules with labels of axes, as einsum does."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Facts, Need, Partial, Shard
from keras_dp.partition.facts.rows import Rows, gathered

Labels = tuple[str | None, ...]

# More than all inputs of an operation can add by keeping their rows: most inputs win, and of as many, a result with rows.
_VOTE = 10


def by_labels(
    node: Node,
    inputs: Sequence[Labels | Need],
    outputs: Sequence[Labels],
    reduction: str | None = None,
    instance: Callable[..., str] | None = None,
    broadcasts: bool = True,
) -> Plan | None:
    """Plans a node whose axes have labels. Rows may lie along one label, and stay along it.

    Args:
        node: the node.
        inputs: for each input, a label for each axis, None where rows may not lie; or the form in which every tower takes it.
        outputs: the labels of each output.
        reduction: the reduction of the towers' results if an output lacks the label of the rows; None if there is none.
        instance: the `instance` of the plan.
        broadcasts: whether an axis of one entry is broadcast to any number of rows.

    Returns:
        A plan, or None if no label can have the rows.
    """
    votes: Counter[str] = Counter()
    blocks_of: dict[str, tuple[Any, ...]] = {}
    for facts, labels in zip(node.inputs, inputs, strict=True):
        placement = facts.placement
        if not isinstance(placement, Shard):
            continue
        if not isinstance(labels, tuple):
            if labels != REPLICATE:
                return None
            continue
        label = labels[placement.axis] if placement.axis < len(labels) else None
        is_kept = all(label in output for output in outputs)
        if label is not None and (is_kept or reduction):
            # If the result keeps the rows, it needs no reduction.
            votes[label] += _VOTE + is_kept
            blocks_of.setdefault(label, placement.blocks)
    if not votes:
        return None
    rows = max(votes, key=lambda label: votes[label])
    blocks = blocks_of[rows]
    needs: list[Need] = []
    gathers = []
    for i, (facts, labels) in enumerate(zip(node.inputs, inputs, strict=True)):
        need = _need(node, i, labels, rows, blocks, broadcasts)
        if need is None:
            return None
        needs.append(need)
        if isinstance(facts.placement, Shard) and facts.placement != need:
            gathers.append(i)
    sizes = _sizes(node, inputs)
    facts_of = []
    for labels in outputs:
        shape = [None if label is None or label == rows else sizes.get(label) for label in labels]
        if rows in labels:
            facts_of.append(Facts(Shard(labels.index(rows), blocks), shape=shape))
        elif reduction:
            facts_of.append(Facts(Partial(reduction), shape=shape))
        else:
            return None
    return Plan(facts_of, needs, instance, gathers=tuple(gathers))


def _need(node: Node, i: int, labels: Labels | Need, rows: str, blocks: tuple[Any, ...], broadcasts: bool) -> Need | None:
    """Returns the form in which a tower takes an input if rows lie along a label; None if its rows are not the batch's."""
    if not isinstance(labels, tuple):
        return labels
    if rows not in labels:
        return REPLICATE
    shape, axis, placement = node.shape(i), labels.index(rows), node.inputs[i].placement
    size = shape[axis] if shape is not None and axis < len(shape) else None
    is_row_axis = isinstance(placement, Shard) and placement.axis == axis
    if isinstance(placement, Shard) and is_row_axis:
        totals = {Rows(placement.blocks).total, Rows(blocks).total}
        if len(totals) > 1 and all(isinstance(total, int) for total in totals):
            # Only a batch of one row is broadcast to several entries.
            return None
    if isinstance(size, int) and not is_row_axis and not node.counts_all(size, blocks):
        # One entry is broadcast to any number of rows.
        return REPLICATE if size == 1 and broadcasts else None
    return Shard(axis, blocks)


def _sizes(node: Node, inputs: Sequence[Labels | Need]) -> dict[str, Any]:
    """Returns the size of each label after broadcasting; None where it is not known."""
    sizes: dict[str, Any] = {}
    for i, labels in enumerate(inputs):
        shape = node.sizes(i)
        if not isinstance(labels, tuple) or shape is None or len(shape) != len(labels):
            continue
        for label, size in zip(labels, shape, strict=True):
            if label is not None:
                sizes[label] = _broadcast(sizes.get(label, 1), gathered(size))
    return sizes


def _broadcast(a: Any, b: Any) -> Any:
    """Returns the size to which two sizes are broadcast; None if it is not known."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    return next((size for size in (a, b) if isinstance(size, int)), None)


def axes(rank: int, prefix: str = "") -> Labels:
    """Returns a label for each axis."""
    return tuple(f"{prefix}{i}" for i in range(rank))


def from_the_right(rank: int, full: int) -> Labels:
    """Returns a label for each axis as broadcasting aligns them: at the last axis."""
    return axes(full)[full - rank :]
