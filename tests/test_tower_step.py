"""What a tower computes, and how: here, compiled by XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_towers_match_one_device
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 8, 8, 2)), rng.normal(size=(22, 3))


def build():
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def test_towers_compiled_by_xla_match_one_device():
    """With an uneven last batch, and batch normalization between whose sums each tower is compiled."""
    assert_towers_match_one_device(
        build,
        lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"], "jit_compile": True},
        [((X, Y), 9)],
        num_towers=3,
        wrapper_arguments={"parameter_device": "sharded"},
    )


@pytest.mark.parametrize("jit_compile", [True, False, "auto"])
def test_xla_compiles_each_tower_for_its_own_device_when_asked(jit_compile):
    """Never the sums between them, and never the whole step, which XLA would put on one device."""
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    parallel.compile("sgd", "mse", jit_compile=jit_compile)
    parallel.train_on_batch(X, Y)
    graph = (
        tf.function(parallel.train_step, autograph=False)
        .get_concrete_function(
            tuple(
                keras_dp.batches.Slice((X[half], Y[half]), tf.constant(11 * i), tf.constant(11), tf.constant(22))
                for i, half in enumerate((slice(11), slice(11, 22)))
            )
        )
        .graph
    )
    marked = [operation for operation in graph.get_operations() if b"_XlaCompile" in operation.node_def.SerializeToString()]
    assert bool(marked) == (jit_compile is True)
    assert all(operation.name.startswith("towers/tower_") for operation in marked)
    assert {operation.device[-5:] for operation in marked} == ({"CPU:0", "CPU:1"} if marked else set())
    convolutions = [operation for operation in marked if operation.type.startswith("Conv2D")]
    assert len(convolutions) == (4 if marked else 0)  # Forward and for the kernel, on each of two towers.
