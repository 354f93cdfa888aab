"""Runs the same script on a plain Keras model and on a DataParallelModel around its twin, and compares all that comes out."""

import keras
import numpy as np

import keras_dp

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def twins(build):
    """Two models from the same seeds, with the same weights."""
    models = []
    for _ in range(2):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        models.append(build())
    if models[0].built and models[1].built:
        models[1].set_weights(models[0].get_weights())
    return models


def train(model, compile_arguments, datasets, evaluate_batch_size=7, **fit_arguments):
    """Fits datasets, each ((x, y) or (x, y, sample_weight), batch size), and returns histories, evaluations and predictions."""
    keras.utils.set_random_seed(5)
    model.compile(**compile_arguments())
    results = []
    for (x, *targets), batch_size in datasets:
        y, sample_weight = [*targets, None, None][:2]
        arguments = {"epochs": 2, "shuffle": False, "verbose": 0, **fit_arguments}
        history = model.fit(x, y, sample_weight=sample_weight, batch_size=batch_size, **arguments).history
        evaluation = model.evaluate(
            x, y, sample_weight=sample_weight, batch_size=evaluate_batch_size, verbose=0, return_dict=True
        )
        results.append((history, evaluation, model.predict(x, batch_size=evaluate_batch_size, verbose=0)))
    return results


def assert_same(expected, received, tolerance, path=""):
    """Asserts that two nested results agree, relative to their size where that is large."""
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
    """The largest difference between the weights of two models."""
    return largest_change(one.get_weights(), other.get_weights())


def assert_towers_match_one_device(build, compile_arguments, datasets, num_towers, wrapper_arguments=None, **fit_arguments):
    """Trains both twins on the same datasets and compares weights, optimizer state, history, evaluation and predictions.

    Returns:
        The two trained models.
    """
    one, inner = twins(build)
    before = one.get_weights()
    expected = train(one, compile_arguments, datasets, **fit_arguments)
    parallel = keras_dp.DataParallelModel(inner, devices=num_towers, **wrapper_arguments or {})
    received = train(parallel, compile_arguments, datasets, **fit_arguments)

    tolerance = TOLERANCE[keras.config.floatx()]
    assert_same(expected, received, tolerance)
    assert_same(one.get_weights(), inner.get_weights(), tolerance, "weights")
    for optimizer in (inner.optimizer, parallel.optimizer):
        assert_same(values(one.optimizer), values(optimizer), tolerance, "optimizer")
    if len(before) == len(one.get_weights()) > 0:
        assert largest_change(before, one.get_weights()) > 1e-6, "nothing was trained"
    return one, inner


def largest_change(before, after):
    """The largest difference between two lists of arrays."""
    return max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))


def values(optimizer):
    """The values of all variables of an optimizer."""
    return [variable.numpy() for variable in optimizer.variables]
