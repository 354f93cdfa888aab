"""Defer sums over towers until after linear operations."""

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Facts, Partial
from keras_dp.partition.placing.rules.registry import types

_UNARY = frozenset(types("Identity IdentityN Neg StopGradient Snapshot PreventGradient Real Imag Conj EnsureShape BiasAddGrad"))
_SUMS = frozenset(["Add", "AddV2", "AddN", "Sub"])
_IN_THE_FIRST = frozenset(["Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"])
# A gradient is linear in the incoming gradient, which is the input of this index.
_GRADIENTS = dict.fromkeys(types("RsqrtGrad SqrtGrad ReciprocalGrad InvGrad TanhGrad SigmoidGrad"), 1)
_GRADIENTS |= dict.fromkeys(types("ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad"), 0)
_RESHAPING = frozenset(["Reshape", "Transpose", "Squeeze", "ExpandDims"])
# The index of the input of which these operations take a part, or which they put in place.
_PICKING = {"StridedSlice": 0, "Slice": 0, "Pad": 0, "Unpack": 0, "Split": 1, "MatrixBandPart": 0, "StridedSliceGrad": 4}


def linear(node: Node) -> Plan | None:
    """Plans a node that is linear in its inputs that are parts of sums; None if it is not, or has no such input.

    If the whole of a linear function of one sum is needed, it is computed at home, from the sum.
    """
    sums = [node.is_sum(i) for i in range(len(node.inputs))]
    if not any(sums) or any(facts.counts_rows() or node.is_shard(i) for i, facts in enumerate(node.inputs)):
        return None
    if (
        node.type in _SUMS
        and node.in_loop
        and all(is_sum or facts.placement == REPLICATE for is_sum, facts in zip(sums, node.inputs, strict=True))
    ):
        # In a loop, a sum starts from zero: a replicated term becomes one tower's part.
        return Plan([Facts(Partial())], [Partial()] * len(sums))
    if not _is_linear(node, sums):
        return None
    needs = [Partial() if is_sum else REPLICATE for is_sum in sums]
    return Plan([Facts(Partial()) for _ in node.results], needs, also_at_home=sum(sums) == 1)


def _is_linear(node: Node, sums: list[bool]) -> bool:
    kind = node.type
    if kind in _IN_THE_FIRST and not (node.dtype(0).is_floating or node.dtype(0).is_complex) and kind != "Mul":
        # The quotient of integers is truncated.
        return False
    if kind in _UNARY | _SUMS:
        return all(sums)
    if kind in _GRADIENTS:
        return sums[_GRADIENTS[kind]] and sum(sums) == 1
    if kind == "Cast":
        source, result = node.dtype(0), node.result_dtype()
        return source.is_floating and result.is_floating and result.size >= source.size
    if kind in _IN_THE_FIRST and sums[0]:
        return not sums[1] and not _is_expanded(node, 0)
    if kind == "Mul":
        return not sums[0] and not _is_expanded(node, 1)
    if kind in ("ConcatV2", "Pack"):
        return all(sums[: node.integer("N")])
    if kind in _RESHAPING:
        return sums[0] and sum(sums) == 1
    return kind in _PICKING and sums[_PICKING[kind]] and sum(sums) == 1


def _is_expanded(node: Node, i: int) -> bool:
    """Returns whether broadcasting makes the result larger than an input, so that the sum is cheaper before it.

    In a loop, towers cannot meet for the sum.
    """
    if node.in_loop:
        return False
    mine, other = node.shape(i), node.shape(1 - i)
    if mine is None or other is None or len(mine) < len(other):
        return True
    return any(a == 1 and b != 1 for a, b in zip(mine[len(mine) - len(other) :], other, strict=True))
