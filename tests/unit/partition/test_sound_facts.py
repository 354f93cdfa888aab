"""Steps that the partitioner once took for others: each has shapes, names or numbers of which a fact was wrong."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, partitioned_step

rng = np.random.default_rng(0)


def own_shape(x, h):
    """Returns the shape of a tensor of rows: its rows as an integer, if they are known, and an unknown width."""
    return tf.stack([x.shape[0], tf.shape(h)[1]])


def ones_in_a_loop(x):
    def body(i, h):
        return i + 1, tf.tanh(h + tf.ones(own_shape(x, h), h.dtype))

    return tf.reduce_sum(tf.while_loop(lambda i, h: i < 3, body, [0, x])[1])


def ones_in_a_branch(x):
    return tf.reduce_sum(tf.cond(tf.reduce_sum(x) > -1e9, lambda: x + tf.ones(own_shape(x, x), x.dtype), lambda: x))


def ones_in_a_compiled_function(x):
    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        return tf.tanh(x + tf.ones(own_shape(x, x), x.dtype))

    return tf.reduce_sum(compiled(x))


def node_called(name, value):
    """Returns a step with a compiled function, one of whose nodes is called like a node that the partition writes."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        return tf.tanh(tf.multiply(x + value(x), 3.0, name=name) + x)

    return lambda x: tf.reduce_sum(compiled(x))


def argument_called_constant(x):
    @tf.function(jit_compile=True, autograph=False)
    def compiled(x, constant):
        return tf.tanh(x + tf.ones([x.shape[0], 3], x.dtype)) * constant

    return tf.reduce_sum(compiled(x, tf.constant(2.0, x.dtype)))


def gradient_of_a_whole_table_in_a_loop(x):
    table = tf.constant(np.arange(24.0).reshape(8, 3) / 24)

    def body(i, h):
        part = table[:, : tf.shape(h)[1]]
        with tf.GradientTape() as tape:
            tape.watch(part)
            loss = tf.reduce_sum((h + part) ** 2)
        return i + 1, tf.tanh(h + tape.gradient(loss, part))

    return tf.reduce_sum(tf.while_loop(lambda i, h: i < 2, body, [0, x])[1])


def two_flat_lengths(x):
    return tf.reduce_sum((tf.reshape(x[:, 1:], [-1]) - tf.reshape(x[:, :-1], [-1])) ** 2)


def bands(x):
    return tf.reduce_mean(tf.linalg.diag(tf.stack([x, 2.0 * x, x], 1), k=(-1, 1)))


def scattered_features(x):
    return tf.reduce_sum(tf.scatter_nd([[1], [3], [1]], tf.transpose(x[:, :3]), [5, x.shape[0] or tf.shape(x)[0]]) ** 2)


def picked_features(x):
    picked = tf.gather_nd(tf.transpose(tf.reshape(x, [-1, 2, 3]), [1, 2, 0]), [[0, 1], [1, 2]])
    return tf.reduce_sum(tf.gradients(tf.reduce_sum(picked**2), x)[0] ** 3)


def broadcast_systems(x):
    matrices = tf.eye(3, dtype=x.dtype) * (2.0 + tf.abs(x[None, :, :, None]))
    return tf.reduce_sum(tf.linalg.triangular_solve(tf.concat([matrices, 2.0 * matrices], 0), x[:, :, None]))


def product_of_unsigned(x):
    return tf.reduce_prod(tf.cast(tf.abs(x) + 2.0, tf.uint32), 0)


def sum_divided_by_zero(x):
    of_one_tower = tf.reduce_sum(0.0 * x + tf.constant([[1.0], [0.0], [0.0]], x.dtype))
    return of_one_tower / tf.reduce_sum(tf.zeros_like(x)) + tf.reduce_sum(x)


def parts_too_large_for_half_precision(x):
    large = tf.cast(x * 0.0 + tf.constant([[80000.0], [2.0], [-80000.0]], x.dtype), tf.bfloat16)
    return tf.math.is_nan(tf.cast(tf.reduce_sum(large), tf.float16) + tf.reduce_sum(tf.cast(x, tf.float16)))


def negative_multiple_of_rows(x):
    return tf.maximum(tf.shape(x)[0] // -1, 0), tf.maximum(tf.shape(x)[0] // -1 + tf.shape(x)[0], 1)


def wrapping_multiple_of_rows(x):
    return (tf.shape(x)[0] * 2**24) // 2**24, tf.cast(tf.shape(x)[0] * 16000000, tf.int64)


def gradient_of_one_broadcast_row(x):
    table = tf.constant(np.arange(15.0).reshape(5, 3))
    return tf.reduce_sum(tf.gradients(tf.reduce_sum((x + table) ** 2), x)[0] ** 2)


def rows_beside_one_entry_of_all(x):
    return tf.reduce_sum((tf.reduce_sum(x, 1, keepdims=True) + tf.transpose(x)) ** 2)


def entry_that_nothing_wrote(x):
    numbers = tf.TensorArray(tf.int32, 2, element_shape=[]).write(0, 2)
    return tf.reduce_sum(x) * tf.cast(numbers.read(1), x.dtype)


def second_of_a_list(first, second):
    parts = tf.TensorArray(first.dtype, 2, infer_shape=False, clear_after_read=False)
    return tf.reduce_sum(parts.write(0, first).write(1, second).read(1))


def state_that_grows_to_the_rows(x):
    def body(i, state, total):
        return i + 1, state + x[:, 0], total + tf.reduce_sum(state)

    first = [0, tf.ones([1], x.dtype), tf.zeros([], x.dtype)]
    shapes = [tf.TensorShape(shape) for shape in ([], [None], [])]
    return tf.while_loop(lambda i, *_: i < 2, body, first, shape_invariants=shapes)[2]


# The step, the shape that is known while it is traced, and the shape of the batch.
CASES = {
    "ones in a loop": (ones_in_a_loop, (8, None), (8, 3)),
    "ones in a loop, a row for each tower": (ones_in_a_loop, (3, None), (3, 3)),
    "ones in a branch, a row for each tower": (ones_in_a_branch, (3, None), (3, 3)),
    "ones in a compiled function": (ones_in_a_compiled_function, (8, None), (8, 3)),
    "a node own_rows": (node_called("own_rows", lambda x: tf.constant(np.ones((8, 3)))), (8, 3), (8, 3)),
    "a node constant": (node_called("constant", lambda x: tf.ones([8, 3], x.dtype)), (8, 3), (8, 3)),
    "a node argument_0": (node_called("argument_0", lambda x: tf.ones([8, 3], x.dtype)), (8, 3), (8, 3)),
    "an argument constant": (argument_called_constant, (8, 3), (8, 3)),
    "gradient of a whole table in a loop": (gradient_of_a_whole_table_in_a_loop, (8, None), (8, 3)),
    "two flat lengths": (two_flat_lengths, (None, None), (8, 4)),
    "bands": (bands, (8, None), (8, 5)),
    "bands of rows": (lambda x: tf.reduce_sum(tf.linalg.diag(x, k=(-1, 1)) ** 2), (3, 5), (3, 5)),
    "broadcast systems": (broadcast_systems, (8, 3), (8, 3)),
    "broadcast systems, a row for each tower": (broadcast_systems, (None, 3), (3, 3)),
    "product of unsigned integers, an empty tower": (product_of_unsigned, (None, 3), (2, 3)),
    "sum divided by zero": (sum_divided_by_zero, (3, 1), (3, 1)),
    "parts too large for half precision": (parts_too_large_for_half_precision, (3, 1), (3, 1)),
    "negative multiple of rows": (negative_multiple_of_rows, (None, 3), (8, 3)),
    "wrapping multiple of rows": (wrapping_multiple_of_rows, (None, 1), (200, 1)),
    "gradient of one broadcast row": (gradient_of_one_broadcast_row, (None, 3), (1, 3)),
    "one row beside its entries": (lambda x: tf.reduce_sum(x[:, 0] + tf.reshape(x, [-1])), (None, 3), (1, 3)),
    "rows beside one entry of all": (rows_beside_one_entry_of_all, (None, None), (8, 1)),
    "an entry that nothing wrote": (entry_that_nothing_wrote, (None, 3), (8, 3)),
    "one entry in a list of rows": (lambda x: second_of_a_list(x[:, 0], tf.ones([1], x.dtype)), (None, 3), (8, 3)),
    "other rows in a list of rows": (lambda x: second_of_a_list(x, x[1:]), (None, 3), (8, 3)),
    "a state that grows to the rows": (state_that_grows_to_the_rows, (None, 3), (8, 3)),
}


@pytest.mark.parametrize(("step", "spec", "shape"), CASES.values(), ids=CASES)
def test_the_step_is_one_devices(step, spec, shape):
    agree(step, [rng.normal(size=shape)], specs=[tf.TensorSpec(spec, tf.float64)], known_rows=spec[0])


def test_tokens_of_unknown_number_stay_on_the_towers():
    """The lengths of two flat tensors have two names, and are the same."""

    def loss(tokens, labels):
        table = tf.constant(np.arange(15.0).reshape(5, 3))
        logits = tf.gather(table, tokens)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    specs = [tf.TensorSpec([None, None], tf.int64)] * 2
    partition = agree(loss, [rng.integers(0, 3, (7, 4)) for _ in specs], specs=specs)
    (name,) = [node.name for node in partition.traced.nodes if node.op == "SparseSoftmaxCrossEntropyWithLogits"]
    assert not partition.propagation.plans[name].is_at_home


def test_a_row_that_meets_entries_of_unknown_number_is_refused():
    """On one device, the one row of this batch would be broadcast. Which rows there are is decided before."""

    def step(x):
        return tf.reduce_sum(tf.tanh(x[:, 0] + tf.reshape(x, [-1])))

    partitioned, _ = partitioned_step(step, [tf.TensorSpec([None, None], tf.float64)], [True])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have one entry, or as many as the rows"):
        partitioned(tf.constant(rng.normal(size=(1, 4))))
    np.testing.assert_allclose(partitioned(tf.ones([5, 1], tf.float64)), 5 * np.tanh(2.0))


def test_an_effect_before_a_result_that_is_not_used_happens():
    """A function without automatic control dependencies has its effects before its results alone."""
    counter = tf.Variable(0.0, dtype=tf.float64)

    def counting(x):
        with tf.control_dependencies([counter.assign_add(1.0)]):
            return tf.identity(x)

    counted = tf.compat.v1.wrap_function(counting, [tf.TensorSpec([None, 3], tf.float64)])

    def step(x):
        counted(x)
        return tf.reduce_sum(x)

    partitioned, _ = partitioned_step(step, [tf.TensorSpec([None, 3], tf.float64)], [True])
    partitioned(tf.ones([7, 3], tf.float64))
    assert float(counter) == 1.0


@pytest.mark.parametrize("step", [scattered_features, picked_features])
@pytest.mark.parametrize("rows", [None, 8])
def test_features_are_scattered_on_the_towers(step, rows):
    partition = agree(step, [rng.normal(size=(8, 6))], known_rows=rows)
    assert "ScatterNd" not in {gathered.type for gathered in partition.gathered}
