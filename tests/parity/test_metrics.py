"""Metrics of the global batch use the logits behind the outputs, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_towers_match_one_device
from keras import layers, metrics

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", tf.nn.softmax, tf.nn.sigmoid])
@pytest.mark.parametrize("name", ["CategoricalCrossentropy", "BinaryCrossentropy"])
def test_outputs_keep_the_logits_behind_them(name, activation):
    """Keras computes crossentropies from the logits behind an activation; saturated outputs no longer contain them."""

    class Own(getattr(metrics, name)):
        pass

    def build():
        return keras.Sequential([keras.Input((5,)), layers.Dense(3, kernel_initializer="ones"), layers.Activation(activation)])

    def loss(y_true, y_pred):
        return getattr(keras.losses, "categorical_crossentropy" if name[0] == "C" else "binary_crossentropy")(y_true, y_pred)

    y = np.eye(3)[rng.integers(0, 3, 23)]

    def arguments():
        return {"optimizer": "sgd", "loss": loss, "metrics": [Own(name="own")]}

    assert_towers_match_one_device(build, arguments, [((100 * X, y), 9)], 3)
