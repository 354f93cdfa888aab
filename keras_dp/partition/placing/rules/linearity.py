"""Defer sums over towers until after linear operations."""

import re

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Facts, Partial
from keras_dp.partition.placing.rules.registry import types

_SUMS = types("Add AddV2 AddN Sub")
_QUOTIENTS = types("RealDiv Div DivNoNan MulNoNan")
# For each operation, the inputs in which it is linear: they may be parts of sums (p) while the others are replicated (r).
_LINEAR = {
    operation: pattern
    for pattern, operations in (
        ("p+", [*_SUMS, *types("Cast BiasAddGrad Conj EnsureShape Identity IdentityN Imag Neg Pack PreventGradient Real")]),
        ("p+", types("Snapshot Squeeze StopGradient Unpack")),
        ("p+r", ["ConcatV2"]),
        ("pr|rp", ["Mul"]),
        ("pr", [*_QUOTIENTS, *types("ExpandDims Pad Reshape Transpose")]),
        ("prr", types("MatrixBandPart Slice")),
        ("prrr", ["StridedSlice"]),
        ("rrrrp", ["StridedSliceGrad"]),
        ("rp", ["Split"]),
        # A gradient is linear in the incoming gradient.
        ("rp", types("ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad")),
        ("pr", types("EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad")),
    )
    for operation in operations
}


def linear(node: Node) -> Plan | None:
    """Plans a node that is linear in its inputs that are parts of sums; None if it is not, or has no such input.

    If the whole of a linear function of one sum is needed, it is computed at home, from the sum.
    """
    sums = [node.is_sum(i) for i in range(len(node.inputs))]
    if not any(sums) or any(facts.counts_rows() or node.is_shard(i) for i, facts in enumerate(node.inputs)):
        return None
    if (
        node.type in _SUMS
        and node.in_body
        and all(is_sum or facts.placement == REPLICATE for is_sum, facts in zip(sums, node.inputs, strict=True))
    ):
        # In a loop, a sum starts from zero: a replicated term becomes one tower's part.
        return Plan([Facts(Partial())], [Partial()] * len(sums))
    if not _is_linear(node, sums):
        return None
    needs = [Partial() if is_sum else REPLICATE for is_sum in sums]
    return Plan([Facts(Partial()) for _ in node.results], needs, also_at_home=sum(sums) == 1)


def _is_linear(node: Node, sums: list[bool]) -> bool:
    given = "".join("p" if is_sum else "r" for is_sum in sums)
    if not re.fullmatch(_LINEAR.get(node.type, ""), given):
        return False
    if node.type == "Cast":
        source, result = node.dtype(0), node.result_dtype()
        # A narrower dtype of the same size, as float16 for bfloat16, has no room for some parts.
        return source.is_floating and result.is_floating and (result == source or result.size > source.size)
    if node.type in ("RealDiv", "Div") and not node.in_body:
        # Divided by zero, a sum is infinite, and a part of it that is zero is not a number. In a loop, towers cannot meet to
        # take the sum before. A product with an infinite number is not told apart: few sums could wait otherwise. See
        # docs/same_and_different.md for what differs then.
        return False
    if node.type in _QUOTIENTS and not (node.dtype(0).is_floating or node.dtype(0).is_complex):
        # The quotient of integers is truncated.
        return False
    return node.type not in ("Mul", *_QUOTIENTS) or not _is_expanded(node, given.index("p"))


def _is_expanded(node: Node, i: int) -> bool:
    """Returns whether broadcasting makes the result larger than an input, so that the sum is cheaper before it.

    In a loop, towers cannot meet for the sum.
    """
    if node.in_body:
        return False
    mine, other = node.shape(i), node.shape(1 - i)
    if mine is None or other is None or len(mine) < len(other):
        return True
    return any(a == 1 and b != 1 for a, b in zip(mine[len(mine) - len(other) :], other, strict=True))
