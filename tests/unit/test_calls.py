"""`fit`, `evaluate` and `predict` have Keras's arguments, followed by those of keras_dp."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp

X, Y = np.ones((8, 4)), np.ones((8, 1))


def parallel_model():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


@pytest.mark.parametrize(("name", "own"), [("fit", {"sharded"}), ("evaluate", {"sharded"}), ("predict", {"sharded", "rows"})])
def test_signatures(name, own):
    """Arguments are written out for editors: the same names, order and defaults, and ours as keywords only."""
    parameters = inspect.signature(getattr(keras_dp.DataParallelModel, name)).parameters
    of_keras = inspect.signature(getattr(keras.Model, name)).parameters
    shared = [(p.name, p.default, p.kind) for p in parameters.values() if p.name not in own]
    assert shared == [(p.name, p.default, p.kind) for p in of_keras.values()]
    assert {parameters[name].kind for name in own} == {inspect.Parameter.KEYWORD_ONLY}
    described = inspect.getdoc(getattr(keras_dp.DataParallelModel, name))
    assert all(f"{parameter}:" in described for parameter in parameters if parameter != "self")


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_arguments_are_passed_on_by_name_and_only_if_given(name, monkeypatch):
    """Mlflow replaces keras.Model.fit by a function that adds a callback to those given by name."""
    received = []
    original = getattr(keras.Model, name)

    def patched(model, *args, **kwargs):
        received.append((*args, set(kwargs)))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(keras.Model, name, patched)
    targets = () if name == "predict" else (Y,)
    getattr(parallel_model(), name)(X, *targets, 4, verbose=0)
    assert received == [(X, {"batch_size", "verbose", *(["y"] if targets else [])})]


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="`rows` must be one of"):
        parallel_model().predict(X, rows="some")
