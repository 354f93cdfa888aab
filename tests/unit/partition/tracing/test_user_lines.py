"""The user's line is found in any directory."""

import keras
import pytest
import tensorflow as tf

from keras_dp.partition.tracing.user_lines import user_line


@pytest.mark.parametrize("directory", ["project", "keras", "keras_dp/examples"])
def test_line_of_an_operation(tmp_path, directory):
    """Covers a clone of this repository, and a project of the same name as Keras."""
    file = f"{tmp_path}/{directory}/train.py"
    names = {"keras": keras}
    exec(compile("def step(x):\n    return keras.ops.relu(x)", file, "exec"), names)
    graph = tf.function(names["step"], autograph=False).get_concrete_function(tf.TensorSpec([2])).graph
    (relu,) = [operation.name for operation in graph.get_operations() if operation.type == "Relu"]
    assert user_line(graph, relu) == f"{file}, line 2"
    assert user_line(graph, f"{relu}/inside") == f"{file}, line 2"
    assert user_line(graph, "nowhere") == ""
