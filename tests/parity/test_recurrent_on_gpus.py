"""On GPUs, Keras computes LSTM and GRU with cuDNN. These layers stay on the towers."""

import importlib

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp

TIME, UNITS = 4, 3


@pytest.fixture
def with_cudnn(monkeypatch):
    """Makes Keras trace cuDNN's operations, which only GPUs can run."""
    rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    keras.config.set_floatx("float32")


def bidirectional(units, **options):
    return layers.Bidirectional(layers.LSTM(units, **options))


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize(
    ("build", "options", "masked"),
    [
        (layers.LSTM, {"return_sequences": True}, True),
        (layers.GRU, {"go_backwards": True}, False),
        (bidirectional, {"return_sequences": True}, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_towers_gather_no_rows(build, options, masked):
    first = [layers.Masking()] if masked else []
    model = keras.Sequential([keras.Input((TIME, UNITS)), *first, build(UNITS, **options), layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model, devices=3)
    parallel.compile("sgd", "mse")
    steps, x = parallel.tower_steps, np.ones((6, TIME, UNITS), "float32")
    batch = x, np.zeros((6, *model.output_shape[1:]), "float32")
    partition = steps.trace("train", steps.slices_of(batch)).partition()
    kinds = [node.op for node in partition.traced.nodes]
    assert kinds.count("CudnnRNNV3") == kinds.count("CudnnRNNBackpropV3") == (2 if build is bidirectional else 1)
    assert not partition.gathered
