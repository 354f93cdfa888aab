"""The devices are announced before training, in `repr` and in `summary`."""

import logging
import types

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from keras import layers

import keras_dp
from keras_dp.devices import announcement, variable_homes

X, Y = np.ones((20, 4)), np.ones((20, 1))
DATASET = tf.data.Dataset.from_tensor_slices((X, Y))


def build(*middle):
    return keras.Sequential([keras.Input((4,)), *middle, layers.Dense(1)])


def said(caplog, model, *args, run_eagerly=False, **kwargs):
    """Returns the messages of a wrapper's first fit."""
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    caplog.clear()
    with caplog.at_level(logging.INFO, "keras_dp"):
        model.fit(*args, **kwargs)
    return [record.getMessage() for record in caplog.records if record.name == "keras_dp"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, None, None), "2 towers on CPU:0 and GPU:3; each tower takes its part of every batch"),
        ((1, [16, 17], None), "2 towers on CPU:0 and GPU:3; global batch 33, 16 or 17 rows a tower"),
        ((1, [16, 16], "local"), "2 towers on CPU:0 and GPU:3; global batch 32, 16 rows a tower; batch norm of each tower"),
        ((1, [9, 24], None), "2 towers on CPU:0 and GPU:3; global batch 33, 9 to 24 rows a tower"),
        ((3, [6] * 6, None), "3 workers, each with 2 towers on CPU:0 and GPU:3; global batch 36, 6 rows a tower"),
    ],
)
def test_the_line(arguments, expected):
    assert announcement.training(["CPU:0", "GPU:3"], *arguments) == expected


@pytest.mark.parametrize(
    ("data", "arguments", "rows"),
    [
        ((X, Y), {}, "; global batch 20, 10 rows a tower"),
        ((pd.DataFrame(X), pd.Series(Y[:, 0])), {"batch_size": 10}, "; global batch 10, 5 rows a tower"),
        ((DATASET.batch(5, drop_remainder=True),), {}, "; global batch 5, 2 or 3 rows a tower"),
        ((((X, Y) for _ in range(1)),), {"steps_per_epoch": 1}, "; each tower takes its part of every batch"),
    ],
    ids=["arrays", "pandas", "fixed", "generator"],
)
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_the_rows_of_a_batch_are_said_if_they_are_known(data, arguments, rows, caplog):
    (line,) = said(caplog, keras_dp.DataParallelModel(build(), devices=2), *data, verbose=2, **arguments)
    assert line == f"2 towers on CPU:0 and CPU:1{rows}"


def test_batch_normalization_is_said_if_there_is_one(caplog):
    parallel = keras_dp.DataParallelModel(build(layers.BatchNormalization()), devices=4, batch_norm="first")
    (line,) = said(caplog, parallel, X, Y, verbose=2)
    assert line == f"4 towers on CPU:0 to CPU:3; global batch 20, 5 rows a tower; {announcement.BATCH_NORM['first']}"


def test_nothing_is_said_of_towers_that_do_not_run(caplog):
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    assert not [message for message in said(caplog, parallel, X, Y, verbose=2, run_eagerly=True) if "2 towers" in message]


def test_repr_and_summary(capsys):
    parallel = keras_dp.DataParallelModel(build(), devices=["CPU:3", "CPU:1"])
    assert repr(parallel) == f"<DataParallelModel name={parallel.name}, built=True, 2 towers on CPU:3 and CPU:1>"
    lines, of_inner = [], []
    parallel.summary(print_fn=lines.append)
    parallel.inner_model.summary(print_fn=of_inner.append)
    assert lines == [*of_inner, " Devices: 2 towers on CPU:3 and CPU:1"]
    keras_dp.DataParallelModel(build(), devices=1).summary()
    assert capsys.readouterr().out.endswith(" Devices: 1 tower on CPU:0\n")


def weight(size, device="/job:localhost/replica:0/task:0/device:GPU:0", dtype="float32"):
    """Returns what stands for a weight on a GPU."""
    return types.SimpleNamespace(shape=(size,), dtype=dtype, value=types.SimpleNamespace(device=device))


@pytest.mark.parametrize(
    ("weights", "devices", "expected"),
    [
        ([weight(2**19), weight(2**19)], ["GPU:0", "GPU:1"], True),
        ([weight(2**20 - 1)], ["GPU:0", "GPU:1"], False),
        ([weight(2**20, dtype="int32")], ["GPU:0", "GPU:1"], False),
        ([weight(2**20)], ["GPU:0"], False),
        ([weight(2**20)], ["CPU:0", "CPU:1"], False),
        ([weight(2**20), weight(2**20, "/device:GPU:1")], ["GPU:0", "GPU:1"], False),
    ],
)
def test_large_variables_on_one_of_several_gpus_should_be_spread(weights, devices, expected):
    assert variable_homes.should_spread(types.SimpleNamespace(weights=weights), devices) is expected


def test_the_first_fit_says_where_large_variables_should_be(caplog, monkeypatch):
    monkeypatch.setattr(variable_homes, "are_gpus", lambda devices: True)
    monkeypatch.setattr(variable_homes, "SPREAD_FROM_BYTES", 20)
    messages = said(caplog, keras_dp.DataParallelModel(build(), devices=2), X, Y)
    assert 'parameter_device="sharded"' in messages[0]
    spread = keras_dp.DataParallelModel(build(layers.Dense(4)), devices=2, parameter_device="sharded")
    assert "sharded" not in said(caplog, spread, X, Y)[0]
    assert 'parameter_device="sharded"' not in str(spread.report())
