"""Place the TensorLists of loops."""

from dataclasses import replace

import numpy as np

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import (
    LOCAL_SHAPE,
    REPLICATE,
    Facts,
    ListOf,
    Need,
    Partial,
    Placement,
    Shard,
    array_of,
)
from keras_dp.partition.facts.rows import Number, Rows
from keras_dp.partition.placing.inner_names import taken
from keras_dp.partition.placing.rules.joining import are_placed_alike, join_elements, need_of
from keras_dp.partition.placing.rules.registry import rule


@rule("EmptyTensorList", "TensorListReserve")
def new_list(node: Node) -> Plan | None:
    """Plans a list on each tower for elements of any placement. The lists of all towers have the same length.

    A tower does not state the sizes that may count rows: it is not known yet what the elements are.
    """
    shape = node.inputs[0].entries
    if node.inputs[1].counts_rows() or shape is None:
        # A shape that is not known may count rows.
        return None
    needs: list[Need] = [LOCAL_SHAPE if facts.entries is not None else REPLICATE for facts in node.inputs]
    stated = None if node.batch_rows is None else _unstated(shape, node.batch_rows)
    return Plan([Facts(ListOf())], needs, None, True, readings={} if stated is None else {0: stated})


def _unstated(shape: np.ndarray, batch_rows: int) -> np.ndarray:
    """Returns the entries of a shape, with -1 in the place of row counts and of multiples of B."""
    stated = shape.copy()
    for i, size in enumerate(shape.flat):
        if isinstance(size, Rows) or (isinstance(size, int) and size > 0 and not size % batch_rows):
            stated.flat[i] = -1
    return stated


def _taking(node: Node, i: int, plan: Plan, element: Facts) -> Plan | None:
    """Returns a plan in which the input of index `i` is the shape of the elements; None if towers know no version of it."""
    shape = node.inputs[i].entries
    local = _local_shape(shape, element.placement, node.batch_rows)
    if shape is not None and local is None:
        return None
    is_read = shape is not None and local is not None and list(shape.flat) != list(local.flat)
    return replace(plan, readings={i: local}) if is_read else plan  # type: ignore[dict-item]


def _local_shape(shape: np.ndarray | None, element: Placement, batch_rows: int | None) -> np.ndarray | None:
    """Returns the shape of an element of a list as a tower has it; None if its rows are not known to be the tower's.

    Args:
        shape: the entries of the shape; -1 for an unknown size.
        element: the placement of the element.
        batch_rows: B, if it was known while the step was traced; else None.
    """
    if shape is None or shape.ndim != 1:
        return shape
    axis = element.axis if isinstance(element, Shard) else None
    if any(isinstance(number, Rows) for i, number in enumerate(shape) if i != axis):
        return None
    if not isinstance(element, Shard):
        return shape
    own, number = shape.copy(), shape[element.axis]
    rows = Rows(element.blocks)
    if isinstance(number, int) and number > 0:
        if batch_rows is None or not isinstance(rows.total, int) or number != batch_rows * rows.total:
            return None
        own[element.axis] = Rows((rows.total,))
    elif isinstance(number, Rows) and number.total != rows.total:
        return None
    return own


@rule("TensorListFromTensor")
def list_of_rows(node: Node) -> Plan | None:
    """Plans a list whose elements are the entries along the first axis."""
    placement, shape = node.inputs[0].placement, node.shape(0)
    if not isinstance(placement, Shard) or placement.axis == 0 or not node.inputs[1].is_local_shape():
        return None
    element = Facts(Shard(placement.axis - 1, placement.blocks), shape=None if shape is None else shape[1:])
    return _taking(node, 1, Plan([Facts(ListOf(element))], [placement, LOCAL_SHAPE]), element)


@rule("TensorListPushBack", "TensorListSetItem")
def put(node: Node) -> Plan | None:
    """Plans adding or replacing an element of a list, which is placed like all others.

    Elements may be parts of sums alone: entries that nothing has written, and the zeros and sums that gradients make of lists,
    are no parts of a maximum, a product or a variance.
    """
    listed, at = node.inputs[0].placement, len(node.inputs) - 1
    placement = node.inputs[at].placement
    if not isinstance(listed, ListOf) or (isinstance(placement, Partial) and placement.reduction != "sum"):
        return None
    # An entry of a list that nothing has written is zeros, whatever others are.
    entries = node.inputs[at].entries if node.type == "TensorListPushBack" else None
    own = Facts(placement, entries, node.shape(at))
    element = own if listed.element is None else join_elements(listed.element, own, node.batch_rows)
    if element is None or (listed.element and not are_placed_alike(element.placement, listed.element.placement)):
        # Elements that are in the list already keep their placement.
        return None
    need = need_of(own if node.is_shard(at) else element)
    return Plan([Facts(ListOf(element))], [listed, *[REPLICATE] * (at - 1), need])


@rule("TensorListGetItem", "TensorListPopBack")
def take(node: Node) -> Plan | None:
    """Plans an element of a list, which is placed like all others."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or not node.inputs[-1].is_local_shape():
        return None
    element = taken(listed.element, node.full_name)
    if node.type == "TensorListPopBack":
        return _taking(node, 1, Plan([Facts(listed), element], [listed, LOCAL_SHAPE]), element)
    return _taking(node, 2, Plan([element], [listed, REPLICATE, LOCAL_SHAPE]), element)


@rule("TensorListStack")
def stack(node: Node) -> Plan | None:
    """Plans the stack of all elements along a new first axis."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or not node.inputs[1].is_local_shape():
        return None
    element = taken(listed.element, node.full_name)
    if isinstance(element.placement, Shard):
        shape = None if element.shape is None else [None, *element.shape]
        placement = Shard(element.placement.axis + 1, element.placement.blocks)
        return _taking(node, 1, Plan([Facts(placement, shape=shape)], [listed, LOCAL_SHAPE]), element)
    return Plan([Facts(Partial())], [listed, LOCAL_SHAPE]) if element.placement == Partial() else None


@rule("TensorListElementShape")
def shape_of_elements(node: Node) -> Plan | None:
    """Plans the shape of the elements, of which each tower has its own version."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or listed.element.shape is None:
        return None
    placement = listed.element.placement
    sizes: list[Number] = [size if isinstance(size, int) else -1 for size in listed.element.shape]
    if isinstance(placement, Shard):
        # A list states the number of rows only where it is known while the step is traced.
        is_known = node.batch_rows is not None and all(isinstance(block, int) for block in placement.blocks)
        sizes[placement.axis] = Rows(placement.blocks) if is_known else -1
    return Plan([Facts(REPLICATE, array_of(sizes))], [listed])


@rule("TensorListLength")
def length(node: Node) -> Plan | None:
    """Plans the number of elements, which is the same on all towers."""
    listed = node.inputs[0].placement
    return Plan([Facts()], [listed]) if isinstance(listed, ListOf) else None
