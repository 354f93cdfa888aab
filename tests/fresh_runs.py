"""Run a program from fresh seeds, plainly or on towers, and compare all that it returns and leaves behind."""

import random

import keras
import numpy as np
import tensorflow as tf
from comparison import TOLERANCE, assert_same

import keras_dp
from keras_dp.keras_internals.graph_optimizer import graph_optimizer


def plain_run(build, script):
    """Returns what a program gives in plain Keras: see `run`. All its numbers are finite.

    TensorFlow's dependency optimizer may drop the order between a read of a variable and its update: test_programs.py has more.
    """
    with graph_optimizer(dependency_optimization=False):
        result = run(build, script)
    assert all(np.isfinite(number).all() for number in numbers(result).values()), "plain Keras gives infinite numbers"
    return result


def run(build, script, wrap=lambda model: model):
    """Builds a model from fresh seeds, wraps it, runs the script, and returns all results.

    Args:
        build: a function that builds the model.
        script: a function that compiles and trains a model, and returns nested numbers.
        wrap: a function that takes the model and returns the model that the script trains.

    Returns:
        What the script returns; and paths, shapes and values of the variables of the model and of its optimizers, in their
        order.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = build()
    results = script(wrap(model))
    optimizers = {name: value for name, value in vars(model).items() if isinstance(value, keras.optimizers.Optimizer)}
    return {
        "results": results,
        "variables": described(model.variables),
        "optimizers": {name: described(optimizer.variables) for name, optimizer in optimizers.items()},
    }


def assert_same_run(build, script, towers=3, expected=None, **wrapper_arguments):
    """Asserts that a program gives the same results on towers as in plain Keras.

    Args:
        build: a function that builds the model.
        script: a function that compiles and trains a model, and returns nested numbers.
        towers: the number of towers.
        expected: what `plain_run` returned for this program, if it ran before.
        **wrapper_arguments: further arguments of the wrapper.

    Returns:
        What the program gives in plain Keras.
    """
    expected = plain_run(build, script) if expected is None else expected
    received = run(build, script, lambda model: keras_dp.DataParallelModel(model, devices=towers, **wrapper_arguments))
    said, heard = leaves(names(expected)), leaves(names(received))
    different = {path: (said.get(path), heard.get(path)) for path in said | heard if said.get(path) != heard.get(path)}
    assert not different, f"texts, names, shapes or structures differ: {dict(list(different.items())[:4])}"
    assert_same(numbers(expected), numbers(received), TOLERANCE[keras.config.floatx()])
    return expected


def described(variables):
    """Returns paths, shapes and values of variables."""
    return [(variable.path, tuple(variable.shape), np.asarray(variable.value)) for variable in variables]


def next_draws():
    """Returns the next numbers of the generators of Python, NumPy, TensorFlow and Keras."""
    return {
        "python": random.random(),
        "numpy": np.random.random(),
        "tensorflow": tf.random.uniform(()).numpy(),
        "keras": np.asarray(keras.random.uniform(())),
    }


def names(result):
    """Returns a nested result with its texts, and with the shapes of its numbers in their place."""
    if isinstance(result, dict):
        return {key: names(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [names(value) for value in result]
    return result if isinstance(result, str | None) else str(np.shape(result))


def numbers(result):
    """Returns the numbers of a nested result by their paths."""
    return {path: np.asarray(leaf) for path, leaf in leaves(result).items() if not isinstance(leaf, str | None)}


def leaves(result, path=""):
    """Returns the leaves of a nested result by their paths."""
    if isinstance(result, dict):
        return {key: leaf for name, value in result.items() for key, leaf in leaves(value, f"{path}/{name}").items()}
    if isinstance(result, list | tuple):
        return {key: leaf for i, value in enumerate(result) for key, leaf in leaves(value, f"{path}/{i}").items()}
    return {path: result}
