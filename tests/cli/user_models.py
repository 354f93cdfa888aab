"""Models and data as a user's module has them, for the tests of the commands."""

import keras
import numpy as np
from keras import layers

number = 3


def small():
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)])


def compiled(**arguments):
    model = small()
    model.compile("adam", "mae", **arguments)
    return model


def compiled_for_several_steps():
    return compiled(steps_per_execution=2)


def pooling():
    """Sums and pools as U-Net does."""
    hidden = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2DTranspose(3, 2)]
    return keras.Sequential([keras.Input((8, 8, 3)), *hidden, layers.Conv2D(2, 1)])


def of_any_length():
    return keras.Sequential([keras.Input((None, 3)), layers.Dense(1)])


def text():
    return keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(vocabulary=["a"])])


def without_inputs():
    return keras.Sequential([layers.Dense(1)])


def broken():
    raise RuntimeError("this model cannot be built")


def one_row():
    return np.ones((1, 3), "float32"), np.ones((1, 2), "float32")


def generator():
    while True:
        yield [np.zeros((4, 3)), np.zeros((4, 2))]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros((5, 3)), np.zeros((5, 2))
