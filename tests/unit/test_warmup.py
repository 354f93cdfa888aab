"""WarmupThen has the rates that NumPy computes, in optimizers, on towers and in saved models."""

import keras
import numpy as np
import pytest
from comparison import largest_difference, twins
from keras import layers

import keras_dp
from keras_dp.large_batches.warmup import WarmupThen

X = np.sin(np.arange(40.0)).reshape(10, 4)
Y = np.cos(np.arange(20.0)).reshape(10, 2)


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), layers.Dense(2)])


def warmed_up(schedule, scale, warmup_steps, steps):
    """Returns the rates of Goyal et al. 2017, section 2.2: equal increments to the scaled rate, then k times the schedule."""
    start, end = schedule(0), scale * schedule(warmup_steps)
    increment = (end - start) / max(warmup_steps, 1)
    return [start + step * increment if step < warmup_steps else scale * schedule(step) for step in range(steps)]


@pytest.mark.parametrize(("scale", "warmup_steps"), [(8, 0), (1, 1), (0.5, 5), (8, 100)])
def test_constant_rate(scale, warmup_steps):
    assert_rates(WarmupThen(0.1, scale, warmup_steps), warmed_up(lambda step: 0.1, scale, warmup_steps, 14))


def assert_rates(schedule, expected):
    np.testing.assert_allclose([float(schedule(step)) for step in range(14)], expected, rtol=1e-12)


@pytest.mark.parametrize(
    "schedule",
    [
        keras.optimizers.schedules.CosineDecay(0.1, 12),
        keras.optimizers.schedules.PiecewiseConstantDecay([6, 9], [0.1, 0.01, 0.001]),
        WarmupThen(0.1, 2, 3),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_keras_schedules(schedule):
    schedule = type(schedule).from_config(schedule.get_config())
    expected = warmed_up(lambda step: float(schedule(step)), 4, 5, 14)
    composed = WarmupThen(schedule, 4, 5)
    assert_rates(composed, expected)
    assert_rates(keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(composed)), expected)


def test_saved_in_mid_warmup_it_goes_on_where_it_was(tmp_path):
    """On towers, it goes on as it does unbroken on one device."""
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0}
    unbroken, broken = twins(build)
    broken = keras_dp.DataParallelModel(broken, devices=2)
    for model, epochs in ((unbroken, 4), (broken, 2)):
        model.compile(keras.optimizers.SGD(WarmupThen(0.01, 8, 9), momentum=0.9), "mse")
        model.fit(X, Y, epochs=epochs, **arguments)
    broken.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.01 + 0.07 * 6 / 9)
    resumed = keras_dp.DataParallelModel(resumed, devices=2)
    resumed.fit(X, Y, initial_epoch=2, epochs=4, **arguments)
    assert largest_difference(unbroken, resumed) < 1e-9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.1, 0, 5), "`scale` must be a positive number. Received: scale=0"),
        ((0.1, "8", 5), "`scale` must be a positive number. Received: scale='8'"),
        ((0.1, 8, -1), "`warmup_steps` must be a number, 0 or more. Received: warmup_steps=-1"),
        ((0.1, 8, 0.9), "`warmup_steps` must be a whole number. Received: warmup_steps=0.9"),
        (("cosine", 8, 5), "`schedule` must be a LearningRateSchedule or a positive number. Received: schedule='cosine'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupThen(*arguments)
