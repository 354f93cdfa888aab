"""Define the kinds of statements of random programs.

Each kind says how its parameters are drawn, and how it runs. A drawn statement is run at once, on batches of several sizes;
one that fails there is not kept. So the drawing may be careless.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from fuzz.programs import RUNS, WIDTH

Draw = Callable[[random.Random, Any], Any]
# By kind: draws the arguments and parameters; see `drawing`.
DRAWS: dict[str, Draw] = {}


def kind(name: str, draw: Draw) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a kind of statement. Its function takes the arguments, and the parameters by name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS[name] = draw
        RUNS[name] = lambda statement, arguments, state, scope: function(*arguments, **statement.parameters)
        return function

    return register


def kind_with_state(name: str, draw: Draw) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a kind of statement whose function takes the statement, its arguments, the state and the scope."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DRAWS[name] = draw
        RUNS[name] = function
        return function

    return register


# Ways to draw: each returns names of arguments, parameters and the numbers of statements in bodies.
def of(*dtypes: str, rank: int | None = None, least: int = 0, **choices: Any) -> Draw:
    """Draws an argument for each dtype, and parameters from choices."""

    def draw(rng: random.Random, pool: Any) -> Any:
        names = [pool.pick(dtype, rank, least) for dtype in dtypes]
        return names, {name: choose(rng, values) for name, values in choices.items()}

    return draw


def choose(rng: random.Random, values: Any) -> Any:
    """Returns one of the values, or what a function of the generator returns."""
    return values(rng) if callable(values) else rng.choice(list(values))


def alike(*dtypes: str, **choices: Any) -> Draw:
    """Draws arguments of the same shape."""

    def draw(rng: random.Random, pool: Any) -> Any:
        first = pool.pick(dtypes[0])
        return [first, *(pool.like(first, dtype) for dtype in dtypes[1:])], {k: choose(rng, v) for k, v in choices.items()}

    return draw


AXIS = (-2, -1, 0, 1, 2)
FLOAT = "float64"


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
    "gelu": lambda x: tf.nn.gelu(x),
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


@kind("unary", of(FLOAT, function=UNARY))
def unary(x, function):
    return UNARY[function](x)


@kind("binary", of(FLOAT, FLOAT, function=BINARY))
def binary(a, b, function):
    return BINARY[function](a, b)


@kind("binary of alike", alike(FLOAT, FLOAT, function=BINARY))
def binary_of_alike(a, b, function):
    return BINARY[function](a, b)


@kind("sum of three", alike(FLOAT, FLOAT, FLOAT))
def sum_of_three(a, b, c):
    return tf.add_n([a, b, c])


@kind("selection", lambda rng, pool: ([pool.pick(FLOAT, None, 1)], {"vector": rng.choice([True, False])}))
def selection(x, vector):
    condition = tf.reduce_sum(x, list(range(1, len(x.shape)))) > 0 if vector else x > 0
    return tf.raw_ops.Select(condition=condition, x=x, y=-0.5 * x)


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


@kind("reduction", of(FLOAT, least=1, function=REDUCTIONS, axis=AXIS, keepdims=(True, False)))
def reduction(x, function, axis, keepdims):
    return REDUCTIONS[function](x, axis, keepdims)


@kind("reduction to a scalar", of(FLOAT, function=REDUCTIONS))
def reduction_to_a_scalar(x, function):
    return REDUCTIONS[function](x, None, False)


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


@kind("along an axis", of(FLOAT, least=1, function=ALONG, axis=AXIS))
def along(x, function, axis):
    return ALONG[function](x, axis)


@kind("slice", of(FLOAT, least=1, axis=(0, 1, 2), begin=(None, 0, 1, -1, -2), end=(None, 1, 2, -1), step=(1, 1, 1, 2, -1)))
def sliced(x, axis, begin, end, step):
    index = [slice(None)] * axis + [slice(begin, end, step)]
    return x[tuple(index)]


@kind("new axis", of(FLOAT, axis=(-1, 0, 1)))
def new_axis(x, axis):
    return tf.expand_dims(x, axis)


@kind("transposed", lambda rng, pool: ([pool.pick(FLOAT, None, 2)], {"swap": rng.choice([(0, 1), (1, 2), (0, 2)])}))
def transposed(x, swap):
    order = list(range(len(x.shape)))
    a, b = swap
    order[a], order[b] = order[b], order[a]
    return tf.transpose(x, order)


def size_of(x, axis, static):
    """Returns the size of an axis: as the shape says, if that is asked for and known, or as the tensor says in the step."""
    known = x.shape[axis] if static else None
    return tf.shape(x)[axis] if known is None else known


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


@kind("reshaped", of(FLOAT, least=1, shape=RESHAPES, static=(True, False)))
def reshaped(x, shape, static):
    return tf.reshape(x, RESHAPES[shape](x, lambda axis: size_of(x, axis, static)))


@kind(
    "padded",
    lambda rng, pool: (
        [pool.pick(FLOAT, None, 1)],
        {"axis": rng.choice([0, 1]), "mode": rng.choice(["CONSTANT", "SYMMETRIC"])},
    ),
)
def padded(x, axis, mode):
    paddings = [[1, 1] if i == axis else [0, 0] for i in range(len(x.shape))]
    return tf.pad(x, paddings, mode)


@kind("tiled", of(FLOAT, least=1, axis=(0, 1), times=(1, 2)))
def tiled(x, axis, times):
    return tf.tile(x, [times if i == axis else 1 for i in range(len(x.shape))])


@kind("broadcast to another", of(FLOAT, FLOAT))
def broadcast_to_another(x, other):
    return tf.broadcast_to(x, tf.broadcast_dynamic_shape(tf.shape(x), tf.shape(other))) + 0 * other


@kind("concatenated", of(FLOAT, FLOAT, least=1, axis=(0, 1, -1)))
def concatenated(a, b, axis):
    return tf.concat([a, b], axis)


@kind("stacked", alike(FLOAT, FLOAT, axis=(0, 1, -1)))
def stacked(a, b, axis):
    return tf.stack([a, b], axis)


@kind("half of a split", of(FLOAT, least=1, axis=(0, 1, -1), part=(0, 1), static=(True, False)))
def half_of_a_split(x, axis, part, static):
    size = size_of(x, axis, static)
    return tf.split(x, [size // 2, size - size // 2], axis)[part]


@kind("one of an unstack", of(FLOAT, least=1, axis=(1, -1)))
def one_of_an_unstack(x, axis):
    return tf.unstack(x, axis=axis)[0]


# Products.
@kind("product", of(FLOAT, FLOAT, least=2, rank=2, a=(True, False), b=(True, False)))
def product(x, y, a, b):
    return tf.tanh(tf.matmul(x, y, transpose_a=a, transpose_b=b))


@kind("product of batches", of(FLOAT, FLOAT, least=2, b=(True, False)))
def product_of_batches(x, y, b):
    return tf.tanh(tf.matmul(x, y, transpose_b=b))


@kind(
    "einsum",
    of(
        FLOAT,
        FLOAT,
        least=1,
        equation=("ab,cb->ac", "ab,ab->a", "ab,ac->bc", "ab,b->a", "abc,abd->acd", "...a,a->...", "a,b->ab", "abc,dc->abd"),
    ),
)
def einsum(x, y, equation):
    return tf.tanh(tf.einsum(equation, x, y))


@kind_with_state("dense", of(FLOAT, least=1))
def dense(statement, arguments, state, scope):
    return tf.tanh(tf.tensordot(arguments[0], state.variables["kernel"], 1) + state.variables["bias"])


# Integers and lookups.
@kind("integers", of(FLOAT, modulus=(2, 3, 5), dtype=("int32", "int64")))
def integers(x, modulus, dtype):
    return tf.math.floormod(tf.cast(tf.math.floor(x * 3.0), dtype), tf.constant(modulus, dtype))


@kind("numbers", of("integer"))
def numbers(i):
    return tf.cast(i, tf.float64) * 0.25


INTEGERS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: tf.math.floormod(a * b, tf.constant(7, a.dtype)),
    "wrap": lambda a, b: tf.math.floormod(a * tf.constant(1013904223, a.dtype) + b, tf.constant(5, a.dtype)),
    "maximum": tf.maximum,
    "quotient": lambda a, b: a // (1 + tf.abs(b)),
}


@kind("integers of alike", alike("integer", "integer", function=INTEGERS))
def integers_of_alike(a, b, function):
    b = tf.cast(b, a.dtype)
    return tf.math.floormod(INTEGERS[function](a, b), tf.constant(5, a.dtype))


@kind("one hot", of("integer", axis=(-1, 0, 1), depth=(3, 5)))
def one_hot(i, axis, depth):
    return tf.one_hot(i, depth, axis=axis, dtype=tf.float64)


@kind_with_state("looked up", of("integer"))
def looked_up(statement, arguments, state, scope):
    return tf.gather(state.variables["table"], tf.math.floormod(arguments[0], 5))


@kind("gathered", of(FLOAT, "integer", least=0, axis=(0, 1)))
def gathered(x, i, axis):
    return tf.gather(x, tf.math.floormod(i, tf.cast(tf.shape(x)[axis], i.dtype)), axis=axis)


@kind("gathered in each row", of(FLOAT, "integer", least=1))
def gathered_in_each_row(x, i):
    return tf.gather(x, tf.math.floormod(i, tf.cast(tf.shape(x)[1], i.dtype)), batch_dims=1)


@kind("gathered at pairs", of(FLOAT, "integer", least=1))
def gathered_at_pairs(x, i):
    places = tf.stack([tf.math.floormod(i, tf.cast(tf.shape(x)[0], i.dtype)), tf.zeros_like(i)], -1)
    return tf.gather_nd(x, places)


SEGMENTS = {name: getattr(tf.math, f"unsorted_segment_{name}") for name in ("sum", "max", "min", "mean", "prod")}


@kind("segments", of(FLOAT, "integer", least=1, function=SEGMENTS))
def segments(x, i, function):
    return tf.clip_by_value(SEGMENTS[function](x, tf.math.floormod(i, 4), 4), -2.0, 2.0)


@kind("scattered", of(FLOAT, "integer", least=1))
def scattered(x, i):
    # TensorFlow aborts the process for other shapes.
    i.shape.assert_is_compatible_with(x.shape[: i.shape.rank])
    if i.shape.rank > x.shape.rank:
        raise ValueError("there are more axes of indices")
    return tf.tanh(tf.scatter_nd(tf.math.floormod(i, 4)[..., None], x, tf.concat([[4], tf.shape(x)[1:]], 0)))


@kind("scattered in columns", of(FLOAT, rank=2, static=(True, False)))
def scattered_in_columns(x, static):
    places = tf.math.floormod(tf.range(x.shape[1]), 4)[:, None]
    return tf.transpose(tf.scatter_nd(places, tf.transpose(x), tf.stack([4, size_of(x, 0, static)])))


@kind("product of unsigned integers", of(FLOAT, least=1))
def product_of_unsigned_integers(x):
    return tf.tanh(tf.cast(tf.reduce_prod(tf.cast(tf.abs(x) * 2.0, tf.uint32), 0), x.dtype) * 0.1)


@kind("counts", of("integer", rank=1))
def counts(i):
    return tf.cast(tf.math.bincount(tf.cast(tf.abs(i), tf.int32), minlength=5, maxlength=5), tf.float64) * 0.1


# Rows of unknown number.
@kind("chosen rows", of(FLOAT, "integer", least=1))
def chosen_rows(x, i):
    return tf.boolean_mask(x, tf.reduce_sum(x, list(range(1, len(x.shape)))) > 0.1)


@kind("chosen by integers", of(FLOAT, "integer", least=1))
def chosen_by_integers(x, i):
    return tf.boolean_mask(x, i > 0)


@kind("unique", of("integer", rank=1))
def unique(i):
    return tf.cast(tf.unique(i).y, tf.float64) * 0.1


@kind("mean or zero", of(FLOAT, least=1))
def mean_or_zero(x):
    return tf.reduce_sum(x, 0) / tf.cast(tf.maximum(tf.shape(x)[0], 1), x.dtype)


# Numbers of rows.
@kind("times its size", of(FLOAT, least=1, axis=(0, 1), static=(True, False)))
def times_its_size(x, axis, static):
    return x * tf.cast(size_of(x, axis, static), x.dtype) * 0.1


@kind("share of the size", of(FLOAT, FLOAT, least=1))
def share_of_the_size(x, y):
    return x * tf.cast(tf.size(y) / (1 + tf.size(x) + tf.size(y)), x.dtype)


@kind("identity matrix", of(FLOAT, least=2, static=(True, False)))
def identity_matrix(x, static):
    return tf.eye(size_of(x, 0, static), dtype=x.dtype) + 0.0 * tf.reduce_sum(x)


@kind("counted up", of(FLOAT, least=1, static=(True, False), axis=(0, 1)))
def counted_up(x, static, axis):
    return tf.cast(tf.range(size_of(x, axis, static)), x.dtype) * 0.1


@kind("zeros for each", of(FLOAT, least=1, static=(True, False), value=(0.0, 0.5)))
def zeros_for_each(x, static, value):
    return tf.fill([size_of(x, 0, static), WIDTH], tf.constant(value, x.dtype))


@kind("ones of unknown width", of(FLOAT, rank=2, static=(True, False)))
def ones_of_unknown_width(x, static):
    width = tf.size(tf.where(tf.ones([x.shape[1]]) > 0.5))
    hidden = tf.slice(x, [0, 0], [-1, width])
    ones = tf.ones(tf.stack([size_of(x, 0, static), tf.shape(hidden)[1]]), x.dtype)
    return tf.ensure_shape(tf.tanh(hidden + ones), x.shape)


@kind("times a quotient of its size", of(FLOAT, least=1, divisor=(-2, -1, 2, 3), least_value=(-1, 0, 1)))
def times_a_quotient_of_its_size(x, divisor, least_value):
    return x * tf.cast(tf.maximum(tf.shape(x)[0] // divisor, least_value), x.dtype) * 0.1


# Nodes that are called as the partition calls its own ones.
@kind("named", of(FLOAT, name=("constant", "own_rows", "argument_0", "given_0", "read", "result_0", "home", "tower_0")))
def named(x, name):
    return tf.tanh(x, name=name)


# Matrices.
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


@kind("matrix", of(FLOAT, least=1, function=MATRICES))
def matrix(x, function):
    return tf.clip_by_value(MATRICES[function](x), -3.0, 3.0)


# Images and sequences.
def as_image(x):
    flat = tf.reshape(x, [tf.shape(x)[0], -1])[:, :2]
    return tf.reshape(tf.matmul(flat, tf.ones([2, 32], x.dtype) * tf.range(32, dtype=x.dtype) / 32), [-1, 4, 4, 2])


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


@kind("image", of(FLOAT, least=2, function=IMAGES))
def image(x, function):
    made = IMAGES[function](as_image(tf.tanh(x)))
    return tf.tanh(tf.reduce_sum(tf.cast(made, x.dtype), [1, 2]))


@kind("spectrum", of(FLOAT, least=1))
def spectrum(x):
    return tf.tanh(tf.abs(tf.signal.rfft(x)))


@kind("cross entropy", of(FLOAT, "integer", rank=None, least=1))
def cross_entropy(x, i):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.math.floormod(i, tf.cast(tf.shape(x)[-1], i.dtype)), x)


# Random numbers.
DRAWN = {
    "normal": tf.random.stateless_normal,
    "uniform": tf.random.stateless_uniform,
    "truncated": tf.random.stateless_truncated_normal,
}


@kind("noise", of(FLOAT, least=1, function=DRAWN, seed=range(9), size=("like", "rows"), static=(True, False)))
def noise(x, function, seed, size, static):
    shape = tf.shape(x) if size == "like" else [size_of(x, 0, static), WIDTH]
    return tf.cast(DRAWN[function](shape, [seed, 7]), x.dtype)


@kind_with_state("drawn", of(FLOAT, least=1, distribution=("normal", "uniform")))
def drawn(statement, arguments, state, scope):
    draw = getattr(state.generator, statement.parameters["distribution"])
    return draw(tf.shape(arguments[0]), dtype=tf.float64)


@kind("dropped out", of(FLOAT, least=1, seed=range(9)))
def dropped_out(x, seed):
    return tf.nn.experimental.stateless_dropout(x, 0.3, [seed, 1])


@kind("shuffled", of(FLOAT, least=1, seed=range(3)))
def shuffled(x, seed):
    order = tf.argsort(tf.random.stateless_uniform([tf.shape(x)[0]], [seed, 2]))
    return tf.gather(x, order)


# Effects.
@kind_with_state("added to the total", of(FLOAT))
def added_to_the_total(statement, arguments, state, scope):
    return state.variables["total"].assign_add(tf.tanh(tf.reduce_sum(arguments[0])) * 0.1, read_value=True) + 0.0


@kind_with_state("moving mean", of(FLOAT, least=1))
def moving_mean(statement, arguments, state, scope):
    mean = tf.reduce_mean(tf.reshape(arguments[0], [-1, WIDTH]), 0)
    moving = state.variables["moving"]
    moving.assign(0.9 * moving + 0.1 * mean)
    return tf.identity(moving)


@kind_with_state("counted", of(FLOAT, least=1))
def counted(statement, arguments, state, scope):
    state.counter.assign_add(tf.cast(tf.shape(arguments[0])[0], tf.int64))
    return tf.cast(state.counter, tf.float64) * 0.01


@kind_with_state("written to the table", of("integer", rank=1))
def written_to_the_table(statement, arguments, state, scope):
    places = tf.math.floormod(arguments[0], 5)
    updates = 0.1 * tf.ones([tf.shape(places)[0], WIDTH], tf.float64)
    state.variables["table"].scatter_add(tf.IndexedSlices(updates, places))
    return tf.reduce_mean(state.variables["table"], 0)


@kind_with_state("the total", of())
def the_total(statement, arguments, state, scope):
    return state.variables["total"].read_value()


@kind("checked", of(FLOAT))
def checked(x):
    tf.debugging.assert_less(tf.reduce_min(x), tf.constant(1e6, x.dtype))
    return tf.debugging.check_numerics(tf.where(tf.math.is_nan(x), tf.zeros_like(x), x), "numbers")


@kind("in Python", of(FLOAT))
def in_python(x):
    made = tf.numpy_function(lambda array: np.tanh(array) * 0.5, [x], tf.float64)
    made.set_shape(x.shape)
    return made


@kind("of unknown rank", of(FLOAT))
def of_unknown_rank(x):
    return x + tf.numpy_function(lambda array: array * 0.5, [x], tf.float64)


# Loops, branches and functions. A body returns a value like its argument.
def with_bodies(count: int, *dtypes: str, **choices: Any) -> Draw:
    """Draws arguments, parameters and bodies of a few statements, whose argument is like the first argument."""

    def draw(rng: random.Random, pool: Any) -> Any:
        names = [pool.pick(dtype) for dtype in dtypes]
        parameters = {name: choose(rng, values) for name, values in choices.items()}
        return names, parameters, [pool.body(names[0]) for _ in range(count)]

    return draw


@kind_with_state("branch", with_bodies(2, FLOAT, FLOAT, constant=(True, False, False)))
def branch(statement, arguments, state, scope):
    x, other = arguments
    condition = tf.reduce_mean(other) > 0 if not statement.parameters["constant"] else tf.size(other) > 3
    yes, no = statement.bodies
    return tf.cond(condition, lambda: scope.call(yes, x), lambda: scope.call(no, x))


@kind_with_state("choice", with_bodies(3, FLOAT, "integer"))
def choice(statement, arguments, state, scope):
    x, i = arguments
    index = tf.cast(tf.math.floormod(tf.reduce_sum(i), 3), tf.int32)
    return tf.switch_case(index, [functools.partial(scope.call, body, x) for body in statement.bodies])


@kind_with_state("loop", with_bodies(1, FLOAT, rounds=(0, 1, 2, 3)))
def loop(statement, arguments, state, scope):
    (body,) = statement.bodies
    (x,) = arguments
    rounds = statement.parameters["rounds"]
    return tf.while_loop(lambda i, y: i < rounds, lambda i, y: (i + 1, scope.call(body, y)), [0, x])[1]


@kind_with_state("loop until", with_bodies(1, FLOAT))
def loop_until(statement, arguments, state, scope):
    (body,) = statement.bodies
    (x,) = arguments

    def goes_on(i, y):
        return (i < 3) & (tf.reduce_mean(y) > -0.5)

    return tf.while_loop(goes_on, lambda i, y: (i + 1, scope.call(body, y)), [0, x])[1]


@kind_with_state("loop with a list", with_bodies(1, FLOAT, rounds=(1, 2, 3), taken=("stack", "first", "last", "length")))
def loop_with_a_list(statement, arguments, state, scope):
    (body,) = statement.bodies
    (x,) = arguments
    rounds = statement.parameters["rounds"]

    def one(i, y, states):
        y = scope.call(body, y)
        return i + 1, y, states.write(i, y)

    states = tf.TensorArray(x.dtype, rounds, element_shape=x.shape, clear_after_read=False)
    _, y, states = tf.while_loop(lambda i, *_: i < rounds, one, [0, x, states])
    taken = statement.parameters["taken"]
    if taken == "stack":
        return tf.reduce_mean(states.stack(), 0) + y
    return y * 0.5 if taken == "length" else states.read(0 if taken == "first" else rounds - 1)


@kind_with_state("loop that grows", with_bodies(1, FLOAT, rounds=(1, 2)))
def loop_that_grows(statement, arguments, state, scope):
    (body,) = statement.bodies
    (x,) = arguments
    x = tf.reshape(x, [tf.shape(x)[0], -1])[:, :1]
    rounds = statement.parameters["rounds"]
    shapes = [tf.TensorShape([]), tf.TensorShape([None, None])]

    def one(i, y):
        return i + 1, tf.concat([y, tf.tanh(y[:, :1]) + tf.reduce_mean(scope.call(body, arguments[0]))], 1)

    return tf.while_loop(lambda i, y: i < rounds, one, [0, x], shape_invariants=shapes)[1]


@kind_with_state("list", with_bodies(1, FLOAT, FLOAT, taken=(0, 1)))
def of_a_list(statement, arguments, state, scope):
    x, other = arguments
    parts = tf.TensorArray(x.dtype, 2, infer_shape=False, clear_after_read=False)
    parts = parts.write(0, scope.call(statement.bodies[0], x)).write(1, other)
    taken = parts.read(statement.parameters["taken"])
    return tf.reshape(taken, tf.shape(other if statement.parameters["taken"] else x))


@kind("list of integers", of(FLOAT, least=1, first=(2, 3), second=(5, 7), rows=(True, False)))
def list_of_integers(x, first, second, rows):
    parts = tf.TensorArray(tf.int32, 3, element_shape=[]).write(0, tf.shape(x)[0] if rows else first).write(1, second)
    return x * tf.cast(parts.read(1) - parts.read(0) + parts.read(2), x.dtype) * 0.1


@kind_with_state("mapped", with_bodies(1, FLOAT, axis=(0, 1)))
def mapped(statement, arguments, state, scope):
    (body,) = statement.bodies
    (x,) = arguments
    by_axis = tf.transpose(x, [1, 0, *range(2, len(x.shape))]) if statement.parameters["axis"] else x
    return tf.map_fn(lambda row: tf.tanh(row) + 0.1 * tf.reduce_mean(scope.call(body, x)), by_axis)


@kind_with_state("scanned", with_bodies(1, FLOAT))
def scanned(statement, arguments, state, scope):
    (x,) = arguments
    by_axis = tf.transpose(x, [1, 0, *range(2, len(x.shape))])
    return tf.scan(lambda total, row: tf.tanh(total + row), by_axis)


@kind_with_state("recurrent", of(FLOAT, rank=2))
def recurrent(statement, arguments, state, scope):
    (x,) = arguments
    weights = tf.concat([state.variables["kernel"], state.variables["table"]], 0)[: 2 * WIDTH]

    def one(i, h):
        return i + 1, tf.tanh(tf.concat([x, h], 1) @ weights)

    return tf.while_loop(lambda i, h: i < 3, one, [0, tf.zeros([tf.shape(x)[0], WIDTH], x.dtype)])[1]


@kind_with_state("function", with_bodies(1, FLOAT, compiled=(False, False, False, True)))
def function(statement, arguments, state, scope):
    (body,) = statement.bodies
    jit = statement.parameters["compiled"] or None
    called = tf.function(functools.partial(scope.call, body), autograph=False, jit_compile=jit)
    return called(arguments[0]) + 0.5 * called(arguments[0] * 0.5)


@kind_with_state("custom gradient", with_bodies(1, FLOAT))
def custom_gradient(statement, arguments, state, scope):
    @tf.custom_gradient
    def halved(x):
        return tf.tanh(x), lambda upstream: upstream * 0.5 * tf.cos(x)

    return scope.call(statement.bodies[0], halved(arguments[0]))


@kind_with_state("gradient", with_bodies(1, FLOAT, of=("mean", "squares")))
def gradient(statement, arguments, state, scope):
    (x,) = arguments
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = scope.call(statement.bodies[0], x)
        total = tf.reduce_mean(y) if statement.parameters["of"] == "mean" else tf.tanh(tf.reduce_sum(tf.tanh(y) ** 2))
    found = tape.gradient(total, x, unconnected_gradients="zero")
    return tf.tanh(tf.convert_to_tensor(found))


@kind_with_state("recomputed", with_bodies(1, FLOAT))
def recomputed(statement, arguments, state, scope):
    return tf.recompute_grad(functools.partial(scope.call, statement.bodies[0]))(arguments[0])


@kind_with_state("fails", of(FLOAT))
def fails(statement, arguments, state, scope):
    """Fails in the step if the state asks for it: a check of the user."""
    if not getattr(state, "fails", False):
        return arguments[0]
    tf.debugging.assert_less(tf.abs(tf.reduce_max(arguments[0])), tf.constant(-1.0, tf.float64))
    return arguments[0]


@kind("scaled by the mean", of(FLOAT, FLOAT))
def scaled_by_the_mean(x, y):
    mean = tf.reduce_sum(tf.cast(y, x.dtype)) / tf.cast(tf.maximum(tf.size(y), 1), x.dtype)
    return x * (0.5 + tf.tanh(mean))
