"""Run the same script on a plain Keras model and on a DataParallelModel around its twin, and compare all results."""

import contextlib
from unittest import mock

import keras
import numpy as np

import keras_dp
from keras_dp.batches.input_strategy import InputStrategy
from keras_dp.error_notes import add_note

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


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


def largest_difference(one, other):
    """Returns the largest difference between the weights of two models."""
    return largest_change(one.get_weights(), other.get_weights())


def assert_same_script(build, script, num_towers, wrapper_arguments=None):
    """Runs a script on a plain model and on a wrapper around its twin, and compares results, weights and optimizer state.

    Args:
        build: a function that builds the model.
        script: a function that compiles and trains a model, and returns nested numbers.
        num_towers: the number of devices of the wrapper; a tuple for one wrapper after the other.
        wrapper_arguments: further arguments of the wrapper.

    Returns:
        The plain model and the last wrapper.
    """
    counts = num_towers if isinstance(num_towers, tuple) else (num_towers,)
    one, *inners = twins(build, 1 + len(counts))
    before = one.get_weights()
    keras.utils.set_random_seed(5)
    expected = script(one)
    tolerance = TOLERANCE[keras.config.floatx()]
    for inner, count in zip(inners, counts, strict=True):
        keras.utils.set_random_seed(5)
        parallel = keras_dp.DataParallelModel(inner, devices=count, **wrapper_arguments or {})
        received = script(parallel)
        with explained_by_check_step(parallel, script):
            assert_same(expected, received, tolerance)
            assert_same(one.get_weights(), inner.get_weights(), tolerance, "weights")
            for optimizer in (inner.optimizer, parallel.optimizer):
                assert_same(values(one.optimizer), values(optimizer), tolerance, "optimizer")
    if len(before) == len(one.get_weights()) > 0:
        assert largest_change(before, one.get_weights()) > 1e-6, "nothing was trained"
    return one, parallel


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


def largest_change(before, after):
    """Returns the largest difference between two lists of arrays."""
    return max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))


def values(optimizer):
    """Returns the values of all variables of an optimizer."""
    return [variable.numpy() for variable in optimizer.variables]
