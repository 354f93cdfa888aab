"""Place products of matrices, and operations on matrices."""

from string import ascii_uppercase

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import REPLICATE, Shard
from keras_dp.partition.placing.rules.labels import Labels, axes, by_labels, from_the_right
from keras_dp.partition.placing.rules.linearity import linear
from keras_dp.partition.placing.rules.registry import rule, types


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul")
def product_of_matrices(node: Node) -> Plan | None:
    """Plans (..., m, k) times (..., k, n), which is (..., m, n). Rows along k are summed."""
    ranks = node.rank(0), node.rank(1)
    if ranks[0] is None or ranks[1] is None:
        return None
    names = ("transpose_a", "transpose_b") if node.type == "MatMul" else ("adj_x", "adj_y")
    full = max(ranks[0], ranks[1]) - 2
    first = from_the_right(ranks[0] - 2, full) + (("k", "m") if node.flag(names[0]) else ("m", "k"))
    second = from_the_right(ranks[1] - 2, full) + (("n", "k") if node.flag(names[1]) else ("k", "n"))
    return by_labels(node, [first, second], [(*axes(full), "m", "n")], reduction="sum")


@rule("Einsum")
def einsum(node: Node) -> Plan | None:
    """Plans an einsum by the labels of its equation."""
    left, _, result = node.text("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in left:
        free = [letter for letter in ascii_uppercase if letter not in left + result]
        ranks = [node.rank(i) for i in range(len(terms))]
        known = [rank for rank in ranks if rank is not None]
        if len(known) < len(ranks):
            return None
        more = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, known, strict=True)]
        full = max(more)
        terms = [term.replace("...", "".join(free[full - k : full])) for term, k in zip(terms, more, strict=True)]
        result = result.replace("...", "".join(free[:full]))
    if any(len(set(term)) != len(term) for term in [*terms, result]):
        return None
    return by_labels(node, [tuple(term) for term in terms], [tuple(result)], reduction="sum")


# How many of the last axes an operation works on.
_LAST_AXES = dict.fromkeys(types("Softmax LogSoftmax TopKV2 FFT IFFT RFFT IRFFT Cross"), 1)
_LAST_AXES |= dict.fromkeys(
    types(
        """
    MatrixBandPart MatrixInverse MatrixDeterminant LogMatrixDeterminant Cholesky CholeskyGrad Svd Qr FFT2D IFFT2D RFFT2D
    IRFFT2D SelfAdjointEigV2 Lu Eig MatrixSolve
    """
    ),
    2,
)
_LAST_AXES |= dict.fromkeys(["FFT3D", "AdjustContrastv2", "AdjustHue", "AdjustSaturation"], 3)
_LAST_AXES |= dict.fromkeys(["RGBToHSV", "HSVToRGB"], 1)


# Operations whose result has the shape of their first input.
_KEEPS_SHAPE = frozenset(
    types("Softmax LogSoftmax FFT IFFT FFT2D IFFT2D FFT3D Cross MatrixBandPart MatrixInverse Cholesky CholeskyGrad")
)


@rule(*_LAST_AXES)
def last_axes(node: Node) -> Plan | None:
    """Plans an operation on the last axes, separate for each index of the other axes."""
    together, rank = _LAST_AXES[node.type], node.rank(0)
    if rank is None or rank < together:
        return None
    before = rank - together
    inputs: list[Labels | object] = []
    for i in range(len(node.inputs)):
        other = node.rank(i)
        if other is None or other > rank:
            return None
        inputs.append(axes(before) + (None,) * (other - before) if i == 0 or other >= rank else REPLICATE)
    outputs = []
    for k in range(len(node.results)):
        other = node.result_rank(k)
        if other is None:
            return None
        outputs.append(axes(before) + (None,) * (other - before))
    plan = linear(node) or by_labels(node, inputs, outputs)  # type: ignore[arg-type]
    sizes, result = node.sizes(0), plan.outputs[0] if plan else None
    if plan and sizes is not None and node.type in _KEEPS_SHAPE and result is not None and isinstance(result.placement, Shard):
        return plan.with_shape([None if i == result.placement.axis else size for i, size in enumerate(sizes)])
    return plan


@rule("MatrixTriangularSolve")
def triangular_solve(node: Node) -> Plan | None:
    """Plans the solution of systems of equations. Matrices and right sides are broadcast."""
    matrices, sides = node.rank(0), node.rank(1)
    if matrices is None or sides is None:
        return None
    full = max(matrices, sides) - 2
    inputs = [(*from_the_right(rank - 2, full), None, None) for rank in (matrices, sides)]
    return by_labels(node, inputs, [(*axes(full), None, None)])


@rule("MatrixDiagPartV3", "MatrixDiagV3")
def diagonal(node: Node) -> Plan | None:
    """Plans the diagonals of matrices, or matrices from diagonals, separate for each index of the other axes."""
    rank, result = node.rank(0), node.result_rank()
    if rank is None or result is None:
        return None
    # A band of diagonals has an axis for the diagonals, a single one has none: the matrices tell what comes before.
    before = (rank if "Part" in node.type else result) - 2
    labels = axes(before)
    others = [REPLICATE] * (len(node.inputs) - 1)
    return by_labels(node, [labels + (None,) * (rank - before), *others], [labels + (None,) * (result - before)])


@rule("Bitcast")
def bitcast(node: Node) -> Plan | None:
    """Plans a change of the dtype, which may add or remove a last axis."""
    rank, result = node.rank(0), node.result_rank()
    if rank is None or result is None:
        return None
    labels = axes(min(rank, result))
    return by_labels(node, [labels + (None,) * (rank - len(labels))], [labels + (None,) * (result - len(labels))])
