"""All that a node needs can be had: segments of any lengths, tensors with any number of axes, lists, and counts of rows."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, with_gradients

from partition.placing.proofs import ROW_COUNTS

F64 = tf.float64
IMAGES = [tf.TensorSpec([None, None, None, 2], F64)]
TOKENS = [tf.TensorSpec([None, None, 2], F64)]
rng = np.random.default_rng(0)
kernel = tf.Variable(rng.normal(size=(3, 3, 2, 2)) / 3)


def images(rows):
    return [rng.normal(size=(rows, 5, 7, 2))]


def tokens(rows):
    return [rng.normal(size=(rows, 5, 2))]


def partition_of(step, specs, make, has_rows=None, **options):
    """Returns the partition of a step, which gives the same as the whole step."""
    return agree(step, *map(make, ROW_COUNTS), specs=specs, has_rows=has_rows, **options)


def gathered_by(*arguments, **options):
    """Returns the types of the operations of a step that are computed once."""
    return {gathered.type for gathered in partition_of(*arguments, **options).gathered}


# Segments of different lengths, which are not known while the step is traced.


def pyramid(x, count):
    """Returns some levels, each with fewer pixels than the one before."""
    levels = [tf.nn.conv2d(x, kernel, 1, "SAME")]
    for _ in range(count - 1):
        levels.append(tf.nn.conv2d(levels[-1], kernel, 2, "SAME"))
    return levels


def flat(level):
    return tf.reshape(level, [-1, 2])


def levels_after_each_other(x):
    return tf.reduce_mean(tf.concat([flat(level) for level in pyramid(x, 3)], 0) ** 2)


def levels_within_each_row(x):
    return tf.reduce_mean(tf.concat([tf.reshape(level, [tf.shape(x)[0], -1, 2]) for level in pyramid(x, 3)], 1) ** 2)


def levels_along_another_axis(x):
    return tf.reduce_mean(tf.concat([tf.transpose(flat(level)) for level in pyramid(x, 2)], 1) ** 2)


def levels_in_groups(x):
    a, b, c = map(flat, pyramid(x, 3))
    grouped = tf.concat([tf.concat([a, b], 0), c], 0), tf.concat([c, tf.concat([a, c], 0)], 0)
    return tf.reduce_mean(grouped[0] ** 2) + tf.reduce_mean(grouped[1])


def tokens_and_sentences(x):
    sentences, words = tf.reduce_mean(x, [1, 2]), flat(pyramid(x, 1)[0])
    joined = tf.concat([sentences, words, sentences], 0)
    counts = [tf.shape(sentences)[0], tf.shape(words)[0], tf.shape(sentences)[0]]
    first, middle, _ = tf.split(joined, counts)
    return tf.reduce_mean(joined**2) + tf.reduce_mean(first**2) + tf.reduce_mean(middle**3)


@pytest.mark.parametrize(
    "loss",
    [levels_after_each_other, levels_within_each_row, levels_along_another_axis, levels_in_groups, tokens_and_sentences],
)
def test_segments_of_unknown_lengths_stay_on_towers(loss):
    assert gathered_by(with_gradients(loss, kernel), IMAGES, images) == set()


def test_segments_of_unknown_lengths_are_gathered():
    """A result of the step and a sort need all rows."""

    def loss(x):
        joined = tf.concat([flat(level) for level in pyramid(x, 3)], 0)
        return tf.reduce_mean(tf.sort(joined, 0)[:5] ** 2)

    assert gathered_by(with_gradients(loss, kernel), IMAGES, images) == {"TopKV2"}
    partition_of(lambda x: tf.concat([*map(flat, pyramid(x, 2)), tf.reduce_max(x, [1, 2])], 0), IMAGES, images)


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:1", "CPU:2"], ["CPU:0"]])
def test_a_whole_tensor_is_cut_into_segments_of_unknown_lengths(devices):
    def loss(x, wanted):
        return tf.reduce_mean((tf.concat([flat(level) for level in pyramid(x, 2)], 0) - tf.sort(wanted, 0)) ** 2)

    specs = [*IMAGES, tf.TensorSpec([None, 2], F64)]
    make = lambda rows: [*images(rows), rng.normal(size=(rows * (35 + 12), 2))]  # noqa: E731
    assert gathered_by(with_gradients(loss, kernel), specs, make, [True, False], devices=devices) == set()


def test_segments_as_long_as_a_table_or_the_batch():
    """The length of a segment is that of a tensor that is not cut, or the number of all rows."""

    def loss(x, table):
        repeated, means = tf.tile(table, [tf.shape(x)[0], 1]), tf.reduce_mean(x, [1, 2])
        alike = tf.matmul(means, means, transpose_b=True)
        return tf.reduce_mean(tf.sort(tf.concat([repeated, flat(x)], 0), 0) ** 2) + tf.reduce_mean(
            tf.sort(tf.concat([tf.reshape(alike, [-1]), means[:, 0]], 0)) ** 2
        )

    specs = [*IMAGES, tf.TensorSpec([None, 2], F64)]
    make = lambda rows: [*images(rows), rng.normal(size=(4, 2))]  # noqa: E731
    assert gathered_by(loss, specs, make, [True, False]) == {"MatMul", "TopKV2"}


def test_selected_entries_of_segments():
    def loss(x):
        joined = tf.concat([flat(level) for level in pyramid(x, 2)], 0)
        return tf.reduce_mean(tf.boolean_mask(joined, joined[:, 0] > 0) ** 2)

    assert gathered_by(with_gradients(loss, kernel), IMAGES, images) == {"Where", "GatherV2"}


# Functions that are called for tensors of several sizes.


def branching(x):
    return tf.cond(kernel[0, 0, 0, 0] > 99.0, lambda: flat(tf.tanh(x)), lambda: flat(x))


def looping(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.tanh(y)), [0, flat(x)])[1]


def listing(x):
    parts = tf.TensorArray(F64, 2, element_shape=[None, 2])
    parts = tf.while_loop(lambda i, _: i < 2, lambda i, parts: (i + 1, parts.write(i, flat(x))), [0, parts])[1]
    return tf.transpose(parts.stack(), [1, 0, 2])


def striding(x):
    """Makes a size that is named in the function."""
    return flat(tf.nn.conv1d(x, kernel[0], 2, "SAME"))


@pytest.mark.parametrize("function", [flat, striding, branching, looping, listing])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_sizes_of_a_function_differ_from_call_to_call(function, jit_compile):
    def step(x):
        called = tf.function(function, autograph=False, jit_compile=jit_compile)
        short, long = called(x), called(tf.concat([x, x], 1))
        return tf.concat([short, long], 0), tf.reduce_mean(tf.sort(tf.concat([long, short, long], 0), 0))

    partition_of(step, TOKENS, tokens)


def test_counts_of_rows_that_a_function_returns():
    """The number of a tower's rows, as a number, is that of all rows."""
    called = tf.function(lambda x: (tf.shape(x)[0], tf.shape(x), tf.tanh(x)), jit_compile=True)

    def step(x):
        rows, shape, y = called(x)
        return tf.reduce_sum(y) / tf.cast(rows, F64), shape

    assert gathered_by(step, TOKENS, tokens) == set()


def test_counts_of_rows_that_a_loop_returns():
    """They are needed at home, and a size among them is known by name only."""

    def step(x):
        _, shape, y = tf.while_loop(lambda i, *_: i < 2, lambda i, shape, y: (i + 1, shape, 2.0 * y), [0, tf.shape(x), x])
        return tf.numpy_function(lambda shape: shape * 2, [shape], tf.int32), tf.reduce_sum(y)

    assert gathered_by(step, IMAGES, images) == set()


# Tensors with an unknown number of axes.


def doubled(x):
    return tf.numpy_function(lambda array: array * 2 + 1, [x], F64)


def unknown_axes_meet_rows(x):
    y = pyramid(x, 1)[0]
    other = doubled(tf.stop_gradient(y))
    parts = [y - other, tf.stack([y, other]), tf.concat([other, y], -1), tf.where(other > 0, y, other), other * 3.0]
    return tf.add_n([tf.reduce_mean(part**2) for part in parts])


def unknown_axes_amid_a_model(x):
    y = tf.py_function(lambda y: tf.tanh(y) * 2, [pyramid(x, 1)[0]], F64)
    z = tf.nn.conv2d(tf.ensure_shape(y, [None, None, None, 2]), kernel, 1, "SAME")
    return tf.reduce_mean(z**2) + tf.reduce_mean(tf.concat([y, y], 0) ** 2)


@pytest.mark.parametrize("loss", [unknown_axes_meet_rows, unknown_axes_amid_a_model])
def test_tensors_with_an_unknown_number_of_axes(loss):
    partition_of(with_gradients(loss, kernel), IMAGES, images)


def test_the_reason_names_the_axes():
    partition = partition_of(lambda x: tf.reduce_mean(tf.stack([x, doubled(x)])), IMAGES, images)
    reasons = {gathered.type: gathered.reason for gathered in partition.gathered}
    assert reasons["Pack"] == "it takes a tensor with an unknown number of axes, which cannot be cut"


def test_batches_with_an_unknown_number_of_axes():
    def step(x, y):
        return tf.abs(y), tf.shape(y), tf.identity(y), tf.rank(y), tf.reduce_mean(x) + tf.reduce_mean(2.0 * y)

    partition_of(step, [*TOKENS, tf.TensorSpec(None, F64)], lambda rows: [*tokens(rows), rng.normal(size=(rows, 2))])


def test_lookups_with_an_unknown_number_of_axes():
    specs = [tf.TensorSpec([None, 3], F64), tf.TensorSpec(None, tf.int64)]
    table = tf.constant(np.arange(9.0).reshape(3, 3))

    def step(x, places):
        at = tf.gather_nd(table, places), tf.gather(table, places), tf.gather(x, places, axis=1)
        sums = tf.scatter_nd(places, x, [3, 3]), tf.scatter_nd(tf.cast(x[:, :1] > 0, tf.int64), doubled(x), [3, 3])
        return *at, *sums, tf.one_hot(places, 3)

    partition_of(step, specs, lambda rows: [rng.normal(size=(rows, 3)), rng.integers(3, size=(rows, 1))])


def test_axes_of_an_unknown_number_are_aligned_from_the_right():
    """With as many rows as columns, a row of the one may meet each row of the other."""

    def step(x, y):
        product = tf.function(lambda x, y: tf.ensure_shape(x * y, [None, None]), jit_compile=True, autograph=False)
        return x + y, tf.where(x > 0, x, y), product(x, y)

    batches = [[rng.normal(size=(rows, rows)), rng.normal(size=rows)] for rows in (2, 3, 4)]
    agree(step, *batches, specs=[tf.TensorSpec(None, F64)] * 2)


def rows_as_often_as_a_table_has_entries(x):
    """The table is computed once: its length is measured where it is."""
    times = tf.size(tf.unique(tf.constant([1, 2, 2, 3]))[0])
    repeated = tf.reshape(tf.tile(x, [1, 1, times]), [-1, 2])
    return tf.sort(tf.tanh(tf.concat([repeated, tf.reshape(x, [-1, 2])], axis=0)), axis=0)


def rows_of_unknown_lengths_and_the_same_sorted(x):
    rows = tf.reshape(x, [-1, 2])
    return tf.tanh(rows) * tf.sort(rows, axis=0)


@pytest.mark.parametrize("step", [rows_as_often_as_a_table_has_entries, rows_of_unknown_lengths_and_the_same_sorted])
def test_lengths_that_are_measured(step):
    partition_of(step, [tf.TensorSpec([None, None, 2], F64)], lambda rows: [rng.normal(size=(rows, 3, 2))])


# Lists that are needed at home.


def listed(x, count=3):
    parts = tf.TensorArray(F64, count, element_shape=[None, 2], infer_shape=False)
    for k in range(count):
        parts = parts.write(k, float(k) * x[:, k % 2])
    return parts


def all_elements_at_home(x):
    parts = listed(x)
    return tf.reduce_sum(parts.read(1)), parts.concat(), parts.gather([2, 0])


def a_list_of_a_loop(x):
    def body(i, parts, total):
        return i + 1, parts.write(i, tf.cast(i, F64) * x[:, 0]), total + x[:, 1]

    parts = tf.TensorArray(F64, 3, element_shape=[None, 2], infer_shape=False)
    _, parts, total = tf.while_loop(lambda i, *_: i < 3, body, [0, parts, x[:, 0]])
    return parts.concat(), parts.write(0, x[:, 1]).stack(), tf.reduce_mean(total), tf.tanh(x)


def a_list_of_entries(x):
    parts = tf.TensorArray(F64, 0, dynamic_size=True, infer_shape=False).unstack(tf.transpose(x, [1, 0, 2]))
    return tf.reduce_mean(parts.stack() ** 2), parts.concat()


@pytest.mark.parametrize("step", [all_elements_at_home, a_list_of_a_loop, a_list_of_entries])
def test_lists_that_are_read_at_home(step):
    partition = partition_of(step, TOKENS, tokens)
    assert "TensorListConcatV2 'TensorListConcatV2' takes its list, which cannot be gathered" in {
        gathered.reason for gathered in partition.gathered
    }


def test_only_the_lists_that_are_read_at_home_are_made_there():
    def step(x):
        return listed(x, 2).concat(), tf.reduce_mean(listed(2.0 * x, 3).stack())

    partition = partition_of(step, TOKENS, tokens)
    assert [gathered.type for gathered in partition.gathered] == ["TensorListSetItem"] * 2


def test_each_body_and_gathered_node_is_reported_once():
    """The nodes after a list that is needed at home are planned again."""
    partition = partition_of(a_list_of_a_loop, TOKENS, tokens)
    names = [gathered.name for gathered in partition.gathered]
    assert len(names) == len(set(names))
    assert partition.propagation.bodies == []


def test_a_list_among_identities():
    def step(x):
        raw = tf.raw_ops
        parts = raw.TensorListReserve(element_shape=tf.constant([-1, 2]), num_elements=2, element_dtype=F64)
        for k in range(2):
            parts = raw.TensorListSetItem(input_handle=parts, index=k, item=x[:, k])
        parts, y = raw.IdentityN(input=[parts, x])
        stacked = raw.TensorListStack(input_handle=parts, element_shape=tf.constant([-1, 2]), element_dtype=F64)
        return tf.reduce_mean(stacked), tf.reduce_mean(y)

    assert gathered_by(step, TOKENS, tokens) == set()
