"""Whatever integers are read as row counts, the result is one device's: a reading decides only what towers share."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, partitioned_step, reading_at_random, with_gradients

from keras_dp.partition.placing import propagation

ROWS = 6  # also a width of the tensors below, and twice or half of others


def batch_and_noise(x):
    flat = tf.reshape(tf.reshape(x, [ROWS * 2, 3]), [ROWS, 6])
    noise = tf.random.stateless_uniform([ROWS, 6], [1, 2], dtype=x.dtype) + tf.fill([ROWS, 6], x[0, 0])
    return tf.concat([flat, noise * tf.ones([6, 6], x.dtype)], 0)


@with_gradients
def of_batch(x):
    both = batch_and_noise(x)
    return tf.reduce_mean(both[:ROWS] ** 2 * tf.reshape(tf.tile(both[ROWS:, :1], [1, 6]), [ROWS, 6]))


def of_weights(x):
    weights = tf.reshape(tf.range(36, dtype=x.dtype), [6, 6]) / 36
    noisy = weights + tf.random.stateless_normal([6, 6], [3, 4], dtype=x.dtype) * tf.reduce_mean(x)
    spread = tf.broadcast_to(tf.reduce_sum(x, 0, keepdims=True), [6, 6]) @ noisy
    return x @ noisy, spread, tf.linalg.band_part(spread, 0, -1), tf.split(spread, [2, 4], 0)


@with_gradients
def of_a_loop(x):
    def body(i, state, states):
        state = tf.tanh(state @ tf.eye(6, dtype=x.dtype) + x * tf.cast(i, x.dtype))
        return i + 1, state, states.write(i, state)

    states = tf.TensorArray(x.dtype, 3, element_shape=[ROWS, 6])
    _, state, states = tf.while_loop(lambda i, *_: i < 3, body, [0, tf.zeros([ROWS, 6], x.dtype), states])
    return tf.reduce_sum(states.stack() ** 2) + tf.reduce_sum(tf.transpose(state) @ state)


def of_a_queue(x):
    queue = tf.concat([x, tf.zeros([ROWS, 6], x.dtype)], 0)[3 : 3 + ROWS]
    similar = x @ tf.transpose(queue)
    return tf.nn.softmax(similar), tf.linalg.diag_part(similar), tf.one_hot(tf.argmax(similar, 1), ROWS)


@with_gradients
def of_a_recomputed_function(x):
    """Each tower takes an entry of its own rows for the number by which the function waits for its gradient."""
    return tf.reduce_mean(tf.recompute_grad(lambda y: tf.tanh(y) * tf.reshape(y, [ROWS, 6]))(x) ** 2)


@pytest.mark.parametrize("step", [batch_and_noise, of_batch, of_weights, of_a_loop, of_a_queue, of_a_recomputed_function])
@pytest.mark.parametrize("seed", range(4))
def test_any_reading_is_right(step, seed):
    """Reads integers in a random order, makes random sources rows in random segments, and leaves out some readings."""
    x = np.random.default_rng(seed).normal(size=(ROWS, 6))
    with reading_at_random(seed):
        agree(step, [x], known_rows=ROWS)


def test_without_readings_the_rows_are_gathered(monkeypatch):
    """What is not read is computed once: slower, and the same."""
    x = np.random.default_rng(0).normal(size=(ROWS, 6))
    shared = agree(of_batch, [x], known_rows=ROWS)
    monkeypatch.setattr(propagation, "readings", lambda node, blocks=(): [node])
    assert len(shared.gathered) < len(agree(of_batch, [x], known_rows=ROWS).gathered)


def test_noise_of_a_weight_has_no_rows():
    """It is as long as the batch, and meets a tensor that the batch does not change."""
    weights = tf.Variable(np.random.default_rng(1).normal(size=(ROWS, 6)))

    def step(x):
        return tf.reduce_sum(x @ (weights + tf.random.stateless_normal([ROWS, 6], [3, 4], dtype=x.dtype)))

    _, partition = partitioned_step(step, [tf.TensorSpec([ROWS, ROWS], tf.float64)], [True], ROWS)
    assert not partition.gathered
    assert [meeting.form.name.lower() for meeting in partition.program.meetings] == ["sum"]


def test_gradients_of_normalized_noise_are_rows():
    """A mean's gradient is a constant for each row of the generated images, which depend on no row of the batch."""
    weights = tf.Variable(np.random.default_rng(1).normal(size=(3, 8)))

    def step(x):
        with tf.GradientTape() as tape:
            images = tf.reshape(tf.random.stateless_normal([ROWS, 3], [3, 4], dtype=x.dtype) @ weights, [ROWS, 2, 2, 2])
            mean, variance = tf.nn.moments(images, [0, 1, 2])
            made = tf.nn.batch_normalization(images, mean, variance, None, None, 1e-3)
            loss = tf.reduce_mean(tf.tanh(tf.reshape(made, [ROWS, 8])) ** 2)
        return tape.gradient(loss, weights), tf.reduce_mean(x)

    _, partition = partitioned_step(step, [tf.TensorSpec([ROWS, 2], tf.float64)], [True], ROWS)
    assert not partition.gathered
    nodes, plans = partition.propagation.nodes, partition.propagation.plans
    tiled = [plans[name] for name, node in nodes.items() if node.op in ("Tile", "BroadcastTo")]
    assert tiled
    assert not any(plan.is_at_home for plan in tiled)


def test_noise_of_an_unknown_length_has_no_rows():
    """Its size is not known while the step is traced, although that of the batch is."""

    def step(x):
        found = tf.unique(tf.cast(10.0 * x[:, 0], tf.int32))[0]
        return x * tf.reduce_mean(tf.random.stateless_normal([tf.size(found), 2], [3, 4], dtype=x.dtype), axis=0)

    agree(step, [np.random.default_rng(0).normal(size=(ROWS, 2))], known_rows=ROWS)
