"""Models and optimizers of Keras 2, which can be installed beside Keras 3, are refused by name."""

import pytest
import tf_keras
from classification import classifier

import keras_dp


@pytest.mark.parametrize(
    "build",
    [
        lambda: tf_keras.Sequential([tf_keras.layers.Dense(1)]),
        lambda: tf_keras.Model(inputs := tf_keras.Input((4,)), tf_keras.layers.Dense(1)(inputs)),
    ],
    ids=["sequential", "functional"],
)
def test_models(build):
    with pytest.raises(ValueError, match="This model is of Keras 2, and keras_dp is for Keras 3.*import keras"):
        keras_dp.DataParallelModel(build())


def test_optimizers():
    parallel = classifier(wrapped=True)
    with pytest.raises(ValueError, match="This optimizer is of Keras 2, and keras_dp is for Keras 3"):
        parallel.compile(tf_keras.optimizers.Adam(), "mse")
    with pytest.raises(ValueError, match="This optimizer is of Keras 2"):
        keras_dp.DataParallelOptimizer(tf_keras.optimizers.legacy.SGD())
