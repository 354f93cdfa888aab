"""Place convolutions, pooling and image operations."""

import math

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Facts, Need, Shard
from keras_dp.partition.facts.rows import Rows, depends_on_rows
from keras_dp.partition.placing.rules.labels import Labels, by_labels
from keras_dp.partition.placing.rules.registry import rule

_MOST_BATCHES = 64  # a segment each

# The inputs whose first axis has the rows, and the inputs that are shapes of such tensors. Others are the same for all rows.
_WITH_ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
for _inputs, _shapes, _names in (
    (
        (0,),
        (),
        """AvgPool AvgPool3D Conv Conv2D Conv3D DepthToSpace DepthwiseConv2dNative Dilation2D ExtractImagePatches
        LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor
        ResizeNearestNeighborGrad ScaleAndTranslate SpaceToDepth""",
    ),
    (
        (0, 1),
        (),
        """ImageProjectiveTransformV2 ImageProjectiveTransformV3 InTopKV2 ResizeBicubicGrad ResizeBilinearGrad
        SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits""",
    ),
    ((0, 1, 2), (), "LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad"),
    ((0, 2), (), "ExtractGlimpse"),
    ((1,), (0,), "AvgPool3DGrad AvgPoolGrad"),
    ((2,), (0,), "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"),
):
    _WITH_ROWS |= dict.fromkeys(_names.split(), (_inputs, _shapes))


@rule(*_WITH_ROWS)
def rows_first(node: Node) -> Plan | None:
    """Plans an operation on each row by itself."""
    with_rows, shapes = _WITH_ROWS[node.type]
    inputs: list[Labels | Need] = []
    for i in range(len(node.inputs)):
        if i in with_rows:
            rank = node.rank(i)
            if rank is None:
                return None
            inputs.append(("rows", *[None] * (rank - 1)))
        elif i in shapes:
            numbers = node.inputs[i].numbers
            if not numbers or not isinstance(numbers[0], Rows) or depends_on_rows(numbers[1:]):
                return None
            inputs.append(LOCAL_SHAPE)
        else:
            inputs.append(REPLICATE)
    ranks = [node.result_rank(k) for k in range(len(node.results))]
    # TensorFlow may not know the shape of a gradient along images, which have four axes.
    outputs = [("rows", *[None] * ((4 if rank is None else rank) - 1)) for rank in ranks]
    if None in ranks and "3D" in node.type:
        return None
    plan = by_labels(node, inputs, outputs)
    # A gradient has the shape of the tensor that it is taken along. The node's first input is this shape, or this tensor. The
    # gradient of a gradient has the shape of the second input.
    along = 1 if node.type.endswith("GradGrad") else 0
    first = node.inputs[0].numbers if shapes else node.shape(along) if "Grad" in node.type and len(with_rows) == 3 else None
    if plan and first is not None and len(first) == len(outputs[0]):
        plan = plan.with_shape([None, *first[1:]])
    size = node.inputs[2].integers if node.type.startswith("ImageProjectiveTransform") else None
    if plan and size:
        plan = plan.with_shape([None, *size, (node.shape(0) or [None])[-1]])
    if plan and node.type.endswith("CrossEntropyWithLogits"):
        # The second output is the gradient along the logits.
        plan = plan.with_shape([None, *(node.shape(0) or [])[1:]], 1)
    return plan


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_and_batch(node: Node) -> Plan | None:
    """Plans moving blocks of space to the first axis, where one batch follows the other, or back."""
    placement, sizes = node.inputs[0].placement, node.inputs[1].integers
    if not isinstance(placement, Shard) or placement.axis != 0 or sizes is None:
        return None
    count = math.prod(sizes)
    if any(facts.counts_rows() for facts in node.inputs[1:]) or not 1 <= count <= _MOST_BATCHES:
        return None
    if node.type == "SpaceToBatchND":
        blocks = placement.blocks * count
    else:
        blocks = placement.blocks[: len(placement.blocks) // count]
        if blocks * count != placement.blocks:
            return None
    return Plan([Facts(Shard(0, blocks))], [placement, REPLICATE, REPLICATE])


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def gradient_of_filter(node: Node) -> Plan | None:
    """Plans the gradient of a filter, which is the sum of the rows' gradients."""
    ranks = node.rank(0), node.rank(2)
    if ranks[0] is None or ranks[1] is None:
        return None
    rows = [("rows", *[None] * (rank - 1)) for rank in ranks if rank is not None]
    plan = by_labels(node, [rows[0], REPLICATE, rows[1]], [()], reduction="sum", broadcasts=False)
    return plan and plan.with_shape(node.inputs[1].integers)
