"""Random small models on random batches give the results of plain Keras on one device, in float64."""

import keras
import numpy as np
import pytest
from comparison import assert_same, twins, values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers

import keras_dp

# No deadline: an example traces two models. No shrinking: it takes minutes, and tells no more than the failed example.
whole_trainings = settings(
    deadline=None, database=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01, weight_decay=0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}
# Blocks in front of the head, for inputs of the shape (steps, channels).
BLOCKS = {
    "dense": lambda: layers.Dense(3, "tanh"),
    "regularized": lambda: layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l1"),
    "batch norm": lambda: layers.BatchNormalization(momentum=0.7),
    "renormalizing": lambda: layers.BatchNormalization(renorm=True),
    "layer norm": lambda: layers.LayerNormalization(),
    "convolution": lambda: layers.Conv1D(3, 2, padding="same"),
    "gru": lambda: layers.GRU(2, return_sequences=True),
    "bidirectional": lambda: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(3)),
}
MASKING = {"batch norm", "dense", "gru", "bidirectional", "layer norm"}
HEADS = {"each step": lambda: layers.Identity(), "pooled": layers.GlobalAveragePooling1D}
LOSSES = {
    "mse": lambda: keras.losses.MeanSquaredError(),
    "huber": lambda: keras.losses.Huber(0.3, reduction="sum"),
    "weighted mean": lambda: keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    "couples rows": lambda: lambda y_true, y_pred: keras.ops.sqrt(keras.ops.mean((y_true - y_pred) ** 2)),
}


@st.composite
def experiments(draw, loss):
    """Draws the settings of one training."""
    is_masked = draw(st.booleans())
    names = sorted(MASKING) if is_masked else sorted(BLOCKS)
    rows = draw(st.integers(1, 21))
    return {
        "is_masked": is_masked,
        "blocks": draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)),
        "head": draw(st.sampled_from(sorted(HEADS))),
        "loss": loss,
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "rows": rows,
        "batch_size": draw(st.integers(1, rows)),
        "num_towers": draw(st.integers(1, 4)),
        "is_weighted": loss != "couples rows" and draw(st.booleans()),
        "parameter_device": draw(st.sampled_from([None, "sharded"])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("loss", LOSSES)
@settings(whole_trainings, max_examples=10, derandomize=True)
@given(data=st.data())
def test_random_models_on_random_batches(loss, data):
    assert_one_devices_result(data.draw(experiments(loss)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loss", LOSSES)
@settings(whole_trainings, max_examples=75)
@given(data=st.data())
def test_many_random_models_on_random_batches(loss, data):
    """Each run draws different models."""
    assert_one_devices_result(data.draw(experiments(loss)))


def assert_one_devices_result(experiment):
    keras.config.set_floatx("float64")
    rng = np.random.default_rng(experiment["seed"])
    rows = experiment["rows"]
    x = rng.normal(size=(rows, 4, 2))
    if experiment["is_masked"]:
        x[np.arange(4) >= rng.integers(0, 5, rows)[:, None]] = 0.0
    y = rng.normal(size=(rows, 4, 2) if experiment["head"] == "each step" else (rows, 2))
    weights = rng.uniform(size=y.shape[:-1]) * (rng.uniform(size=y.shape[:-1]) > 0.3) if experiment["is_weighted"] else None

    def build():
        hidden = [BLOCKS[name]() for name in experiment["blocks"]]
        masking = [layers.Masking()] if experiment["is_masked"] else []
        return keras.Sequential([keras.Input((4, 2)), *masking, *hidden, HEADS[experiment["head"]](), layers.Dense(2)])

    one, inner = twins(build)
    wrapper = keras_dp.DataParallelModel(
        inner, devices=experiment["num_towers"], parameter_device=experiment["parameter_device"]
    )
    results = []
    for model in (one, wrapper):
        optimizer, loss = OPTIMIZERS[experiment["optimizer"]](), LOSSES[experiment["loss"]]()
        model.compile(optimizer, loss, metrics=["mae"], weighted_metrics=["mse"])
        arguments = {"sample_weight": weights, "batch_size": experiment["batch_size"], "verbose": 0}
        results.append(model.fit(x, y, epochs=2, shuffle=False, **arguments).history)
    assert_same(*results, 1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9, "weights")
    assert_same(values(one.optimizer), values(inner.optimizer), 1e-9, "optimizer")
