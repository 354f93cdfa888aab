"""Each device writes the constants and the shapes that it needs, so that none of them is sent."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, with_gradients

from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.running.crossings import Crossings
from keras_dp.partition.step import Argument, build, propagate
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import traced_step

DEVICES, HOME = ["CPU:1", "CPU:2", "CPU:3"], "CPU:1"
ROWS = tf.TensorSpec([None, 4], tf.float64)


def copies(step):
    """Returns the source and the destination of each copy between towers in a step on a batch of rows."""
    traced = traced_step(Trace(step, [ROWS]).concrete)
    rows = RowCounts(tf.constant(9), [None] * 3, [None] * 3)
    arguments = [Argument(ROWS, lambda: None, DEVICES)]
    built = build(propagate(traced, arguments, rows), arguments, rows, Target(DEVICES, HOME))
    found = Crossings(built.graph.function, built.variable_devices).copies
    return sorted((copy.source[-5:], copy.destination[-5:]) for copy in found if copy.source[-5:] in DEVICES)


def of_constants(x):
    mask = tf.linalg.band_part(tf.ones([4, 4], x.dtype), -1, 0)
    return tf.reduce_sum(tf.matmul(x, mask) ** 2)


def of_a_shape(x):
    rows = tf.shape(x)[0]
    in_pairs = tf.reshape(x, [2 * rows, 2])
    return tf.reduce_sum(tf.reshape(in_pairs, tf.shape(x)) * tf.ones([rows, 1], x.dtype))


def of_a_wide_shape(x):
    """Uses a shape of int64, which GPUs do not keep in the host's memory."""
    shape = tf.shape(x, out_type=tf.int64)
    return tf.reduce_sum(tf.broadcast_to(x[:, :1], shape) ** 2)


def of_a_gradient(x):
    _, gradient = with_gradients(lambda x: tf.reduce_sum((x - tf.reduce_mean(x, axis=1, keepdims=True)) ** 2))(x)
    return tf.reduce_sum(gradient**3)


@pytest.mark.parametrize("step", [of_constants, of_a_shape, of_a_wide_shape, of_a_gradient])
def test_towers_send_their_parts_and_receive_nothing(step):
    assert copies(step) == [("CPU:2", "CPU:1"), ("CPU:3", "CPU:1")]
    agree(step, *([np.random.default_rng(rows).normal(size=(rows, 4))] for rows in (7, 2, 1)))


def test_what_depends_on_a_variable_is_sent():
    """A negative control: the same computation from a variable."""
    with tf.device(HOME):
        variable = tf.Variable(np.ones((4, 4)))

    def step(x):
        return tf.reduce_sum(tf.matmul(x, tf.linalg.band_part(variable, -1, 0)) ** 2)

    assert [pair for pair in copies(step) if pair[0] == "CPU:1"] == [("CPU:1", "CPU:2"), ("CPU:1", "CPU:3")]
