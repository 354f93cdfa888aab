"""Define samples of each operation that has a rule, with which the rule is proven."""

import inspect

import numpy as np
import tensorflow as tf

from keras_dp.partition.own import own_part, total_of_own
from keras_dp.partition.placing.rules.elementwise import BINARY, CHECKS, UNARY
from keras_dp.partition.placing.rules.registry import types
from partition.placing.proofs import Sample

R = tf.raw_ops

_INTEGER = types(
    """
    BitwiseAnd BitwiseOr BitwiseXor FloorDiv FloorMod Invert LeftShift Mod RightShift TruncateDiv TruncateMod
    """
)
_LOGICAL = ["LogicalAnd", "LogicalNot", "LogicalOr"]
_COMPLEX = ["Angle", "ComplexAbs", "Conj", "Imag", "Real"]
_LINEAR = types(
    """
    Add AddV2 DivNoNan EluGrad Identity LeakyReluGrad Mul Neg PreventGradient ReciprocalGrad Relu6Grad ReluGrad
    RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad StopGradient Sub TanhGrad
    """
)
_ATTRIBUTES = {
    "Cast": {"DstT": tf.float64},
    "EnsureShape": {"shape": [None, None, None]},
    "Bucketize": {"boundaries": [0.3, 0.5]},
    "LeakyRelu": {"alpha": 0.3},
    "LeakyReluGrad": {"alpha": 0.3},
    "Complex": {"Tout": tf.complex128},
    "StringToNumber": {"out_type": tf.float64},
    "StaticRegexFullMatch": {"pattern": "1.*"},
    "StaticRegexReplace": {"pattern": "1", "rewrite": "one"},
    "StringToHashBucket": {"num_buckets": 5},
    "CheckNumerics": {"message": "not finite"},
    "CheckNumericsV2": {"message": "not finite"},
    "StringToHashBucketFast": {"num_buckets": 5},
    "StringToHashBucketStrong": {"num_buckets": 5, "key": [1, 2]},
}


def _operation(name, count=1, **attributes):
    """Returns a raw operation as a function of its first inputs; the others have values, as its attributes do."""
    operation = getattr(R, name)
    names = list(inspect.signature(operation).parameters)[:count]
    attributes = attributes or _ATTRIBUTES.get(name, {})
    return lambda *tensors: operation(**dict(zip(names, tensors, strict=True)), **attributes)


def _ensured(x):
    """Ensures a shape with 7 rows, in a branch that only batches of 7 rows take.

    The rows are counted by their values: of the shape of x, TensorFlow's graph optimizer believes that it is the ensured one.
    """
    if x.shape[0] is not None:
        return tf.ensure_shape(x, [x.shape[0], 3])
    rows = tf.shape(tf.where(tf.equal(x[:, 0], x[:, 0])))[0]
    return tf.cond(rows == 7, lambda: tf.ensure_shape(x, [7, 3]), lambda: x)


def _of_complex(name):
    def function(x, y):
        attributes = {} if name == "Conj" else {"Tout": tf.float64}
        return getattr(R, name)(**{"x" if name == "ComplexAbs" else "input": tf.complex(x, y)}, **attributes)

    return function


def _elementwise():
    for name in _COMPLEX:
        yield Sample((name,), _of_complex(name), ("Ba", "Ba"))
    for name in (*(name for name in UNARY if name not in _COMPLEX), *BINARY):
        count = 2 if name in BINARY else 1
        dtype, low, high = "float64", 0.2 if name in BINARY else -0.8, 0.8
        if name in _INTEGER:
            dtype, low, high = "int32", 1, 9
        elif name in _LOGICAL:
            dtype = "bool"
        elif name.startswith(("String", "StaticRegex")):
            dtype = "string"
        elif name in ("Acosh", "Polygamma", "Zeta"):
            low, high = 1.2, 3.0
        elif name in ("Log", "Sqrt", "Rsqrt", "Digamma", "Lgamma", "Erfinv", "Ndtri"):
            low, high = 0.1, 0.9
        partial = tuple(range(count)) if name in _LINEAR else ()
        yield Sample((name,), _operation(name, count), ("BaC",) * count, (dtype,), low=low, high=high, partial=partial)
        if name in BINARY and not name.endswith("Grad"):
            # These inputs are broadcast, also from a lower rank.
            for axes in (("BaC", "C"), ("Bi", "Ba")):
                yield Sample((name,), _operation(name, 2), axes, (dtype,), low=low, high=high)
    yield Sample(("EnsureShape",), lambda x: _ensured(x) * 2.0, ("Ba",), meets=True)
    for name in CHECKS:
        yield Sample((name,), _operation(name, 1), ("BaC",))
    yield Sample(("AddN",), lambda *x: R.AddN(inputs=list(x)), ("Ba",) * 3, partial=(0, 1, 2))
    yield Sample(("Betainc",), _operation("Betainc", 3), ("Ba",) * 3)
    yield Sample(("ClipByValue",), lambda x, a, b: R.ClipByValue(t=x, clip_value_min=a, clip_value_max=b), ("Ba", "Ba", "Ba"))
    yield Sample(("SelectV2",), _operation("SelectV2", 3), ("Bi", "Ba", "a"), ("bool", "float64", "float64"))
    yield Sample(("Select",), _operation("Select", 3), ("B", "Ba", "Ba"), ("bool", "float64", "float64"))
    yield Sample(("Select",), _operation("Select", 3), ("BaC", "BaC", "BaC"), ("bool", "float64", "float64"))
    yield Sample(("IdentityN",), lambda x, y: R.IdentityN(input=[x, y]), ("Ba", "aB"), partial=(0, 1))
    for name, count in (("Add", 2), ("Mul", 2), ("Cast", 1), ("Sqrt", 1)):
        yield Sample((name,), _operation(name, count), ("Ba",) * count, ("float32",))


def _reductions():
    for name in ("Sum", "Mean", "Max", "Min", "Prod"):
        for axes, keeps in (([0], False), ([1], False), ([0, 2], True), ([1, 2], False), ([0, 1, 2], False), ([-1], True)):
            reduced = _operation(name, axis=axes, keep_dims=keeps)
            for dtype in ("float64", "float32") if name == "Mean" else ("float64", "int64"):
                yield Sample((name,), reduced, ("BaC",), (dtype,), high=5, partial=(0,) if name == "Sum" else ())
    # The sum is larger than any number in half precision, and so is the count of its entries.
    yield Sample(("Mean",), lambda x: tf.reduce_mean(1000.0 * x), ("Bm",), ("float16",), sizes=(("m", 70_000),))
    for name in ("All", "Any"):
        for axes in ([0], [1], [0, 1]):
            yield Sample((name,), _operation(name, axis=axes), ("Ba",), ("bool",))
    yield Sample(("L2Loss",), _operation("L2Loss", 1), ("BaC",))
    for name in ("ArgMax", "ArgMin"):
        for axis in (0, 1, -1):
            yield Sample((name,), _operation(name, dimension=axis), ("BaC",))
    for name in ("Cumsum", "Cumprod"):
        for axis in (0, 1):
            yield Sample((name,), _operation(name, axis=axis, exclusive=True), ("BaC",))
    yield Sample(("ReverseV2",), _operation("ReverseV2", axis=[1]), ("BaC",))
    yield Sample(("BiasAdd",), _operation("BiasAdd", 2), ("BaC", "C"))
    yield Sample(("BiasAddGrad",), _operation("BiasAddGrad", 1), ("BaC",), partial=(0,))
    for axes in (("Ba", "a"), ("Ba", "Bi"), ("Bai", "ac"), ("BaC", "C")):
        yield Sample(("Sum",), _gradients(tf.multiply), axes)


def _in_graph(function):
    """Runs the function in a graph, even where the sample runs eagerly: `tf.gradients` needs one."""
    return lambda *tensors: tf.function(function, autograph=False)(*tensors)


def _gradients(function):
    """Returns a function of the gradients of the squares that a function returns, with respect to its tensors."""
    return _in_graph(lambda *tensors: tf.gradients(tf.reduce_sum(function(*tensors) ** 2), tensors))


def _products():
    for a, b, axes in (
        (False, False, ("BK", "KN")),
        (True, False, ("KB", "KN")),
        (False, True, ("BK", "NK")),
        (True, True, ("KB", "NK")),
    ):
        yield Sample(("MatMul",), lambda x, y, a=a, b=b: R.MatMul(a=x, b=y, transpose_a=a, transpose_b=b), axes)
    for a, b, axes in ((False, False, ("BmK", "BKn")), (True, False, ("bKM", "bKN")), (False, True, ("BMK", "NK"))):
        for name in ("BatchMatMul", "BatchMatMulV2"):
            if name == "BatchMatMulV2" or len(axes[1]) == 3:
                yield Sample((name,), lambda x, y, a=a, b=b, name=name: getattr(R, name)(x=x, y=y, adj_x=a, adj_y=b), axes)
    yield Sample(("BatchMatMulV3",), lambda x, y: R.BatchMatMulV3(x=x, y=y, Tout=tf.float64), ("BmK", "BKN"))
    for equation, axes in (
        ("abc,cd->abd", ("ABC", "CD")),
        ("ab,ab->", ("AB", "AB")),
        ("...ab,bc->...ac", ("DAB", "BC")),
        ("ab,cb->ac", ("AB", "CB")),
    ):
        yield Sample(("Einsum",), lambda x, y, equation=equation: R.Einsum(inputs=[x, y], equation=equation), axes)
    yield Sample(("Softmax",), _operation("Softmax", 1), ("BC",))
    yield Sample(("LogSoftmax",), _operation("LogSoftmax", 1), ("BC",))
    yield Sample(("TopKV2",), lambda x: R.TopKV2(input=x, k=2), ("Bak",))
    for name in ("FFT", "IFFT", "FFT2D", "IFFT2D", "FFT3D"):
        yield Sample((name,), lambda x, name=name: getattr(R, name)(input=tf.cast(x, tf.complex128)), ("Bacd",))
    yield Sample(("RFFT",), _operation("RFFT", fft_length=[3], Tcomplex=tf.complex128), ("Ba",))
    yield Sample(("IRFFT",), lambda x: R.IRFFT(input=tf.cast(x, tf.complex128), fft_length=[4], Treal=tf.float64), ("Ba",))
    yield Sample(("RFFT2D",), _operation("RFFT2D", fft_length=[3, 3], Tcomplex=tf.complex128), ("Bac",))
    inverse = _operation("IRFFT2D", fft_length=[3, 4], Treal=tf.float64)
    yield Sample(("IRFFT2D",), lambda x: inverse(tf.cast(x, tf.complex128)), ("Bac",))
    yield Sample(("Cross",), _operation("Cross", 2), ("Ba", "Ba"))
    for name in ("LowerBound", "UpperBound"):
        yield Sample((name,), lambda x, y, name=name: getattr(R, name)(sorted_inputs=tf.sort(x), values=y), ("Bn", "BM"))
    yield Sample(("MatrixBandPart",), lambda x: R.MatrixBandPart(input=x, num_lower=1, num_upper=0), ("Bmm",), partial=(0,))
    for name in ("MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "Lu", "Qr"):
        yield Sample((name,), lambda x, name=name: getattr(R, name)(input=x + tf.eye(3, dtype=x.dtype) * 4.0), ("Bmm",))
    yield Sample(("Svd",), lambda x: R.Svd(input=x, compute_uv=False)[0], ("Bmm",))
    yield Sample(("Eig",), lambda x: R.Eig(input=_symmetric(x), compute_v=False, Tout=tf.complex128)[0], ("Bmm",))
    yield Sample(("Cholesky",), lambda x: R.Cholesky(input=_symmetric(x)), ("Bmm",))
    yield Sample(("CholeskyGrad",), lambda x, y: R.CholeskyGrad(l=R.Cholesky(input=_symmetric(x)), grad=y), ("Bmm", "Bmm"))
    yield Sample(("SelfAdjointEigV2",), lambda x: R.SelfAdjointEigV2(input=_symmetric(x), compute_v=False)[0], ("Bmm",))
    yield Sample(("MatrixSolve",), lambda x, y: R.MatrixSolve(matrix=_symmetric(x), rhs=y), ("Bmm", "Bmn"))
    for axes in (("Bmm", "Bmn"), ("Bmm", "ABmn"), ("ABmm", "Bmn")):
        yield Sample(("MatrixTriangularSolve",), lambda x, y: R.MatrixTriangularSolve(matrix=_symmetric(x), rhs=y), axes)
    image = (("h", 4), ("w", 4), ("c", 3))
    for name, adjusted in (("Contrastv2", {"contrast_factor": 2.0}), ("Hue", {"delta": 0.2}), ("Saturation", {"scale": 0.7})):
        yield Sample((f"Adjust{name}",), _operation(f"Adjust{name}", **adjusted), ("Bhwc",), ("float32",), image)
    for name in ("RGBToHSV", "HSVToRGB"):
        yield Sample((name,), lambda x, name=name: getattr(R, name)(images=x), ("Bac",))
    yield Sample(("MatrixDiagV3",), lambda x: tf.linalg.diag(x), ("Bak",))
    yield Sample(("MatrixDiagV3",), lambda x: tf.linalg.diag(x, k=(-1, 1)), ("Bck",))
    yield Sample(("MatrixDiagPartV3",), lambda x: tf.linalg.diag_part(x), ("Bkk",))
    yield Sample(("Bitcast",), lambda x: R.Bitcast(input=x, type=tf.int32), ("Ba",))
    yield Sample(("Bitcast",), lambda x: R.Bitcast(input=R.Bitcast(input=x, type=tf.int32), type=tf.float64), ("Ba",))
    yield Sample(("Snapshot",), lambda x: R.Snapshot(input=x), ("BaC",), partial=(0,))
    # A linear function of each tower's own value is a linear function of the sum.
    yield Sample(("Snapshot",), lambda x: total_of_own(2.0 * own_part(tf.reduce_sum(x, 0)) / 3.0), ("BaC",))


def _symmetric(x):
    return tf.matmul(x, x, transpose_b=True) + 4.0 * tf.eye(3, dtype=x.dtype)


def _reshaping():
    rows = lambda x: tf.shape(x)[0]  # noqa: E731
    four = (("d", 4),)
    for shape in ([-1, 12], [-1, 3], [-1, 4], [-1], [-1, 6, 2], [-1, 2]):
        yield Sample(("Reshape",), lambda x, shape=shape: tf.reshape(x, shape), ("Bad",), sizes=four, partial=(0,))
    for shape in (lambda x: [rows(x), -1], lambda x: [rows(x) * 3, 4], lambda x: [rows(x), 2, 6], lambda x: [1, rows(x), 12]):
        yield Sample(("Reshape",), lambda x, shape=shape: tf.reshape(x, shape(x)), ("Bad",), sizes=four)
    # The rows are not along the first axis, alone or behind another axis.
    yield Sample(("Reshape",), lambda x: tf.reshape(x, [3, -1, 2]), ("aBd",), sizes=four)
    yield Sample(("Reshape",), lambda x: tf.reshape(x, [-1, 4]), ("aBd",), sizes=four)
    yield Sample(("Reshape",), lambda x: tf.reshape(tf.reshape(x, [-1, 4]), [3, -1, 4]), ("aBd",), sizes=four)
    # Rows meet rows.
    yield Sample(("Reshape",), lambda x: tf.reshape(x, [2, -1]), ("Bd",), sizes=(("d", 4),), meets=True)
    for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        yield Sample(("Transpose",), lambda x, order=order: tf.transpose(x, order), ("BaC",), partial=(0,))
    for axis in (0, 1, -1):
        yield Sample(("ExpandDims",), lambda x, axis=axis: tf.expand_dims(x, axis), ("Ba",), partial=(0,))
        yield Sample(("Pack",), lambda x, y, axis=axis: tf.stack([x, y], axis), ("BC", "BC"), partial=(0, 1))
        yield Sample(("Unpack",), lambda x, axis=axis: tf.unstack(x, num=3, axis=axis), ("Ba" if axis else "aB",), partial=(0,))
    yield Sample(("Squeeze",), lambda x: tf.squeeze(x, [1]), ("BiC",), partial=(0,))
    yield Sample(("Squeeze",), lambda x: tf.squeeze(x, [-1]), ("Bai",))
    yield Sample(("Tile",), lambda x: tf.tile(x, [2, 3]), ("Ba",))
    yield Sample(("Tile",), lambda x: tf.tile(x, [1, 2]), ("aB",))
    yield Sample(("Tile",), lambda x, y: tf.tile(x, [tf.shape(y)[0], 1]), ("ia", "Ba"))
    yield Sample(("BroadcastTo",), lambda x, y: tf.broadcast_to(x, tf.shape(y)), ("a", "Ba"))
    yield Sample(("BroadcastTo",), lambda x, y: tf.broadcast_to(x, tf.shape(y)), ("Bi", "Ba"))
    yield Sample(("Fill",), lambda x: tf.fill([tf.shape(x)[0], 2], 7.0), ("Ba",))
    yield Sample(("Fill",), lambda x: tf.zeros([2, 3 * tf.shape(x)[0]]), ("Ba",))


def _picking():
    rows = lambda x: tf.shape(x)[0]  # noqa: E731
    for axis in (0, 1):
        yield Sample(("ConcatV2",), lambda x, y, axis=axis: tf.concat([x, y], axis), ("BC", "BC"), partial=(0, 1))
        yield Sample(("Split",), lambda x, axis=axis: tf.split(x, 3, axis), ("Ba" if axis else "aB",), partial=(0,))
    yield Sample(("ConcatV2", "Split"), lambda x, y: tf.split(tf.concat([x, y], 0), 2), ("Ba", "Ba"))
    yield Sample(("SplitV",), lambda x: tf.split(x, [1, 2], 1), ("Ba",), partial=(0,))
    yield Sample(("ConcatV2", "SplitV"), lambda x, y: tf.split(tf.concat([x, y, y], 0), [rows(x), 2 * rows(y)]), ("Ba", "Ba"))
    # The segments differ, in a tensor that towers have and in a whole one.
    joined = lambda x, y: tf.concat([x, tf.reshape(y, [-1, 2])], 0)  # noqa: E731
    yield Sample(("ConcatV2",), lambda x, y: joined(x, y) + tf.sort(joined(x, y), 0), ("Bd", "Bad"), sizes=(("d", 2),))
    for name, more in (("Pad", {}), ("PadV2", {"constant_values": 7.0}), ("MirrorPad", {"mode": "REFLECT"})):
        padded = _operation(name, paddings=[[0, 0], [1, 2]], **more)
        yield Sample((name,), padded, ("Ba",), partial=(0,) if name == "Pad" else ())
    reflected = _operation("MirrorPadGrad", paddings=[[0, 0], [1, 1]], mode="REFLECT")
    yield Sample(("MirrorPadGrad",), reflected, ("Bd",), sizes=(("d", 5),))
    yield Sample(("Roll",), lambda x: tf.roll(x, 1, 1), ("Ba",))
    yield Sample(("Roll",), lambda x: tf.roll(x, 1, 0), ("Ba",), meets=True)
    yield Sample(("Slice",), lambda x: tf.slice(x, [0, 1], [-1, 2]), ("Ba",), partial=(0,))
    yield Sample(("Slice",), lambda x: tf.slice(x, [0, 1], [rows(x), 1]), ("Ba",))
    # A whole tensor of unknown size may have rows or not.
    second = lambda x, y: tf.slice(tf.concat([x, y], 0), [rows(x), 0], [rows(y), 2])  # noqa: E731
    yield Sample(("Slice", "ConcatV2"), second, ("Ba", "Ba"), missing=("B:0",))
    slices = (
        lambda x: x[:, 1:],
        lambda x: x[..., 0],
        lambda x: x[:, None, ::2],
        lambda x: x[:, 1],
        lambda x: x[: rows(x)],
        lambda x: tf.concat([x, 2.0 * x], 0)[rows(x) :],
        lambda x: tf.concat([x, 2.0 * x], 0)[: rows(x), 1:],
    )
    for taken in slices:
        yield Sample(("StridedSlice",), taken, ("Ba",), partial=(0,))
        yield Sample(("StridedSliceGrad",), _gradients(taken), ("Ba",))
    for taken in (lambda x: x[1:], lambda x: x[0], lambda x: x[::-1], lambda x: x[: (rows(x) + 1) // 2]):
        yield Sample(("StridedSlice",), taken, ("Bi",), meets=True)
        yield Sample(("StridedSliceGrad",), _gradients(taken), ("Bi",), meets=True)


def _windows():
    image = (("h", 6), ("w", 6), ("c", 2), ("o", 2))
    window = {"strides": [1, 2, 2, 1], "padding": "SAME"}
    volume = {"strides": [1, 2, 2, 2, 1], "padding": "SAME"}
    single = ("float32",)

    def sample(types, function, axes=("Bhwc",), dtypes=("float64",)):
        return Sample(types, function, axes, dtypes, image)

    def with_gradients(name, function, axes=("Bhwc",), dtypes=single, types=None):
        yield sample((name,), function, axes, dtypes)
        yield sample(types or (f"{name}Grad",), _gradients(function), axes, dtypes)

    yield sample(("Conv",), _operation("Conv", 2, **window), ("Bhwc", "33co"), single)
    yield sample(("Dilation2D",), _operation("Dilation2D", 2, rates=[1, 1, 1, 1], **window), ("Bhwc", "33c"))
    pools = [(f"{name}Pool", ("Bhwc",), {"ksize": [1, 2, 2, 1], **window}) for name in ("Max", "Avg")]
    pools += [(f"{name}Pool3D", ("Bhwhc",), {"ksize": [1, 2, 2, 2, 1], **volume}) for name in ("Max", "Avg")]
    for name, axes, arguments in pools:
        for dtype in ("float32",) if name.endswith("3D") else ("float64", "float32"):
            yield from with_gradients(name, _operation(name, **arguments), axes, (dtype,))
    yield sample(("MaxPoolV2",), _operation("MaxPoolV2", ksize=[1, 2, 2, 1], **window))
    for name, axes, arguments in pools[::2]:
        pool = _operation(name, **arguments)
        first = lambda x, pool=pool: tf.gradients(tf.reduce_sum(pool(x) ** 3), x)[0]  # noqa: E731
        yield sample((f"{name}GradGrad",), _gradients(first), axes, single)
    for name, arguments, version, axes in (
        ("Conv2D", window, "", ("Bhwc", "33co")),
        ("DepthwiseConv2dNative", window, "", ("Bhwc", "33co")),
        ("Conv3D", volume, "V2", ("Bhwhc", "333co")),
    ):
        both = (f"{name}BackpropInput{version}", f"{name}BackpropFilter{version}")
        yield from with_gradients(name, _operation(name, 2, **arguments), axes, ("float64",), both)
    yield from with_gradients("LRN", _operation("LRN"))
    yield sample(("SpaceToBatchND",), lambda x: tf.space_to_batch(x, [2, 1], [[2, 0], [0, 0]]))
    in_batch = lambda x: tf.tanh(tf.space_to_batch(x, [2, 2], [[1, 1], [0, 2]]))  # noqa: E731
    yield sample(("BatchToSpaceND",), lambda x: tf.batch_to_space(in_batch(x), [2, 2], [[0, 1], [1, 0]]))
    yield sample(("DepthToSpace",), lambda x: tf.nn.depth_to_space(tf.concat([x, x], -1), 2))
    yield sample(("SpaceToDepth",), lambda x: tf.nn.space_to_depth(x, 2))
    patches = {"ksizes": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "rates": [1, 1, 1, 1], "padding": "VALID"}
    yield sample(("ExtractImagePatches",), _operation("ExtractImagePatches", **patches))
    glimpse = _operation("ExtractGlimpse", 3, uniform_noise=False)
    yield sample(("ExtractGlimpse",), lambda x: glimpse(x, [2, 2], tf.zeros([tf.shape(x)[0], 2])), dtypes=single)
    yield sample(("ResizeArea",), _operation("ResizeArea", size=[4, 9]), dtypes=single)
    for name in ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic"):
        yield from with_gradients(name, _operation(name, size=[4, 9]))
    moved = _operation("ScaleAndTranslate", size=[5, 5], scale=[0.9, 1.1], translation=[0.5, 0.0])
    yield sample(("ScaleAndTranslate",), moved, dtypes=single)
    for name, more in (("ImageProjectiveTransformV2", {}), ("ImageProjectiveTransformV3", {"fill_value": 0.5})):
        for axes in ("Bt", "it"):
            transformed = _operation(name, 2, output_shape=[5, 5], interpolation="BILINEAR", **more)
            yield Sample((name,), transformed, ("Bhwc", axes), single, (*image, ("t", 8)))
    for axes in ("BaC", "aBC"):
        rows = axes.index("B")
        backwards = _operation("ReverseSequence", 2, seq_dim=1 - rows, batch_dim=rows)
        yield Sample(("ReverseSequence",), backwards, (axes, "B"), ("float64", "int32"), low=0, high=3)
    labels = {"axes": ("Bk", "B"), "sizes": (("k", 5),), "low": 0, "high": 4}
    yield Sample(("InTopKV2",), _operation("InTopKV2", 2, k=2), dtypes=("float32", "int32"), **labels)
    name = "SoftmaxCrossEntropyWithLogits"
    yield Sample((name,), _operation(name, 2), ("Bk", "Bk"))
    yield Sample((f"Sparse{name}",), _operation(f"Sparse{name}", 2), dtypes=("float64", "int64"), **labels)


def _indexing():
    few = {"low": 0, "high": 2}
    yield Sample(("GatherV2",), lambda x, i: tf.gather(x, i), ("aC", "Bd"), ("float64", "int32"), **few)
    yield Sample(("GatherV2",), lambda x, i: tf.gather(x, i, axis=1), ("BaC", "d"), ("float64", "int32"), **few)
    yield Sample(("GatherV2",), lambda x, i: tf.gather(x, i, batch_dims=1), ("Bac", "Bd"), ("float64", "int32"), **few)
    yield Sample(("GatherNd",), lambda x, i: tf.gather_nd(x, i), ("ddC", "Bn"), ("float64", "int32"), (("n", 2),), **few)
    table = tf.Variable(tf.random.stateless_uniform([3, 4], [1, 2], dtype=tf.float64), trainable=False)
    yield Sample(("ResourceGather",), lambda i: table.sparse_read(i), ("Bd",), ("int32",), **few)
    yield Sample(("ScatterNd",), lambda i, x: tf.scatter_nd(i, x, [4, 3]), ("Bi", "Ba"), ("int32", "float64"), **few)
    in_columns = lambda i, x: tf.scatter_nd(i, x, tf.stack([4, tf.shape(x)[1]]))  # noqa: E731
    yield Sample(("ScatterNd",), in_columns, ("ai", "aB"), ("int32", "float64"), **few)
    for name in ("Sum", "Max", "Min", "Prod"):
        by_segment = _operation(f"UnsortedSegment{name}", 2, num_segments=4)
        yield Sample((f"UnsortedSegment{name}",), by_segment, ("BaC", "Ba"), ("float64", "int32"), **few)
    for axes in ("Ba", "B"):
        counted = _operation("DenseBincount", size=3, weights=np.zeros(0), binary_output=axes == "Ba")
        yield Sample(("DenseBincount",), counted, (axes,), ("int32",), **few)
        summed = lambda i, x: R.DenseBincount(input=i, size=3, weights=x)  # noqa: E731
        yield Sample(("DenseBincount",), summed, (axes, axes), ("int32", "float64"), **few)
    for axis in (-1, 0, 1):
        yield Sample(("OneHot",), lambda i, axis=axis: tf.one_hot(i, 3, axis=axis), ("Ba",), ("int32",), **few)


def _drawing():
    seeds = {"seed": [3, 4]}
    drawn = {
        "StatelessRandomUniform": lambda shape: R.StatelessRandomUniform(shape=shape, **seeds),
        "StatelessRandomNormal": lambda shape: R.StatelessRandomNormal(shape=shape, **seeds),
        "StatelessTruncatedNormal": lambda shape: R.StatelessTruncatedNormal(shape=shape, **seeds),
        "StatelessRandomUniformInt": lambda shape: R.StatelessRandomUniformInt(shape=shape, **seeds, minval=0, maxval=9),
        "StatelessRandomUniformFullInt": lambda shape: R.StatelessRandomUniformFullInt(shape=shape, **seeds, dtype=tf.int64),
        "StatelessTruncatedNormalV2": lambda shape: tf.random.stateless_truncated_normal(shape, [3, 4]),
        "StatelessRandomUniformIntV2": lambda shape: tf.random.stateless_uniform(shape, [3, 4], 0, 9, tf.int64),
        "StatelessRandomUniformFullIntV2": lambda shape: tf.random.stateless_uniform(shape, [3, 4], None, None, tf.int32),
        "StatelessRandomGammaV3": lambda shape: tf.random.stateless_gamma(shape, [3, 4], 2.0),
        "StatelessRandomGammaV2": lambda shape: R.StatelessRandomGammaV2(shape=shape, **seeds, alpha=2.0),
        "StatelessRandomBinomial": lambda shape: tf.random.stateless_binomial(shape, [3, 4], 9.0, 0.4),
        "StatelessRandomPoisson": lambda shape: tf.random.stateless_poisson(shape, [3, 4], 5.0),
        "StatelessParameterizedTruncatedNormal": lambda shape: tf.random.stateless_parameterized_truncated_normal(
            shape, [3, 4]
        ),
    }
    for name, draw in drawn.items():
        yield Sample((name,), lambda x, draw=draw: draw(tf.stack([tf.shape(x)[0], 4])), ("Ba",))
    # Rows that end within a block of Philox, wide rows, several rows for each entry of the batch, and other dtypes.
    uniform, normal = tf.random.stateless_uniform, tf.random.stateless_normal
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        for name, draw in (("Uniform", uniform), ("Normal", normal)):
            for row in ([], [3], [5, 1], [1001]):
                one = ("StatelessRandom" + name + "V2",)
                yield Sample(one, lambda x, d=draw, r=row, t=dtype: d(tf.stack([tf.shape(x)[0], *r]), [3, 4], dtype=t), ("Ba",))
    yield Sample(("StatelessRandomNormalV2",), lambda x: normal([3 * tf.shape(x)[0], 3], [3, 4]), ("Ba",))
    yield Sample(("StatelessRandomUniformV2",), lambda x: uniform(tf.shape(x), [3, 4]), ("Bac",))
    for dtype in ("int32", "int64", "uint32", "uint64"):
        bits = lambda x, t=dtype: tf.cast(uniform([tf.shape(x)[0], 3], [3, 4], None, None, t), tf.int64)  # noqa: E731
        yield Sample(("StatelessRandomUniformFullIntV2",), bits, ("Ba",))
    yield Sample(("Range",), lambda x: tf.range(tf.shape(x)[0]), ("Ba",))


def _lists():
    def loop(x):
        """Keeps a list of its states, as recurrent layers do, and reads it backwards for the gradient."""
        steps = tf.shape(x)[0]

        def round_(i, state, listed):
            state = tf.tanh(state + listed_in.read(i))
            return i + 1, state, listed.write(i, state)

        listed_in = tf.TensorArray(x.dtype, size=0, dynamic_size=True, element_shape=[None, 3]).unstack(x)
        listed = tf.TensorArray(x.dtype, size=steps, element_shape=[None, 3])
        _, state, listed = tf.while_loop(lambda i, *_: i < steps, round_, [0, tf.zeros_like(x[0]), listed])
        return state, listed.stack()

    def with_gradient(x):
        state, stacked = loop(x)
        return stacked, tf.gradients(tf.reduce_sum(state**2) + tf.reduce_sum(stacked), x)

    in_loops = "EmptyTensorList TensorListReserve TensorListFromTensor TensorListPushBack TensorListSetItem TensorListGetItem"
    in_loops += " TensorListPopBack TensorListStack TensorListElementShape"
    yield Sample(tuple(types(in_loops)), _in_graph(with_gradient), ("TBa",), sizes=(("T", 4),))

    def grown(x):
        """Writes past the end of a list, and returns its length."""
        listed = tf.TensorArray(x.dtype, size=1, dynamic_size=True, element_shape=[None, 3]).write(0, x).write(1, 2.0 * x)
        return listed.stack(), listed.size()

    yield Sample(("TensorListLength",), _in_graph(grown), ("Ba",))


def samples():
    families = (_elementwise, _reductions, _products, _reshaping, _picking, _windows, _indexing, _drawing, _lists)
    return [sample for family in families for sample in family()]
