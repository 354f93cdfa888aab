"""Cases that were wrong or that others get wrong, each with its story."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training, assert_towers_match_one_device
from keras import layers, losses, optimizers

import keras_dp

rng = np.random.default_rng(0)


def compiled(optimizer=lambda: optimizers.SGD(0.1), loss="mse"):
    return lambda: {"optimizer": optimizer(), "loss": loss}


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("layer", ["MaxPooling2D", "SeparableConv2D", "AveragePooling2D"])
def test_fewer_rows_than_towers_in_float32(layer, rows):
    """OneDNN aborts the process in the gradient of MaxPooling2D, and fails in others, for zero rows."""
    keras.config.set_floatx("float32")
    kinds = {
        "MaxPooling2D": lambda: layers.MaxPooling2D(),
        "AveragePooling2D": lambda: layers.AveragePooling2D(2),
        "SeparableConv2D": lambda: layers.SeparableConv2D(3, 3),
    }

    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 2)),
                layers.Conv2D(3, 3),
                layers.BatchNormalization(),
                kinds[layer](),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )

    data = rng.normal(size=(rows, 8, 8, 2)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")
    assert_towers_match_one_device(build, compiled(lambda: optimizers.SGD(0.01)), [(data, rows)], 4)


@pytest.mark.parametrize("rows", [1, 3])
def test_conv_lstm_with_fewer_rows_than_towers_in_float32(rows):
    """ConvLSTM2D and causal Conv1D fail forward for zero rows."""
    keras.config.set_floatx("float32")

    def build():
        inputs = keras.Input((3, 5, 5, 2))
        x = layers.ConvLSTM2D(2, 3)(inputs)
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

    data = rng.normal(size=(rows, 3, 5, 5, 2)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")
    assert_towers_match_one_device(build, compiled(), [(data, rows)], 4)


def test_embeddings_of_an_empty_slice_touch_no_row():
    """The borrowed row's tokens must not appear among the sparse gradients."""

    def build():
        inputs = keras.Input((4,), dtype="int32")
        table = layers.Embedding(9, 3)
        x = layers.Flatten()(layers.Add()([table(inputs), table(9 - 1 - inputs)]))
        return keras.Model(inputs, layers.Dense(2)(x))

    data = rng.integers(0, 9, (5, 4)), rng.normal(size=(5, 2))
    for optimizer in (lambda: optimizers.Adam(0.01), lambda: optimizers.Adagrad(0.1), lambda: optimizers.SGD(0.1, 0.9)):
        assert_same_training(build, compiled(optimizer), [(data, 2)], 4)


def test_first_batch_uneven():
    """MirroredStrategy crashes if the first batch does not divide by the replicas."""

    def build():
        return keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(2)])

    data = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))
    assert_towers_match_one_device(build, compiled(), [(data, 7)], 4)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_automatic_loss_scaling_follows_the_inner_models_policy(policy):
    keras.config.set_floatx("float32")
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(5, dtype=policy), layers.Dense(2, dtype="float32")])
    inner.dtype_policy = policy
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("sgd", "mse")
    assert isinstance(parallel.optimizer.inner_optimizer, optimizers.LossScaleOptimizer) is (policy == "mixed_float16")
    parallel.fit(np.ones((5, 4)), np.ones((5, 2)), batch_size=3, verbose=0)
    assert all(np.isfinite(weight).all() for weight in parallel.get_weights())


def test_a_masked_step_of_a_recurrent_layer_with_dropout_trains():
    inner = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(3, dropout=0.3),
            layers.Dense(2),
        ]
    )
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("sgd", losses.MeanSquaredError())
    parallel.fit(rng.integers(0, 9, (7, 5)), rng.normal(size=(7, 2)), batch_size=4, verbose=0)
    assert all(np.isfinite(weight).all() for weight in inner.get_weights())
