"""Collect the programs, and define what they share: data from fixed seeds, small networks, the end of a step, a script."""

import keras
import numpy as np
import tensorflow as tf

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


def dense(cls, outputs=1, activation=None, normalized=True):
    """Returns a function that builds a small functional network of this class for 5 features."""

    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        if normalized:
            hidden = keras.layers.BatchNormalization(momentum=0.8)(hidden)
        return cls(inputs, keras.layers.Dense(outputs, activation=activation)(hidden))

    return build


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01)


def descend(optimizer, tape, loss, variables):
    """Takes the gradients from the tape and applies them."""
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def fits(x=FEATURES, y=TARGETS, optimizer=sgd, batch_size=5, evaluates=False, predicts=False, report=None, **compile_arguments):
    """Returns a script that compiles and fits, and optionally evaluates, predicts and reports on the model."""

    def script(model):
        model.compile(optimizer=optimizer(), **compile_arguments)
        results = [model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history]
        if evaluates:
            results.append(model.evaluate(x, y, batch_size=batch_size - 1, verbose=0, return_dict=True))
        if predicts:
            results.append(model.predict(x, batch_size=batch_size - 1, verbose=0))
        if report:
            results.append(report(model))
        return results

    return script


def rows_of(x, dtype="float64"):
    """Returns the number of rows of a batch, as a tensor."""
    return tf.cast(tf.shape(x)[0], dtype)
