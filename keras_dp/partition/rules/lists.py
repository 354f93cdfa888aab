"""Place the TensorLists of loops."""

from keras_dp.partition.node import Node, Plan
from keras_dp.partition.placements import (
    LOCAL_SHAPE,
    REPLICATE,
    Facts,
    ListOf,
    Partial,
    Shard,
    array_of,
)
from keras_dp.partition.rows import Number, Rows, Size
from keras_dp.partition.rules.joining import join, need_of
from keras_dp.partition.rules.registry import rule


@rule("EmptyTensorList", "TensorListReserve")
def new_list(node: Node) -> Plan | None:
    """Plans a list on each tower for elements of any placement. The lists of all towers have the same length."""
    if node.inputs[1].counts_rows():
        return None
    return Plan(
        [Facts(ListOf())], [LOCAL_SHAPE if facts.entries is not None else REPLICATE for facts in node.inputs], None, True
    )


@rule("TensorListFromTensor")
def list_of_rows(node: Node) -> Plan | None:
    """Plans a list whose elements are the entries along the first axis."""
    placement, shape = node.inputs[0].placement, node.shape(0)
    if not isinstance(placement, Shard) or placement.axis == 0 or not node.inputs[1].is_local_shape():
        return None
    element = Facts(Shard(placement.axis - 1, placement.blocks), shape=None if shape is None else shape[1:])
    return Plan([Facts(ListOf(element))], [placement, LOCAL_SHAPE])


@rule("TensorListPushBack", "TensorListSetItem")
def put(node: Node) -> Plan | None:
    """Plans adding or replacing an element of a list, which is placed like all others."""
    listed, at = node.inputs[0].placement, len(node.inputs) - 1
    if not isinstance(listed, ListOf):
        return None
    element: Facts | None = Facts(node.inputs[at].placement, node.inputs[at].entries, node.shape(at))
    if listed.element is not None and element is not None:
        element = join(listed.element, element, node.name)
    if element is None or (listed.element is not None and element.placement != listed.element.placement):
        # Elements that are in the list already keep their placement.
        return None
    return Plan([Facts(ListOf(element))], [listed, *[REPLICATE] * (at - 1), need_of(element)])


@rule("TensorListGetItem", "TensorListPopBack")
def take(node: Node) -> Plan | None:
    """Plans an element of a list, which is placed like all others."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or not node.inputs[-1].is_local_shape():
        return None
    if node.type == "TensorListPopBack":
        return Plan([Facts(listed), listed.element], [listed, LOCAL_SHAPE])
    return Plan([listed.element], [listed, REPLICATE, LOCAL_SHAPE])


@rule("TensorListStack")
def stack(node: Node) -> Plan | None:
    """Plans the stack of all elements along a new first axis."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or not node.inputs[1].is_local_shape():
        return None
    element = listed.element
    if isinstance(element.placement, Shard):
        shape = None if element.shape is None else [None, *element.shape]
        return Plan([Facts(Shard(element.placement.axis + 1, element.placement.blocks), shape=shape)], [listed, LOCAL_SHAPE])
    return Plan([Facts(Partial())], [listed, LOCAL_SHAPE]) if element.placement == Partial() else None


@rule("TensorListElementShape")
def shape_of_elements(node: Node) -> Plan | None:
    """Plans the shape of the elements, of which each tower has its own version."""
    listed = node.inputs[0].placement
    if not isinstance(listed, ListOf) or listed.element is None or listed.element.shape is None:
        return None
    placement = listed.element.placement
    sizes: list[Number] = [
        size if isinstance(size, int) else Size.named(f"{node.name}[{i}]") for i, size in enumerate(listed.element.shape)
    ]
    if isinstance(placement, Shard):
        sizes[placement.axis] = Rows(placement.blocks)
    return Plan([Facts(REPLICATE, array_of(sizes))], [listed])


@rule("TensorListLength")
def length(node: Node) -> Plan | None:
    """Plans the number of elements, which is the same on all towers."""
    listed = node.inputs[0].placement
    return Plan([Facts()], [listed]) if isinstance(listed, ListOf) else None
