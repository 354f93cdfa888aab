"""Arguments with few values refuse all others, and suggest the value that may have been meant."""

import inspect
from typing import get_args, get_origin

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import choices


@pytest.mark.parametrize(
    ("value", "question"),
    [("synch", " Did you mean 'sync'?"), ("LOCAL", " Did you mean 'local'?"), ("global batch", ""), (None, ""), (3, "")],
)
def test_refuses_unknown_values(value, question):
    with pytest.raises(ValueError, match="one of") as error:
        choices.refuse_unknown("batch_norm", value, choices.BatchNorm)
    known = "'sync', 'local', 'first'"
    assert str(error.value) == f"`batch_norm` must be one of {known}.{question} Received: batch_norm={value!r}"


def test_none_is_a_value_where_it_is_one():
    choices.refuse_unknown("gradient_dtype", None, choices.GradientType)
    assert choices.values_of(choices.GradientType) == ["bfloat16", "float16", None]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (keras_dp.DataParallelModel, {"batch_norm", "gradient_dtype"}),
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


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def test_an_unknown_argument_is_answered_with_a_known_one():
    with pytest.raises(TypeError, match=r"has no argument 'device'. Did you mean 'devices'\?"):
        keras_dp.DataParallelModel(dense(), device=2)
    parallel = compiled()
    with pytest.raises(TypeError, match=r"fit.. has no argument 'batchsize'. Did you mean 'batch_size'\?"):
        parallel.fit(X, X[:, :1], batchsize=3)
    with pytest.raises(TypeError, match=r"evaluate.. has no argument 'batch'. Did you mean 'batch_size'\?"):
        parallel.evaluate(X, X[:, :1], batch=3)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_no_data(method):
    parallel = compiled()
    with pytest.raises(ValueError, match=rf"{method}\(\) needs data: .* Received: x=None"):
        getattr(parallel, method)(*(() if method != "predict" else (None,)))


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


X = np.ones((8, 4))


def compiled():
    parallel = keras_dp.DataParallelModel(dense(), devices=2)
    parallel.compile("sgd", "mse")
    return parallel
