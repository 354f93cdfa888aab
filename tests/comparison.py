"""Run the same program on a plain Keras model and on towers, from the same seeds, and compare all that it gives.

A program is two functions: `build` makes a model, and `script` compiles and trains a model, and returns nested results.
"""

import contextlib
import functools
import inspect
import random
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from ways_of_wrapping import wrapped

import keras_dp
from keras_dp.batches.input_strategy import InputStrategy
from keras_dp.error_notes import add_note
from keras_dp.keras_internals.graph_optimizer import graph_optimizer

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


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


def plain_run(build, script):
    """Returns what a program gives in plain Keras: see `run`. All its numbers are finite.

    TensorFlow's dependency optimizer drops the order between a read of a variable and its update, where a step calls the model
    on rows that it makes itself. Of 400 runs of `constant_rows` in plain Keras, 11 read weights that were updated already;
    without the optimizer, none of 200 did. On towers, a variable is read once for all calls.
    """
    with graph_optimizer(dependency_optimization=False):
        result = run(build, script)
    assert all(np.isfinite(number).all() for number in numbers(result).values()), "plain Keras gives infinite numbers"
    return result


def assert_same_run(build, script, towers=3, expected=None, **wrapper_arguments):
    """Asserts that a program gives the same results on towers as in plain Keras.

    Args:
        build: a function that builds the model.
        script: a function that compiles and trains a model, and returns nested numbers.
        towers: the number of towers.
        expected: what `plain_run` returned for this program, if it ran before.
        **wrapper_arguments: further arguments of `wrapped`.

    Returns:
        What the program gives in plain Keras.
    """
    expected = plain_run(build, script) if expected is None else expected
    _assert_same_on_towers(build, script, towers, expected, wrapper_arguments)
    return expected


def assert_same_script(build, script, num_towers, wrapper_arguments=None):
    """Asserts that a program trains, and gives the same results on towers as in plain Keras.

    Args:
        build: a function that builds the model.
        script: a function that compiles and trains a model, and returns nested numbers.
        num_towers: the number of towers; a tuple for one wrapper after the other.
        wrapper_arguments: further arguments of `wrapped`.

    Returns:
        The plain model and the last wrapper.
    """
    models = []
    expected = run(build, training(script), lambda model: models.append(model) or model)
    for count in num_towers if isinstance(num_towers, tuple) else (num_towers,):
        parallel = _assert_same_on_towers(build, script, count, expected, wrapper_arguments or {})
    return models[0], parallel


def same_on_towers(build, num_towers):
    """Makes a test of a script, which takes a model and then pytest's fixtures: all that it returns is the same on towers."""

    def decorated(script):
        def test(**fixtures):
            assert_same_script(build, functools.partial(script, **fixtures), num_towers)

        signature = inspect.signature(script)
        test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        test.__module__, test.__name__, test.__doc__ = script.__module__, script.__name__, script.__doc__
        return test

    return decorated


def _assert_same_on_towers(build, script, towers, expected, wrapper_arguments):
    """Compares a program on towers with its results in plain Keras. Returns the wrapper."""
    wrappers = []

    def wrap(model):
        wrappers.append(wrapped(model, devices=towers, **wrapper_arguments))
        return wrappers[0]

    received = run(build, script, wrap)
    with explained_by_check_step(wrappers[0], script):
        assert_same_results(expected, received)
    return wrappers[0]


def training(script):
    """Returns a script that asserts that the weights have changed."""

    def trains(model):
        before = model.get_weights()
        results = script(model)
        after = model.get_weights()
        assert not before or len(before) != len(after) or largest_change(before, after) > 1e-6, "nothing was trained"
        return results

    return trains


def assert_same_training(build, compile_arguments, datasets, num_towers, wrapper_arguments=None, **fit_arguments):
    """Compares `fit` alone: histories, weights and optimizer state. Returns the plain model and the wrapper."""
    return assert_same_script(
        build, lambda model: fit(model, compile_arguments, datasets, **fit_arguments), num_towers, wrapper_arguments
    )


def assert_towers_match_one_device(build, compile_arguments, datasets, num_towers, wrapper_arguments=None, **fit_arguments):
    """Compares `fit`, `evaluate` and `predict`. Returns the two trained models."""
    one, parallel = assert_same_script(
        build,
        lambda model: fit_evaluate_predict(model, compile_arguments, datasets, **fit_arguments),
        num_towers,
        wrapper_arguments,
    )
    return one, parallel.inner_model


def fit(model, compile_arguments, datasets, **fit_arguments):
    """Compiles, fits each dataset ((x, y) or (x, y, sample_weight), batch size), and returns the histories."""
    model.compile(**compile_arguments())
    histories = []
    for (x, *targets), batch_size in datasets:
        y, sample_weight = [*targets, None, None][:2]
        arguments = {"epochs": 2, "shuffle": False, "verbose": 0, **fit_arguments}
        histories.append(model.fit(x, y, sample_weight=sample_weight, batch_size=batch_size, **arguments).history)
    return histories


def fit_evaluate_predict(model, compile_arguments, datasets, batch_size=7, **fit_arguments):
    """Returns the histories of `fit`, and the results of `evaluate` and `predict` for the same data."""
    results = [fit(model, compile_arguments, datasets, **fit_arguments)]
    for (x, *targets), _ in datasets:
        y, sample_weight = [*targets, None, None][:2]
        evaluation = model.evaluate(x, y, sample_weight=sample_weight, batch_size=batch_size, verbose=0, return_dict=True)
        results.append((evaluation, model.predict(x, batch_size=batch_size, verbose=0)))
    return results


def assert_same_results(expected, received):
    """Asserts that two results of `run` have the same names, texts and shapes, and the same numbers."""
    said, heard = leaves(names(expected)), leaves(names(received))
    different = {path: (said.get(path), heard.get(path)) for path in said | heard if said.get(path) != heard.get(path)}
    assert not different, f"texts, names, shapes or structures differ: {dict(list(different.items())[:4])}"
    assert_same(numbers(expected), numbers(received), TOLERANCE[keras.config.floatx()])


def assert_same(expected, received, tolerance, path=""):
    """Asserts that two nested results agree within an absolute tolerance plus a relative one."""
    if isinstance(expected, dict):
        assert set(expected) == set(received), path
        for key in expected:
            assert_same(expected[key], received[key], tolerance, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(received), path
        for i, (one, other) in enumerate(zip(expected, received, strict=True)):
            assert_same(one, other, tolerance, f"{path}/{i}")
    else:
        np.testing.assert_allclose(received, expected, rtol=tolerance, atol=tolerance, err_msg=path)


@contextlib.contextmanager
def explained_by_check_step(parallel, script):
    """Adds to a failed assertion the report of `check_step` on the first batch that the script feeds to the model."""
    try:
        yield
    except AssertionError as error:
        batches = []
        distribute = InputStrategy.experimental_distribute_dataset

        def remembering(feed, dataset):
            batches.append(next(iter(dataset)))
            return distribute(feed, dataset)

        try:
            with mock.patch.object(InputStrategy, "experimental_distribute_dataset", remembering):
                script(parallel)
            add_note(error, str(keras_dp.check_step(parallel, batches[0])))
        except Exception as reason:
            add_note(error, f"check_step does not run: {reason!r}")
        raise


def twins(build, count=2):
    """Builds several models from the same seeds, with the same weights."""
    models = []
    for _ in range(count):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        models.append(build())
    for model in models[1:]:
        if models[0].built and model.built:
            model.set_weights(models[0].get_weights())
    return models


def largest_difference(one, other):
    """Returns the largest difference between the weights of two models."""
    return largest_change(one.get_weights(), other.get_weights())


def largest_change(before, after):
    """Returns the largest difference between two lists of arrays."""
    return max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))


def values(optimizer):
    """Returns the values of all variables of an optimizer."""
    return [variable.numpy() for variable in optimizer.variables]


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
