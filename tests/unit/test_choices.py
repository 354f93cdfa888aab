"""Calls take Keras's arguments and those of keras_dp, and refuse all others with the one that may have been meant."""

import inspect
import re
from typing import get_args, get_origin

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import choices

X, Y = np.ones((8, 4)), np.ones((8, 1))


def compiled():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


@pytest.mark.parametrize(
    ("value", "question"), [("synch", " Did you mean 'sync'?"), ("LOCAL", " Did you mean 'local'?"), ("all", ""), (None, "")]
)
def test_refuses_unknown_values(value, question):
    with pytest.raises(ValueError, match="one of") as error:
        choices.refuse_unknown("batch_norm", value, choices.BatchNorm)
    known = "'sync', 'local', 'first'"
    assert str(error.value) == f"`batch_norm` must be one of {known}.{question} Received: batch_norm={value!r}"
    choices.refuse_unknown("gradient_dtype", None, choices.GradientType)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (keras_dp.DataParallelModel, {"batch_norm", "gradient_dtype", "communication"}),
        (keras_dp.DataParallelModel.predict, {"rows"}),
        (keras_dp.DataParallelOptimizer, {"accumulate"}),
        (keras_dp.DataParallelOptimizer.apply_tower_gradients, {"reduction"}),
        (keras_dp.connect_workers, {"communication"}),
    ],
)
def test_editors_know_the_values(function, names):
    """Each annotation lists the values; the default is the first of them, or None."""
    parameters = inspect.signature(function, eval_str=True).parameters
    for name in names:
        values = get_args(parameters[name].annotation)
        assert get_origin(parameters[name].annotation) is not None
        assert parameters[name].default in (values[0], None)


@pytest.mark.parametrize(("name", "own"), [("fit", {"sharded"}), ("evaluate", {"sharded"}), ("predict", {"sharded", "rows"})])
def test_signatures_are_keras_own_with_further_keywords(name, own):
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
    getattr(compiled(), name)(X, *targets, 4, verbose=0)
    assert received == [(X, {"batch_size", "verbose", *(["y"] if targets else [])})]


REFUSED = {
    "has no argument 'device'. Did you mean 'devices'?": lambda model: keras_dp.DataParallelModel(model.inner_model, device=2),
    "fit() has no argument 'batchsize'. Did you mean 'batch_size'?": lambda model: model.fit(X, Y, batchsize=3),
    "evaluate() has no argument 'batch'. Did you mean 'batch_size'?": lambda model: model.evaluate(X, Y, batch=3),
    "`rows` must be one of": lambda model: model.predict(X, rows="some"),
    "fit() needs data: ": lambda model: model.fit(),
    "evaluate() needs data: ": lambda model: model.evaluate(),
    "predict() needs data: ": lambda model: model.predict(None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_arguments_are_refused(message):
    with pytest.raises(TypeError if "no argument" in message else ValueError, match=re.escape(message)) as refused:
        REFUSED[message](compiled())
    assert "needs data" not in message or str(refused.value).endswith("Received: x=None")


def test_a_loop_that_calls_the_model_is_told_once_that_it_runs_on_one_device(caplog):
    parallel = compiled()

    def said():
        return [record.getMessage() for record in caplog.records if record.name == "keras_dp"]

    with caplog.at_level("INFO", "keras_dp"):
        parallel.predict(X, verbose=0)
        assert not said()
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(parallel(X))
            tape.gradient(loss, parallel.trainable_variables)
    (message,) = said()
    assert "computes on one device, and a loop of your own that does so trains there" in message
