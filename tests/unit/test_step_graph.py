"""The graphs of a step are its own, whatever runs beside it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.reports.step_graph import partition_graphs, with_marked_argument


def test_graphs_of_another_function_are_not_taken():
    """Once the graphs of a larger function were, whose nodes had the same names: it ran in another thread."""
    marked, mark = with_marked_argument(lambda argument: tf.square(argument))
    own = tf.function(marked)

    @tf.function
    def larger(argument):
        return tf.square(tf.square(argument)) + 1.0

    def at_once(argument):
        larger(argument)
        own(argument)
        larger(argument)

    argument = tf.constant([1.0, 2.0])
    own.get_concrete_function(argument)
    larger(argument)
    graphs = partition_graphs(at_once, argument, mark)
    assert [node.op for graph in graphs for node in graph.node].count("Square") == 1


def test_the_users_own_trace_goes_on(tmp_path):
    """A report had ended it: `trace_export` said that none had begun."""
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    batch = np.ones((8, 4)), np.ones((8, 1))
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.trace_on(graph=True)
        parallel.train_on_batch(*batch)
        with pytest.raises(RuntimeError, match=r"already.*trace_export"):
            parallel.report(batch)
        tf.summary.trace_export("own", step=0)
    assert list(tmp_path.iterdir())
    assert parallel.report(batch).batch_rows == 8
