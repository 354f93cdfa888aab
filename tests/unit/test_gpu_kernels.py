"""Kernels are found by the types of an operation, with what they keep in the host's memory."""

import tensorflow as tf

from keras_dp.gpu_model.kernels import Kernel, gpu_kernel


def kernels_of(function, *specs):
    """Returns the kernels of a traced function by the types of its operations."""
    graph = tf.function(function).get_concrete_function(*specs).graph
    return {node.op: gpu_kernel(node) for node in graph.as_graph_def().node}


def test_numbers_are_on_the_gpu_and_shapes_on_the_host():
    function = lambda x: tf.concat(3 * [tf.reshape(tf.matmul(x, x), tf.shape(x)[:2])], 0)  # noqa: E731
    kernels = kernels_of(function, tf.TensorSpec([None, None]))
    assert kernels["ConcatV2"] == Kernel((False, False, False, True), (False,))
    assert kernels["MatMul"] == Kernel((False, False), (False,))
    assert kernels["Shape"] == Kernel((False,), (True,))
    assert kernels["StridedSlice"] == Kernel((True,) * 4, (True,))
    assert kernels["Reshape"] == Kernel((False, True), (False,))
    assert kernels["StridedSlice"].is_on_host
    assert not kernels["Shape"].is_on_host


def test_arguments_of_32_bit_integers_are_on_the_host():
    for dtype, on_host in ((tf.int32, True), (tf.int64, False), (tf.float32, False)):
        assert kernels_of(lambda x: x + 1, tf.TensorSpec([3], dtype))["Placeholder"] == Kernel((), (on_host,))


def test_operations_on_strings_and_cumulative_sums_of_complex_numbers_have_no_gpu_kernel():
    assert kernels_of(lambda x: tf.strings.as_string(x), tf.TensorSpec([3]))["AsString"] is None
    assert kernels_of(lambda x: tf.cumsum(x), tf.TensorSpec([3], tf.complex64))["Cumsum"] is None
