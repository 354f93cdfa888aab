"""Place operations on each entry, with broadcasting."""

from typing import Any

from tensorflow.core.framework.node_def_pb2 import NodeDef

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Facts, ListOf, Shard
from keras_dp.partition.facts.tower_builder import TowerBuilder
from keras_dp.partition.placing.rules.joining import join
from keras_dp.partition.placing.rules.labels import axes, by_labels, from_the_right
from keras_dp.partition.placing.rules.linearity import linear
from keras_dp.partition.placing.rules.registry import rule, types

# Their only effect is an error, so that each tower may check its own rows.
CHECKS = types("CheckNumerics CheckNumericsV2")
UNARY = types(
    """
    Abs Acos Acosh Angle AsString Asin Asinh Atan Atanh BesselI0e BesselI1e Bucketize Cast Ceil ComplexAbs Conj Cos Cosh
    Digamma Elu EnsureShape Erf Erfc Erfinv Exp Expm1 Floor Identity Imag Invert IsFinite IsInf IsNan LeakyRelu Lgamma
    Log Log1p LogicalNot Ndtri Neg OnesLike PreventGradient Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid
    Sign Sin Sinh Softplus Softsign Sqrt Square StaticRegexFullMatch StaticRegexReplace StopGradient StringLength
    StringLower StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Tan
    Tanh ZerosLike
    """
)
BINARY = types(
    """
    Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan EluGrad Equal FloorDiv FloorMod Greater
    GreaterEqual Igamma Igammac LeakyReluGrad LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul
    MulNoNan NextAfter NotEqual Polygamma Pow RealDiv ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad SeluGrad
    SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py
    Xlogy Zeta
    """
)


@rule(*UNARY, *BINARY, *CHECKS, "AddN", "Betainc", "ClipByValue", "SelectV2")
def elementwise(node: Node) -> Plan | None:
    """Plans an operation on each entry. The result has rows where the inputs have them; axes are aligned from the right."""
    if any(node.is_list(i) for i in range(len(node.inputs))):
        return _of_lists(node)
    if node.type == "EnsureShape" and node.is_shard(0) and node.fixes_rows("shape"):
        return _of_known_rows(node)
    plan = linear(node)
    if plan:
        return plan
    ranks = [node.rank(i) for i in range(len(node.inputs))]
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        placements = {facts.placement for facts in node.inputs}
        alike = (len(ranks) == 1 or node.type == "AddN") and len(placements) == 1
        return (
            Plan([Facts(node.inputs[0].placement)], [facts.placement for facts in node.inputs])
            if (alike and node.is_shard(0))
            else None
        )
    full = max(known)
    if _compares_other_shapes(node, full):
        return None
    return by_labels(node, [from_the_right(rank, full) for rank in known], [axes(full)] * len(node.results))


def _compares_other_shapes(node: Node, rank: int) -> bool:
    """Returns whether a comparison by `==` or `!=` is known to find other shapes. Its result is then one truth value.

    Args:
        node: any node.
        rank: the larger rank of its inputs.
    """
    if "incompatible_shape_error" not in node.definition.attr or node.flag("incompatible_shape_error"):
        return False
    shapes = [reversed(node.shape(i) or []) for i in range(2)]
    fit = all(None in sizes or 1 in sizes or sizes[0] == sizes[1] for sizes in zip(*shapes, strict=False))
    return not fit or node.result_rank() not in (None, rank)


@rule("Select")
def select(node: Node) -> Plan | None:
    """Plans a selection. The condition has an entry for each entry of its operands, or for each index of their first axis."""
    ranks = [node.rank(i) for i in range(3)]
    if ranks[0] is None or ranks[1] is None:
        return None
    return by_labels(node, [axes(ranks[0]), axes(ranks[1]), axes(ranks[1])], [axes(ranks[1])], broadcasts=False)


@rule("IdentityN")
def identities(node: Node) -> Plan | None:
    """Places each output like its input."""
    plan = linear(node)
    if plan:
        return plan
    placements = [facts.placement if isinstance(facts.placement, Shard | ListOf) else REPLICATE for facts in node.inputs]
    return Plan([Facts(placement) for placement in placements], placements)


def _of_known_rows(node: Node) -> Plan | None:
    """Plans a check that the whole batch passes for sure: its number of rows is the known one."""
    placement, sizes = node.inputs[0].placement, node.definition.attr["shape"].shape.dim
    if not isinstance(placement, Shard) or not node.counts_all(sizes[placement.axis].size, placement.blocks):
        return None

    def instance(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
        own = NodeDef()
        own.CopyFrom(definition)
        own.attr["shape"].shape.dim[placement.axis].size = -1
        return builder.copy(own, tower, inputs)

    return Plan([Facts(placement, shape=node.shape(0))], [placement], instance)


def _of_lists(node: Node) -> Plan | None:
    """Plans an operation on TensorLists, which works element by element."""
    if node.type not in ("AddN", "AddV2", "Add", "Identity", "StopGradient", "ZerosLike"):
        return None
    joined: Facts | None = node.inputs[0]
    for other in node.inputs[1:]:
        joined = joined and join(joined, other)
    if joined is None or not isinstance(joined.placement, ListOf):
        return None
    element = joined.placement.element
    if element is not None and node.type not in ("Identity", "StopGradient"):
        # Integers are summed, or zeros.
        element = None if element.counts_rows() else Facts(element.placement, None, element.shape)
        if element is None:
            return None
    return Plan([Facts(ListOf(element))], [joined.placement] * len(node.inputs))
