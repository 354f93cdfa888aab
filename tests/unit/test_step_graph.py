"""The graphs of a step are its own, whatever runs beside it."""

import tensorflow as tf

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
