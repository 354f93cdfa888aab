"""Every rule is proven: its operation gives the same whole and partitioned, for all placements of its inputs."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, run, with_gradients

from keras_dp.partition.placing.rules import RULES
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.recurrent import RECURRENT
from partition.placing.proofs import cases_of, is_right_on_towers, prove
from partition.placing.samples import samples

X = np.random.default_rng(0).normal(size=(7, 2))
SAMPLES = samples()
# The samples of each operation, by the first of its types.
OPERATIONS = {
    operation: [k for k, sample in enumerate(SAMPLES) if sample.types[0] == operation]
    for operation in dict.fromkeys(sample.types[0] for sample in SAMPLES)
}

# Eager TensorFlow counts other seeds for these than a graph does; the programs with stateful noise test them.
STATEFUL_DRAWS = {name for name in DRAWS if not name.startswith("Stateless")}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_partitioned_is_whole(operation):
    """Covers all placements of the inputs, and batches in which a tower has one row or none."""
    for k in OPERATIONS[operation]:
        sample = SAMPLES[k]
        spread, missing = set(), []
        for case in cases_of(sample):
            on_towers = prove(sample, case)
            spread |= on_towers
            if on_towers != set(sample.types) and is_right_on_towers(sample, case):
                missing.append(str(case))
        assert spread == (set() if sample.meets else set(sample.types)), k
        assert missing == list(sample.missing), k


@pytest.mark.parametrize("operation", OPERATIONS)
def test_partitioned_is_whole_with_known_rows(operation):
    """Most sizes of the samples are 3: they equal or divide the number of rows, so integers do not tell what they count."""
    for k in OPERATIONS[operation]:
        sample, rows = SAMPLES[k], (3, 6, 2)[k % 3]
        spread = set()
        for case in cases_of(sample):
            spread |= prove(sample, case, rows)
        # A range of a known length is a constant.
        assert sample.meets or sample.types == ("Range",) or spread == set(sample.types), k


def test_each_rule_has_a_sample():
    proven = {name for sample in SAMPLES for name in sample.types}
    # Kernels of cuDNN need a GPU: see test_recurrent.
    assert set(RULES) - STATEFUL_DRAWS - set(RECURRENT) - proven == set()


def test_wrong_rule_is_found(monkeypatch):
    """A mean of the towers' means fails the proof."""
    sample = SAMPLES[OPERATIONS["Mean"][0]]
    right = RULES["Mean"]

    def wrong(node):
        plan = right(node)
        plan.instance = None
        return plan

    monkeypatch.setitem(RULES, "Mean", wrong)
    with pytest.raises(AssertionError):
        prove(sample, cases_of(sample)[0])


def test_operation_without_rule_is_computed_once():
    """It is computed from gathered rows, and the partition reports it."""
    assert agree(lambda x: tf.sort(x, axis=0), [X]).gathered


def test_shapes_that_are_stated():
    """TensorFlow knows the shape of the result of `tensordot` only because it is set; windows can still move over it."""

    def step(x):
        windows = tf.nn.conv1d(tf.tensordot(x, tf.ones([4, 3], x.dtype), 1), tf.ones([2, 3, 5], x.dtype), 1, "VALID")
        return tf.reshape(windows, [tf.shape(windows)[0], 25])

    assert not agree(step, [np.random.default_rng(0).normal(size=(7, 6, 4))]).gathered


def test_compiled_call_reads_a_variable_before_it():
    """Each tower calls the function, such as a grouped convolution, which Keras compiles with XLA."""
    kernel = tf.Variable(np.random.default_rng(1).normal(size=(2, 3)))
    product = tf.function(lambda x: tf.tanh(x @ kernel), jit_compile=True, autograph=False)
    assert not agree(with_gradients(lambda x: tf.reduce_mean(product(x) ** 2), kernel), [X]).gathered


def test_compiled_call_that_assigns_happens_once():
    counter = tf.Variable(1.0, dtype=tf.float64)

    @tf.function(jit_compile=True, autograph=False)
    def counted(x):
        counter.assign_add(1.0)
        return x * counter

    (received,), _ = run(lambda x: tf.reduce_mean(counted(x), axis=0), [X])
    np.testing.assert_allclose(received, 2 * X.mean(axis=0), rtol=1e-11)
    assert counter.numpy() == 2.0


def test_gradient_of_rows_by_rows_gathers_operands_alone():
    """The second axis of a matrix of similarities has all rows, and is known to be as long as in its gradient."""

    def loss(x):
        similarity = tf.matmul(x, x, transpose_b=True)
        apart = similarity - tf.reduce_mean(similarity, axis=1, keepdims=True)
        return tf.reduce_mean(tf.reduce_logsumexp(apart, axis=1))

    assert {gathered.type for gathered in agree(with_gradients(loss), [X]).gathered} == {"MatMul"}


def test_effects_in_a_branch_in_a_loop_happen_once():
    counter = tf.Variable(0.0, dtype=tf.float64)

    def step(x):
        def body(i, y):
            tf.cond(i > 0, lambda: counter.assign_add(1.0), lambda: tf.identity(counter))
            return i + 1, tf.tanh(y)

        _, y = tf.while_loop(lambda i, _: i < 3, body, [0, x])
        with tf.control_dependencies([y]):
            return y, counter.read_value()

    (_, read), _ = run(step, [X])
    assert counter.numpy() == read == 2.0


def test_update_after_a_function_of_the_user():
    """For its gradient, the function returns its argument as well. An update that waits for the call has no other input."""
    kernels = [tf.Variable(np.random.default_rng(1).normal(size=(2, 3))) for _ in range(2)]

    def learning(kernel):
        product = tf.function(lambda x: x @ kernel, autograph=False)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(product(x) ** 2)
            kernel.assign_sub(tape.gradient(loss, kernel))
            return loss

        return step

    (received,), _ = run(learning(kernels[0]), [X])
    np.testing.assert_allclose(received, learning(kernels[1])(tf.constant(X)), rtol=1e-11)
    np.testing.assert_allclose(*kernels, rtol=1e-11)


def list_of_whole_and_cut_rows(x):
    listed = tf.TensorArray(x.dtype, 2, element_shape=[None, 2]).write(0, tf.sort(x, 0)).write(1, x)
    return tf.reduce_sum(listed.read(0))


def loop_that_returns_a_whole_tensor(x):
    whole = tf.cumsum(x, axis=0)
    return tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, whole * tf.cast(i, x.dtype)), [0, x])[1])


def loop_of_maxima_without_a_round(x):
    start = tf.constant([-9.0, -9.0], x.dtype)
    return tf.while_loop(lambda i, _: i < tf.size(x) * 0, lambda i, _: (i + 1, tf.reduce_max(x, axis=0)), [0, start])[1]


def two_calls_of_a_compiled_function(x):
    compiled = tf.function(tf.tanh, jit_compile=True)
    wide, narrow = compiled(tf.tile(x, [1, tf.size(x) // tf.size(x) * 2])), compiled(x)
    return tf.reduce_mean(tf.reshape(wide, [-1, tf.shape(narrow)[1]]), axis=0)


def truncated_quotients(x):
    whole = tf.cast(10.0 * x, tf.int32)
    parts = [tf.reduce_sum(whole, axis=0), tf.reduce_sum(whole + 3, axis=0)]
    return tf.raw_ops.AddN(inputs=[tf.raw_ops.Div(x=part, y=4) for part in parts])


def gradient_of_a_slice_from_an_entry_on_that_the_rows_choose(x):
    at = tf.cast(tf.reduce_sum(x) < 1e9, tf.int32)
    return with_gradients(lambda x: tf.reduce_mean(tf.add_n([x[:, at:], x[:, :1]]) ** 3))(x)[1]


def axes_that_depend_on_the_number_of_rows(x):
    """The first size is 1 with seven rows, and then broadcast."""
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=tf.stack([tf.shape(x)[0] - 6, 2]), s1=[4, 2])
    return tf.reduce_sum(x[:4], axes)


TRAPS = [
    list_of_whole_and_cut_rows,
    loop_that_returns_a_whole_tensor,
    loop_of_maxima_without_a_round,
    two_calls_of_a_compiled_function,
    truncated_quotients,
    gradient_of_a_slice_from_an_entry_on_that_the_rows_choose,
    axes_that_depend_on_the_number_of_rows,
    # A list of a number and of a sum.
    lambda x: tf.TensorArray(x.dtype, 2, element_shape=[]).write(0, 5.0).write(1, tf.reduce_sum(x)).stack(),
    # The length of a list of rows.
    lambda x: tf.TensorArray(x.dtype, size=tf.shape(x)[0], dynamic_size=True, element_shape=[]).size(),
    # A list that nothing writes.
    lambda x: tf.TensorArray(x.dtype, 3, element_shape=[2]).stack() + tf.reduce_sum(x, axis=0),
    # The contrast of an image with an axis of rows.
    lambda x: tf.image.adjust_contrast(tf.expand_dims(x, -1), 2.0),
    # Batch axes that are counted from behind.
    lambda x: tf.gather(x, tf.argsort(x, axis=1), batch_dims=-1),
    # A sum along an axis that the rows choose.
    lambda x: tf.reduce_sum(x, tf.cast(tf.reduce_sum(x) < 1e9, tf.int32)),
]


@pytest.mark.parametrize("step", TRAPS)
def test_traps(step):
    """These programs fail by combinations of operations, which proofs of single rules do not cover."""
    agree(step, [X])


def test_a_squeeze_that_names_no_axis_keeps_the_rows_of_a_tower_with_one():
    """On one device, the axis of the rows goes only if the whole batch has one row."""
    agree(lambda x: tf.raw_ops.Squeeze(input=x, axis=[]), *([X[:rows, :1]] for rows in (7, 3, 1)))


def meet(step, x, table):
    """Runs a step on rows and a table of unknown shape."""
    specs = [tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([None, None], tf.float64)]
    agree(step, [x, table], specs=specs, has_rows=[True, False])


@pytest.mark.parametrize(("entries", "times"), [(1, 1), (7, 1), (1, 2), (7, 2)])
def test_tables_of_unknown_size_that_meet_rows(entries, times):
    """The table may have one entry for all rows, or one for each; the rows may be concatenated."""

    def step(x, table):
        table = tf.concat([table] * (times if entries > 1 else 1), axis=0)
        return tf.reduce_mean(tf.square(tf.concat([x] * times, axis=0) - table), axis=0)

    meet(step, X, np.random.default_rng(1).normal(size=(entries, 2)))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_table_of_unknown_size_is_not_taken_for_rows(rows):
    """One row broadcasts to any table, and the mean is then over the table's entries; this is refused, not silently wrong."""

    def step(x, table):
        return tf.reduce_mean(tf.square(x - table))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"meets rows of the batch, and must have one entry, or as many"):
        meet(step, X[:rows], np.zeros((4, 2)))
