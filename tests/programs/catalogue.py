"""Collect the programs, and define their data, from fixed seeds, and a small network."""

import keras
import numpy as np

PROGRAMS = {}


def program(function):
    """Registers a function by its name; it returns (build, script), which make the model, and train it and report."""
    if function.__name__ in PROGRAMS:
        raise ValueError(f"There are two programs of one name. Received: {function.__name__!r}")
    PROGRAMS[function.__name__] = function
    return function


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape)


def integers(below, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, below, size=shape)


# 13 rows in batches of 5, 5 and 3: no batch is a multiple of 2 or 3, and the last one is smaller.
FEATURES = normal(13, 5, seed=1)
TARGETS = normal(13, 1, seed=2)
CLASSES = integers(3, 13, seed=3)
SAMPLE_WEIGHTS = 0.2 + uniform(13, seed=4)


def mlp(inputs, *sizes, last=None, normalized=False, name=None):
    """Builds dense layers with tanh between them, and optional batch normalization."""
    network = [keras.Input((inputs,))]
    for size in sizes[:-1]:
        network.append(keras.layers.Dense(size, use_bias=not normalized))
        if normalized:
            network.append(keras.layers.BatchNormalization(momentum=0.8))
        network.append(keras.layers.Activation("tanh"))
    return keras.Sequential([*network, keras.layers.Dense(sizes[-1], activation=last)], name=name)
