"""Towers share the work of what libraries do: nothing is gathered, and the results are those of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, partitioned_step, with_gradients

WEIGHTS = np.random.default_rng(0).normal(size=(6, 3)) * 0.3
FILTER = np.random.default_rng(1).normal(size=(2, 3, 3)) * 0.3


def recurrent_cell_that_concatenates(x):
    def one(i, h):
        return i + 1, tf.tanh(tf.concat([x[:, i], h], 1) @ WEIGHTS)

    return tf.while_loop(lambda i, h: i < 4, one, [0, tf.zeros([tf.shape(x)[0], 3], x.dtype)])[1]


def heads_of_unknown_length(x):
    rows = tf.shape(x)[0]
    heads = tf.transpose(tf.reshape(x, [rows, -1, 2, 6]), [0, 2, 1, 3])
    scores = tf.nn.softmax(heads @ tf.transpose(heads, [0, 1, 3, 2]))
    return tf.reshape(tf.transpose(scores @ heads, [0, 2, 1, 3]), [rows, -1, 12])


def dilated_convolution(x):
    return tf.nn.convolution(x, tf.constant(FILTER), padding="SAME", dilations=[2])


def dilated_causal_convolution(x):
    return keras.ops.conv(tf.pad(x, [[0, 0], [4, 0], [0, 0]]), tf.constant(FILTER), padding="valid", dilation_rate=4)


def spectrum(x):
    spectra = tf.signal.fft(tf.cast(x, tf.complex128))
    return tf.abs(spectra) + tf.math.angle(spectra)


def recomputed(x):
    block = tf.recompute_grad(lambda y: tf.tanh(y @ WEIGHTS[:3]))
    return block(block(x))


def recomputed_with_a_scale(x):
    """A second argument that has no rows."""
    return tf.recompute_grad(lambda y, scale: tf.tanh(y * scale))(x, tf.reduce_sum(x) * 0.1)


def recomputed_in_a_loop(x):
    block = tf.recompute_grad(lambda y: tf.tanh(y @ WEIGHTS[:3]))
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, block(y)), [0, x])[1]


def rematerialized(x):
    return keras.remat(lambda y: tf.tanh(y @ WEIGHTS[:3]))(x)


def result_of_a_loop_of_weights(x):
    """Each tower has the result, which no tower has to send."""
    return x * tf.while_loop(lambda i, w: i < 3, lambda i, w: (i + 1, tf.tanh(w)), [0, tf.constant(WEIGHTS[:1])])[1]


def reshaped_to_an_unknown_length(x):
    """The number of rows may be a plain integer, beside a size that is known in the step only."""
    return tf.tanh(tf.reshape(x, [x.shape[0] or tf.shape(x)[0], tf.shape(x)[1] * 12]))


def one_hot_among_all_rows(x):
    """As contrastive losses mark the row that belongs to each row; the entries move on by as many places as there are rows."""
    rows = tf.shape(x)[0]
    places = tf.argmax(x, axis=1, output_type=tf.int32)
    return tf.roll(x * tf.reduce_sum(tf.one_hot(places, rows, dtype=x.dtype), axis=1, keepdims=True), rows, axis=1)


IDIOMS = [
    (recurrent_cell_that_concatenates, (4, 3)),
    (heads_of_unknown_length, (5, 12)),
    (heads_of_unknown_length, (None, 12)),
    (dilated_convolution, (8, 3)),
    (dilated_causal_convolution, (8, 3)),
    (spectrum, (4, 3)),
    (recomputed, (4, 3)),
    (recomputed_with_a_scale, (4, 3)),
    (recomputed_in_a_loop, (3,)),
    (rematerialized, (4, 3)),
    (result_of_a_loop_of_weights, (4, 3)),
    (reshaped_to_an_unknown_length, (None, 12)),
    (one_hot_among_all_rows, (4,)),
]


def compared(step, sizes, known_rows, counts):
    """Asserts that a step gives the same on towers, and returns the operations that are computed once."""
    batches = [np.random.default_rng(0).normal(size=(rows, *(size or 5 for size in sizes))) for rows in counts]
    specs = [tf.TensorSpec((known_rows, *sizes), tf.float64)]
    partition = agree(step, *([x] for x in batches), specs=specs, known_rows=known_rows)
    return [known.type for known in partition.gathered]


KNOWN_ROWS = pytest.mark.parametrize(("known_rows", "counts"), [(None, (7, 2, 1)), (8, (8,))])


@pytest.mark.parametrize(("function", "sizes"), IDIOMS, ids=lambda value: getattr(value, "__name__", str(value)))
@KNOWN_ROWS
def test_towers_share_the_work(function, sizes, known_rows, counts):
    assert compared(with_gradients(lambda x: tf.reduce_mean(function(x) ** 2)), sizes, known_rows, counts) == []


def test_an_entry_that_matters_is_that_of_the_batch():
    """A negative control: the first entry is used otherwise, too, so that a tower must not take one of its own."""

    def step(x):
        first = tf.reduce_max(tf.reshape(x, [-1])[:1])
        found = tf.cast(first, tf.bool)
        zero = tf.where(tf.equal(found, found), tf.constant(0.0, x.dtype), tf.constant(np.nan, x.dtype))
        return x + zero, x * first

    assert compared(step, (3,), None, (7, 2)) == ["StridedSlice"]


@pytest.mark.parametrize(("one", "other"), [(0.0, np.nan), (1.0, 0.0)])
def test_a_choice_by_a_number_may_be_another(one, other):
    """A number that is not a number differs from itself, and a choice may be of other numbers than zero."""

    def step(x):
        first = tf.reduce_max(tf.reshape(x, [-1])[:1])
        first = tf.cast(first, tf.bool) if one else first / 0.0
        return (x + tf.where(tf.equal(first, first), tf.constant(one, x.dtype), tf.constant(other, x.dtype)),)

    compared(step, (3,), None, (7, 2))


@KNOWN_ROWS
def test_a_loop_whose_weights_are_broadcast_to_each_row(known_rows, counts):
    """Liquid time-constant networks of ncps ran at home: the sizes in the gradient of such a loop were not known."""

    def step(x):
        weights = [tf.constant(WEIGHTS[:3]), tf.constant(WEIGHTS[0])]

        def one(i, h):
            voltages = tf.sigmoid(tf.expand_dims(h, -1) - weights[0])
            return i + 1, h + x[:, i] + weights[1] / (1 / tf.constant(6.0, x.dtype)) * tf.reduce_sum(voltages, axis=-1)

        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_mean(tf.while_loop(lambda i, h: i < 4, one, [0, x[:, 0]])[1] ** 2)
        return loss, *tape.gradient(loss, weights)

    assert compared(step, (4, 3), known_rows, counts) == []


@pytest.mark.parametrize("known_rows", [None, 8])
def test_each_tower_draws_the_numbers_of_its_own_rows(known_rows):
    """Numbers that one device draws for all rows would be sent: skipping to the first row's place costs nothing."""

    def step(x):
        return x * tf.random.stateless_normal(tf.shape(x), [3, 4], dtype=x.dtype)

    _, partition = partitioned_step(step, [tf.TensorSpec((known_rows, 3), tf.float64)], [True], known_rows)
    assert [meeting.form.name.lower() for meeting in partition.program.meetings] == ["gather"]  # the result
