"""Define the kinds of statements of random programs: how the parameters of each are drawn, and how it runs.

A drawn statement is run at once, on batches of several sizes; one that fails there is not kept. So the drawing may be careless.
"""

import functools

import numpy as np
import tensorflow as tf
from keras import layers

from fuzz.programs import RUNS, WIDTH

FLOAT = "float64"
AXIS = (-2, -1, 0, 1, 2)
EITHER = (True, False)
# The partition calls nodes of its own so.
OWN_NAMES = ["constant", "own_rows", "argument_0", "given_0", "read", "result_0", "home", "tower_0"]


def of(*dtypes, rank=None, least=0, alike=False, bodies=0, **choices):
    """Returns a function that draws the arguments, the parameters and the bodies of a statement.

    All arguments have one rank, if it is given, or at least the least one if they are no integers, and one shape if they are
    alike. The argument of each body is like the first argument. The choices are the values of each parameter.
    """

    def draw(rng, pool):
        names = []
        for dtype in dtypes:
            names.append(pool.like(names[0], dtype) if alike and names else pool.pick(dtype, rank, least))
        parameters = {name: rng.choice(list(values)) for name, values in choices.items()}
        return names, parameters, [pool.body(names[0]) for _ in range(bodies)]

    return draw


def one_of(functions):
    """Returns a function that calls one of several functions, which its parameter `function` names."""
    return lambda *arguments, function, **parameters: functions[function](*arguments, **parameters)


UNARY = {
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    "negative": tf.negative,
    "absolute": tf.abs,
    "relu": tf.nn.relu,
    "softplus": tf.math.softplus,
    "sine": tf.sin,
    "root": lambda x: tf.sqrt(tf.abs(x) + 0.1),
    "inverse root": lambda x: tf.math.rsqrt(tf.abs(x) + 0.5),
    "bounded square": lambda x: tf.square(tf.tanh(x)),
    "logarithm": lambda x: tf.math.log1p(tf.abs(x)),
    "sign": tf.sign,
    "exponential": lambda x: tf.exp(-tf.abs(x)),
    "elu": tf.nn.elu,
    "error function": tf.math.erf,
    "stopped": tf.stop_gradient,
    "identity": tf.identity,
    "zeros like": tf.zeros_like,
    "ones like": tf.ones_like,
    "floor": tf.floor,
    "gelu": tf.nn.gelu,
    "clipped": lambda x: tf.clip_by_value(x, -0.7, 0.9),
    "not a number": lambda x: tf.where(x > 1.3, tf.constant(np.nan, x.dtype), x),
    "single precision": lambda x: tf.cast(tf.cast(x, tf.float32), x.dtype),
    "half precision": lambda x: tf.cast(tf.tanh(tf.cast(x, tf.float16)), x.dtype),
    "angle": lambda x: tf.math.angle(tf.complex(x, x * 0.5 + 0.3)),
    "complex product": lambda x: tf.math.real(tf.complex(x, -x) * tf.complex(tf.tanh(x), x * 0.1)),
}
BINARY = {
    "add": tf.add,
    "subtract": tf.subtract,
    "multiply": tf.multiply,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "divide": lambda a, b: a / (1.0 + tf.abs(b)),
    "squared difference": lambda a, b: tf.math.squared_difference(tf.tanh(a), tf.tanh(b)),
    "arc tangent": lambda a, b: tf.atan2(a, 1.5 + tf.abs(b)),
    "divide no nan": lambda a, b: tf.math.divide_no_nan(a, tf.round(b)),
    "where": lambda a, b: tf.where(a > b, a, b * 0.5),
    "less": lambda a, b: tf.cast(a < b, a.dtype),
}
REDUCTIONS = {
    "sum": lambda x, axis, keepdims: tf.tanh(tf.reduce_sum(x, axis, keepdims)),
    "mean": tf.reduce_mean,
    "maximum": tf.reduce_max,
    "minimum": tf.reduce_min,
    "product": lambda x, axis, keepdims: tf.reduce_prod(tf.tanh(x) + 1.2, axis, keepdims),
    "all": lambda x, axis, keepdims: tf.cast(tf.reduce_all(x < 1.0, axis, keepdims), x.dtype),
    "any": lambda x, axis, keepdims: tf.cast(tf.reduce_any(x > 1.0, axis, keepdims), x.dtype),
    "log of sum": tf.reduce_logsumexp,
    "variance": tf.math.reduce_variance,
    "norm": lambda x, axis, keepdims: tf.sqrt(tf.reduce_sum(x * x, axis, keepdims) + 0.1),
}
ALONG = {
    "softmax": lambda x, axis: tf.nn.softmax(x, axis),
    "log softmax": lambda x, axis: tf.nn.log_softmax(x, axis),
    "cumulative sum": lambda x, axis: tf.tanh(tf.cumsum(x, axis)),
    "exclusive sum": lambda x, axis: tf.tanh(tf.cumsum(x, axis, exclusive=True, reverse=True)),
    "cumulative product": lambda x, axis: tf.math.cumprod(tf.tanh(x), axis),
    "sorted": lambda x, axis: tf.sort(x, axis),
    "reversed": lambda x, axis: tf.reverse(x, [axis]),
    "rolled": lambda x, axis: tf.roll(x, 1, axis),
    "normalized": lambda x, axis: tf.math.l2_normalize(x, axis, 1e-3),
    "without the first": lambda x, axis: tf.gather(x, tf.range(1, tf.shape(x)[axis]), axis=axis),
    "centered": lambda x, axis: x - tf.reduce_mean(x, axis, keepdims=True),
    "order": lambda x, axis: tf.cast(tf.argsort(x, axis), x.dtype) * 0.1,
    "place of the largest": lambda x, axis: tf.cast(tf.argmax(x, axis), x.dtype) * 0.1,
    "doubled": lambda x, axis: tf.concat([x, 0.5 * x], axis),
    "repeated": lambda x, axis: tf.repeat(x, 2, axis),
    "stacked": lambda x, axis: tf.stack([x, -x], axis),
    "first of them": lambda x, axis: tf.gather(x, 0, axis=axis),
    "largest two": lambda x, axis: tf.math.top_k(x, tf.minimum(2, tf.shape(x)[-1])).values,
}


def size_of(x, axis, static):
    """Returns the size of an axis: as the shape says, if that is asked for and known, or as the tensor says in the step."""
    known = x.shape[axis] if static else None
    return tf.shape(x)[axis] if known is None else known


# New shapes, from a tensor and a function that returns the size of an axis.
RESHAPES = {
    "flat": lambda x, size: [-1],
    "rows and the rest": lambda x, size: [size(0), -1],
    "first two merged": lambda x, size: [size(0) * size(1), *map(size, range(2, len(x.shape)))],
    "last two merged": lambda x, size: [*map(size, range(len(x.shape) - 2)), size(-2) * size(-1)],
    "first two swapped": lambda x, size: [size(1), size(0), *map(size, range(2, len(x.shape)))],
    "with one": lambda x, size: [size(0), 1, *map(size, range(1, len(x.shape)))],
    "with minus one inside": lambda x, size: [size(0), -1, size(-1), 1],
    "last split": lambda x, size: [*map(size, range(len(x.shape) - 1)), 2, -1],
    "of all": lambda x, size: [tf.size(x) // 3, 3],
    "columns first": lambda x, size: [3, -1],
}


def selection(x, vector):
    condition = tf.reduce_sum(x, list(range(1, len(x.shape)))) > 0 if vector else x > 0
    return tf.raw_ops.Select(condition=condition, x=x, y=-0.5 * x)


def transposed(x, swap):
    order = list(range(len(x.shape)))
    a, b = swap
    order[a], order[b] = order[b], order[a]
    return tf.transpose(x, order)


def half_of_a_split(x, axis, part, static):
    size = size_of(x, axis, static)
    return tf.split(x, [size // 2, size - size // 2], axis)[part]


EQUATIONS = ("ab,cb->ac", "ab,ab->a", "ab,ac->bc", "ab,b->a", "abc,abd->acd", "...a,a->...", "a,b->ab", "abc,dc->abd")
INTEGERS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: tf.math.floormod(a * b, tf.constant(7, a.dtype)),
    "wrap": lambda a, b: tf.math.floormod(a * tf.constant(1013904223, a.dtype) + b, tf.constant(5, a.dtype)),
    "maximum": tf.maximum,
    "quotient": lambda a, b: a // (1 + tf.abs(b)),
}
SEGMENTS = {name: getattr(tf.math, f"unsorted_segment_{name}") for name in ("sum", "max", "min", "mean", "prod")}


def below(i, x, axis):
    """Returns integers that are indices into an axis."""
    return tf.math.floormod(i, tf.cast(tf.shape(x)[axis], i.dtype))


def integers_of_alike(a, b, function):
    return tf.math.floormod(INTEGERS[function](a, tf.cast(b, a.dtype)), tf.constant(5, a.dtype))


def scattered(x, i):
    # TensorFlow aborts the process for other shapes.
    i.shape.assert_is_compatible_with(x.shape[: i.shape.rank])
    if i.shape.rank > x.shape.rank:
        raise ValueError("there are more axes of indices")
    return tf.tanh(tf.scatter_nd(tf.math.floormod(i, 4)[..., None], x, tf.concat([[4], tf.shape(x)[1:]], 0)))


def scattered_in_columns(x, static):
    places = tf.math.floormod(tf.range(x.shape[1]), 4)[:, None]
    return tf.transpose(tf.scatter_nd(places, tf.transpose(x), tf.stack([4, size_of(x, 0, static)])))


def ones_of_unknown_width(x, static):
    width = tf.size(tf.where(tf.ones([x.shape[1]]) > 0.5))
    hidden = tf.slice(x, [0, 0], [-1, width])
    ones = tf.ones(tf.stack([size_of(x, 0, static), tf.shape(hidden)[1]]), x.dtype)
    return tf.ensure_shape(tf.tanh(hidden + ones), x.shape)


def times_a_quotient_of_its_size(x, divisor, least_value):
    return x * tf.cast(tf.maximum(tf.shape(x)[0] // divisor, least_value), x.dtype) * 0.1


def squares_of(x):
    """Returns a positive definite matrix for each matrix."""
    return tf.matmul(x, x, transpose_a=True) / 10 + tf.eye(tf.shape(x)[-1], dtype=x.dtype)


MATRICES = {
    "bands": lambda x: tf.linalg.diag(tf.stack([x, 0.5 * x, x], -2), k=(-1, 1)),
    "solution": lambda x: tf.linalg.triangular_solve(tf.stack([squares_of(x), 2.0 * squares_of(x)]), squares_of(tf.sin(x))),
    "triangle": lambda x: tf.linalg.band_part(x, -1, 0),
    "diagonal": tf.linalg.diag_part,
    "of the diagonal": tf.linalg.diag,
    "factor": lambda x: tf.linalg.cholesky(squares_of(x)),
    "inverse": lambda x: tf.linalg.inv(squares_of(x)),
    "determinant": lambda x: tf.linalg.det(squares_of(x)),
    "orthogonal": lambda x: tf.abs(tf.linalg.qr(x).r),
    "trace": tf.linalg.trace,
}
FILTER = np.random.default_rng(1).normal(size=(2, 2, 2, 2)) * 0.4
IMAGES = {
    "convolution": lambda x: tf.nn.conv2d(x, tf.constant(FILTER), 1, "SAME"),
    "strided convolution": lambda x: tf.nn.conv2d(x, tf.constant(FILTER), 2, "VALID"),
    "dilated convolution": lambda x: tf.nn.convolution(x, tf.constant(FILTER), padding="SAME", dilations=[2, 2]),
    "depthwise convolution": lambda x: tf.nn.depthwise_conv2d(x, tf.constant(FILTER), [1, 1, 1, 1], "SAME"),
    "transposed convolution": lambda x: tf.nn.conv2d_transpose(
        x, tf.constant(FILTER), tf.stack([tf.shape(x)[0], 8, 8, 2]), 2, "SAME"
    ),
    "pooling": lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "mean pooling": lambda x: tf.nn.avg_pool2d(x, 2, 1, "SAME"),
    "resized": lambda x: tf.image.resize(x, [3, 5], "bilinear"),
    "enlarged": lambda x: tf.image.resize(x, [8, 8], "nearest"),
    "depth to space": lambda x: tf.nn.depth_to_space(tf.concat([x, x], -1), 2),
    "space to batch": lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]),
    "patches": lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"),
    "flipped": tf.image.flip_left_right,
}


def image(x, function):
    flat = tf.reshape(tf.tanh(x), [tf.shape(x)[0], -1])[:, :2]
    images = tf.matmul(flat, tf.ones([2, 32], x.dtype) * tf.range(32, dtype=x.dtype) / 32)
    made = IMAGES[function](tf.reshape(images, [-1, 4, 4, 2]))
    return tf.tanh(tf.reduce_sum(tf.cast(made, x.dtype), [1, 2]))


DRAWN = {
    "normal": tf.random.stateless_normal,
    "uniform": tf.random.stateless_uniform,
    "truncated": tf.random.stateless_truncated_normal,
}


def noise(x, function, seed, size, static):
    shape = tf.shape(x) if size == "like" else [size_of(x, 0, static), WIDTH]
    return tf.cast(DRAWN[function](shape, [seed, 7]), x.dtype)


def checked(x):
    tf.debugging.assert_less(tf.reduce_min(x), tf.constant(1e6, x.dtype))
    return tf.debugging.check_numerics(tf.where(tf.math.is_nan(x), tf.zeros_like(x), x), "numbers")


def in_python(x):
    made = tf.numpy_function(lambda array: np.tanh(array) * 0.5, [x], tf.float64)
    made.set_shape(x.shape)
    return made


def columns_first(x):
    return tf.transpose(x, [1, 0, *range(2, len(x.shape))])


def list_of_integers(x, first, second, rows):
    parts = tf.TensorArray(tf.int32, 3, element_shape=[]).write(0, tf.shape(x)[0] if rows else first).write(1, second)
    return x * tf.cast(parts.read(1) - parts.read(0) + parts.read(2), x.dtype) * 0.1


def scaled_by_the_mean(x, y):
    mean = tf.reduce_sum(tf.cast(y, x.dtype)) / tf.cast(tf.maximum(tf.size(y), 1), x.dtype)
    return x * (0.5 + tf.tanh(mean))


# Kinds by name: the drawing, and a function of the arguments and, by name, the parameters.
KINDS = {
    "unary": (of(FLOAT, function=UNARY), one_of(UNARY)),
    "binary": (of(FLOAT, FLOAT, function=BINARY), one_of(BINARY)),
    "binary of alike": (of(FLOAT, FLOAT, alike=True, function=BINARY), one_of(BINARY)),
    "sum of three": (of(FLOAT, FLOAT, FLOAT, alike=True), lambda a, b, c: tf.add_n([a, b, c])),
    "selection": (of(FLOAT, least=1, vector=EITHER), selection),
    "reduction": (of(FLOAT, least=1, function=REDUCTIONS, axis=AXIS, keepdims=EITHER), one_of(REDUCTIONS)),
    "reduction to a scalar": (of(FLOAT, function=REDUCTIONS), lambda x, function: REDUCTIONS[function](x, None, False)),
    "along an axis": (of(FLOAT, least=1, function=ALONG, axis=AXIS), one_of(ALONG)),
    "slice": (
        of(FLOAT, least=1, axis=(0, 1, 2), begin=(None, 0, 1, -1, -2), end=(None, 1, 2, -1), step=(1, 1, 1, 2, -1)),
        lambda x, axis, begin, end, step: x[tuple([slice(None)] * axis + [slice(begin, end, step)])],
    ),
    "new axis": (of(FLOAT, axis=(-1, 0, 1)), tf.expand_dims),
    "transposed": (of(FLOAT, least=2, swap=((0, 1), (1, 2), (0, 2))), transposed),
    "reshaped": (
        of(FLOAT, least=1, shape=RESHAPES, static=EITHER),
        lambda x, shape, static: tf.reshape(x, RESHAPES[shape](x, lambda axis: size_of(x, axis, static))),
    ),
    "padded": (
        of(FLOAT, least=1, axis=(0, 1), mode=("CONSTANT", "SYMMETRIC")),
        lambda x, axis, mode: tf.pad(x, [[1, 1] if i == axis else [0, 0] for i in range(len(x.shape))], mode),
    ),
    "tiled": (
        of(FLOAT, least=1, axis=(0, 1), times=(1, 2)),
        lambda x, axis, times: tf.tile(x, [times if i == axis else 1 for i in range(len(x.shape))]),
    ),
    "broadcast to another": (
        of(FLOAT, FLOAT),
        lambda x, other: tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(other))) + 0 * other,
    ),
    "concatenated": (of(FLOAT, FLOAT, least=1, axis=(0, 1, -1)), lambda a, b, axis: tf.concat([a, b], axis)),
    "stacked": (of(FLOAT, FLOAT, alike=True, axis=(0, 1, -1)), lambda a, b, axis: tf.stack([a, b], axis)),
    "half of a split": (of(FLOAT, least=1, axis=(0, 1, -1), part=(0, 1), static=EITHER), half_of_a_split),
    "one of an unstack": (of(FLOAT, least=1, axis=(1, -1)), lambda x, axis: tf.unstack(x, axis=axis)[0]),
    "product": (
        of(FLOAT, FLOAT, rank=2, a=EITHER, b=EITHER),
        lambda x, y, a, b: tf.tanh(tf.matmul(x, y, transpose_a=a, transpose_b=b)),
    ),
    "product of batches": (of(FLOAT, FLOAT, least=2, b=EITHER), lambda x, y, b: tf.tanh(tf.matmul(x, y, transpose_b=b))),
    "einsum": (of(FLOAT, FLOAT, least=1, equation=EQUATIONS), lambda x, y, equation: tf.tanh(tf.einsum(equation, x, y))),
    # Integers and lookups.
    "integers": (
        of(FLOAT, modulus=(2, 3, 5), dtype=("int32", "int64")),
        lambda x, modulus, dtype: tf.math.floormod(tf.cast(tf.math.floor(x * 3.0), dtype), tf.constant(modulus, dtype)),
    ),
    "numbers": (of("integer"), lambda i: tf.cast(i, tf.float64) * 0.25),
    "integers of alike": (of("integer", "integer", alike=True, function=INTEGERS), integers_of_alike),
    "one hot": (of("integer", axis=(-1, 0, 1), depth=(3, 5)), functools.partial(tf.one_hot, dtype=tf.float64)),
    "gathered": (of(FLOAT, "integer", axis=(0, 1)), lambda x, i, axis: tf.gather(x, below(i, x, axis), axis=axis)),
    "gathered in each row": (of(FLOAT, "integer", least=1), lambda x, i: tf.gather(x, below(i, x, 1), batch_dims=1)),
    "gathered at pairs": (
        of(FLOAT, "integer", least=1),
        lambda x, i: tf.gather_nd(x, tf.stack([below(i, x, 0), tf.zeros_like(i)], -1)),
    ),
    "segments": (
        of(FLOAT, "integer", least=1, function=SEGMENTS),
        lambda x, i, function: tf.clip_by_value(SEGMENTS[function](x, tf.math.floormod(i, 4), 4), -2.0, 2.0),
    ),
    "scattered": (of(FLOAT, "integer", least=1), scattered),
    "scattered in columns": (of(FLOAT, rank=2, static=EITHER), scattered_in_columns),
    "product of unsigned integers": (
        of(FLOAT, least=1),
        lambda x: tf.tanh(tf.cast(tf.reduce_prod(tf.cast(tf.abs(x) * 2.0, tf.uint32), 0), x.dtype) * 0.1),
    ),
    "counts": (
        of("integer", rank=1),
        lambda i: tf.cast(tf.math.bincount(tf.cast(tf.abs(i), tf.int32), minlength=5, maxlength=5), tf.float64) * 0.1,
    ),
    # Rows of unknown number.
    "chosen rows": (
        of(FLOAT, "integer", least=1),
        lambda x, i: tf.boolean_mask(x, tf.reduce_sum(x, list(range(1, len(x.shape)))) > 0.1),
    ),
    "chosen by integers": (of(FLOAT, "integer", least=1), lambda x, i: tf.boolean_mask(x, i > 0)),
    "unique": (of("integer", rank=1), lambda i: tf.cast(tf.unique(i).y, tf.float64) * 0.1),
    "mean or zero": (of(FLOAT, least=1), lambda x: tf.reduce_sum(x, 0) / tf.cast(tf.maximum(tf.shape(x)[0], 1), x.dtype)),
    # Numbers of rows.
    "times its size": (
        of(FLOAT, least=1, axis=(0, 1), static=EITHER),
        lambda x, axis, static: x * tf.cast(size_of(x, axis, static), x.dtype) * 0.1,
    ),
    "share of the size": (
        of(FLOAT, FLOAT, least=1),
        lambda x, y: x * tf.cast(tf.size(y) / (1 + tf.size(x) + tf.size(y)), x.dtype),
    ),
    "identity matrix": (
        of(FLOAT, least=2, static=EITHER),
        lambda x, static: tf.eye(size_of(x, 0, static), dtype=x.dtype) + 0.0 * tf.reduce_sum(x),
    ),
    "counted up": (
        of(FLOAT, least=1, static=EITHER, axis=(0, 1)),
        lambda x, static, axis: tf.cast(tf.range(size_of(x, axis, static)), x.dtype) * 0.1,
    ),
    "zeros for each": (
        of(FLOAT, least=1, static=EITHER, value=(0.0, 0.5)),
        lambda x, static, value: tf.fill([size_of(x, 0, static), WIDTH], tf.constant(value, x.dtype)),
    ),
    "ones of unknown width": (of(FLOAT, rank=2, static=EITHER), ones_of_unknown_width),
    "times a quotient of its size": (
        of(FLOAT, least=1, divisor=(-2, -1, 2, 3), least_value=(-1, 0, 1)),
        times_a_quotient_of_its_size,
    ),
    "named": (of(FLOAT, name=OWN_NAMES), tf.tanh),
    "matrix": (of(FLOAT, least=1, function=MATRICES), lambda x, function: tf.clip_by_value(MATRICES[function](x), -3.0, 3.0)),
    "image": (of(FLOAT, least=2, function=IMAGES), image),
    "spectrum": (of(FLOAT, least=1), lambda x: tf.tanh(tf.abs(tf.signal.rfft(x)))),
    "cross entropy": (
        of(FLOAT, "integer", least=1),
        lambda x, i: tf.nn.sparse_softmax_cross_entropy_with_logits(below(i, x, -1), x),
    ),
    # Random numbers.
    "noise": (of(FLOAT, least=1, function=DRAWN, seed=range(9), size=("like", "rows"), static=EITHER), noise),
    "dropped out": (of(FLOAT, least=1, seed=range(9)), lambda x, seed: tf.nn.experimental.stateless_dropout(x, 0.3, [seed, 1])),
    "shuffled": (
        of(FLOAT, least=1, seed=range(3)),
        lambda x, seed: tf.gather(x, tf.argsort(tf.random.stateless_uniform([tf.shape(x)[0]], [seed, 2]))),
    ),
    "checked": (of(FLOAT), checked),
    "in Python": (of(FLOAT), in_python),
    "of unknown rank": (of(FLOAT), lambda x: x + tf.numpy_function(lambda array: array * 0.5, [x], tf.float64)),
    "scanned": (of(FLOAT, least=2), lambda x: tf.scan(lambda total, row: tf.tanh(total + row), columns_first(x))),
    "list of integers": (of(FLOAT, least=1, first=(2, 3), second=(5, 7), rows=EITHER), list_of_integers),
    "scaled by the mean": (of(FLOAT, FLOAT), scaled_by_the_mean),
}


def added_to_the_total(scope, x):
    return scope.variables["total"].assign_add(tf.tanh(tf.reduce_sum(x)) * 0.1, read_value=True) + 0.0


def moving_mean(scope, x):
    moving = scope.variables["moving"]
    moving.assign(0.9 * moving + 0.1 * tf.reduce_mean(tf.reshape(x, [-1, WIDTH]), 0))
    return tf.identity(moving)


def counted(scope, x):
    scope.state.counter.assign_add(tf.cast(tf.shape(x)[0], tf.int64))
    return tf.cast(scope.state.counter, tf.float64) * 0.01


def written_to_the_table(scope, i):
    places = tf.math.floormod(i, 5)
    updates = 0.1 * tf.ones([tf.shape(places)[0], WIDTH], tf.float64)
    scope.variables["table"].scatter_add(tf.IndexedSlices(updates, places))
    return tf.reduce_mean(scope.variables["table"], 0)


def branch(scope, x, other, yes, no, constant):
    condition = tf.reduce_mean(other) > 0 if not constant else tf.size(other) > 3
    return tf.cond(condition, lambda: scope.call(yes, x), lambda: scope.call(no, x))


def choice(scope, x, i, *bodies):
    index = tf.cast(tf.math.floormod(tf.reduce_sum(i), 3), tf.int32)
    return tf.switch_case(index, [functools.partial(scope.call, body, x) for body in bodies])


def loop(scope, x, body, rounds):
    return tf.while_loop(lambda i, y: i < rounds, lambda i, y: (i + 1, scope.call(body, y)), [0, x])[1]


def loop_until(scope, x, body):
    def goes_on(i, y):
        return (i < 3) & (tf.reduce_mean(y) > -0.5)

    return tf.while_loop(goes_on, lambda i, y: (i + 1, scope.call(body, y)), [0, x])[1]


def loop_with_a_list(scope, x, body, rounds, taken):
    def one(i, y, states):
        y = scope.call(body, y)
        return i + 1, y, states.write(i, y)

    states = tf.TensorArray(x.dtype, rounds, element_shape=x.shape, clear_after_read=False)
    _, y, states = tf.while_loop(lambda i, *_: i < rounds, one, [0, x, states])
    if taken == "stack":
        return tf.reduce_mean(states.stack(), 0) + y
    return y * 0.5 if taken == "length" else states.read(0 if taken == "first" else rounds - 1)


def loop_that_grows(scope, x, body, rounds):
    def one(i, y):
        return i + 1, tf.concat([y, tf.tanh(y[:, :1]) + tf.reduce_mean(scope.call(body, x))], 1)

    column = tf.reshape(x, [tf.shape(x)[0], -1])[:, :1]
    shapes = [tf.TensorShape([]), tf.TensorShape([None, None])]
    return tf.while_loop(lambda i, y: i < rounds, one, [0, column], shape_invariants=shapes)[1]


def of_a_list(scope, x, other, body, taken):
    parts = tf.TensorArray(x.dtype, 2, infer_shape=False, clear_after_read=False)
    parts = parts.write(0, scope.call(body, x)).write(1, other)
    return tf.reshape(parts.read(taken), tf.shape(other if taken else x))


def mapped(scope, x, body, axis):
    by_axis = columns_first(x) if axis else x
    return tf.map_fn(lambda row: tf.tanh(row) + 0.1 * tf.reduce_mean(scope.call(body, x)), by_axis)


def recurrent(scope, x):
    weights = tf.concat([scope.variables["kernel"], scope.variables["table"]], 0)[: 2 * WIDTH]

    def one(i, h):
        return i + 1, tf.tanh(tf.concat([x, h], 1) @ weights)

    return tf.while_loop(lambda i, h: i < 3, one, [0, tf.zeros([tf.shape(x)[0], WIDTH], x.dtype)])[1]


def function(scope, x, body, compiled):
    called = tf.function(functools.partial(scope.call, body), autograph=False, jit_compile=compiled or None)
    return called(x) + 0.5 * called(x * 0.5)


def custom_gradient(scope, x, body):
    @tf.custom_gradient
    def halved(x):
        return tf.tanh(x), lambda upstream: upstream * 0.5 * tf.cos(x)

    return scope.call(body, halved(x))


def gradient(scope, x, body, of):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = scope.call(body, x)
        total = tf.reduce_mean(y) if of == "mean" else tf.tanh(tf.reduce_sum(tf.tanh(y) ** 2))
    return tf.tanh(tf.convert_to_tensor(tape.gradient(total, x, unconnected_gradients="zero")))


def fails(scope, x):
    """Fails in the step if the state asks for it: a check of the user."""
    if getattr(scope.state, "fails", False):
        tf.debugging.assert_less(tf.abs(tf.reduce_max(x)), tf.constant(-1.0, tf.float64))
    return x


class SelfAttention(layers.MultiHeadAttention):
    """Attends to its own input."""

    def build(self, shape):
        super().build(shape, shape)

    def call(self, x):
        return super().call(x, x, use_causal_mask=True)


# Layers of Keras by name: how each is made, and whether it takes (rows, steps, channels) instead of (rows, ..., channels).
LAYERS = {
    "dense": (lambda: layers.Dense(WIDTH, "tanh"), False),
    "layer normalization": (layers.LayerNormalization, False),
    "batch normalization": (lambda: layers.BatchNormalization(momentum=0.7), False),
    "parametric relu": (lambda: layers.PReLU(shared_axes=[1]), True),
    "group normalization": (lambda: layers.GroupNormalization(1), True),
    "convolution": (lambda: layers.Conv1D(WIDTH, 2, padding="causal"), True),
    "transposed convolution": (lambda: layers.Conv1DTranspose(WIDTH, 2, 2), True),
    "separable convolution": (lambda: layers.SeparableConv1D(WIDTH, 2, padding="same"), True),
    "pooling": (layers.GlobalMaxPooling1D, True),
    "lstm": (lambda: layers.LSTM(WIDTH), True),
    "gru": (lambda: layers.GRU(WIDTH, return_sequences=True, go_backwards=True), True),
    "unrolled": (lambda: layers.SimpleRNN(WIDTH, return_sequences=True, unroll=True), True),
    "bidirectional": (lambda: layers.Bidirectional(layers.SimpleRNN(2)), True),
    "each step": (lambda: layers.TimeDistributed(layers.Dense(2)), True),
    "attention": (lambda: SelfAttention(2, 2), True),
    "spectral normalization": (lambda: layers.SpectralNormalization(layers.Dense(2)), False),
    "dropout": (lambda: layers.SpatialDropout1D(0.3, seed=3), True),
}


def layer(scope, x, function):
    """Calls a layer while it trains. Statements with inputs of the same sizes share it."""
    make, has_steps = LAYERS[function]
    if has_steps and x.shape.rank != 3:
        x = x[:, :, tf.newaxis] if x.shape.rank == 2 else tf.reshape(x, [tf.shape(x)[0], x.shape[1], -1])
        if x.shape[1] is None or x.shape[2] is None:
            raise ValueError("Layers need the number of steps and channels.")
    called = scope.state.layer(f"{function} of {x.shape[1:]}", make, [None, *x.shape[1:]])
    return tf.convert_to_tensor(called(x, training=True))


# Kinds whose function also takes the scope, before the arguments, and the bodies, after them.
KINDS_IN_A_SCOPE = {
    "dense": (
        of(FLOAT, least=1),
        lambda scope, x: tf.tanh(tf.tensordot(x, scope.variables["kernel"], 1) + scope.variables["bias"]),
    ),
    "looked up": (of("integer"), lambda scope, i: tf.gather(scope.variables["table"], tf.math.floormod(i, 5))),
    "drawn": (
        of(FLOAT, least=1, distribution=("normal", "uniform")),
        lambda scope, x, distribution: getattr(scope.state.generator, distribution)(tf.shape(x), dtype=tf.float64),
    ),
    "added to the total": (of(FLOAT), added_to_the_total),
    "moving mean": (of(FLOAT, least=1), moving_mean),
    "counted": (of(FLOAT, least=1), counted),
    "written to the table": (of("integer", rank=1), written_to_the_table),
    "the total": (of(), lambda scope: scope.variables["total"].read_value()),
    "branch": (of(FLOAT, FLOAT, bodies=2, constant=(True, False, False)), branch),
    "choice": (of(FLOAT, "integer", bodies=3), choice),
    "loop": (of(FLOAT, bodies=1, rounds=(0, 1, 2, 3)), loop),
    "loop until": (of(FLOAT, bodies=1), loop_until),
    "loop with a list": (of(FLOAT, bodies=1, rounds=(1, 2, 3), taken=("stack", "first", "last", "length")), loop_with_a_list),
    "loop that grows": (of(FLOAT, bodies=1, rounds=(1, 2)), loop_that_grows),
    "list": (of(FLOAT, FLOAT, bodies=1, taken=(0, 1)), of_a_list),
    "mapped": (of(FLOAT, bodies=1, axis=(0, 1)), mapped),
    "recurrent": (of(FLOAT, rank=2), recurrent),
    "function": (of(FLOAT, bodies=1, compiled=(False, False, False, True)), function),
    "custom gradient": (of(FLOAT, bodies=1), custom_gradient),
    "gradient": (of(FLOAT, bodies=1, of=("mean", "squares")), gradient),
    "recomputed": (of(FLOAT, bodies=1), lambda scope, x, body: tf.recompute_grad(functools.partial(scope.call, body))(x)),
    "fails": (of(FLOAT), fails),
    "layer": (of(FLOAT, least=2, function=LAYERS), layer),
}
DRAWS = {name: draw for name, (draw, _) in (KINDS | KINDS_IN_A_SCOPE).items()}


def running(run, is_in_a_scope):
    """Returns a function that runs a kind of statement: see `Scope.run`."""
    return lambda statement, arguments, scope: run(
        *([scope] if is_in_a_scope else []), *arguments, *statement.bodies, **statement.parameters
    )


RUNS.update({name: running(run, name in KINDS_IN_A_SCOPE) for name, (_, run) in (KINDS | KINDS_IN_A_SCOPE).items()})
