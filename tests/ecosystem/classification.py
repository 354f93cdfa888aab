"""Define the model and the data that the programs of this suite share."""

import keras
import numpy as np
from keras import layers

import keras_dp

TOWERS = 2


def two_classes():
    """Returns 40 rows of 4 numbers, and for each row whether its sum is positive."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int32")


def classifier(wrapped, units=8):
    """Builds and compiles a model for two classes, optionally wrapped, with the same names and weights in both cases."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    outputs = layers.Dense(2, activation="softmax")(layers.Dense(units, activation="relu")(inputs))
    model = keras.Model(inputs, outputs, name="classifier")
    model = keras_dp.DataParallelModel(model, devices=TOWERS) if wrapped else model
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def both(run):
    """Returns what a function gives for a plain model and for a wrapped one."""
    return [run(wrapped) for wrapped in (False, True)]
