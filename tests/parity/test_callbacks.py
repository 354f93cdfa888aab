"""Callbacks of keras_dp log the wait for input, and warm the learning rate up."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers

import keras_dp
from keras_dp.batches import input_wait
from keras_dp.batches.waiting import Waiting
from keras_dp.large_batches.warmup import LearningRateWarmup

X, Y = np.ones((12, 4)), np.ones((12, 2))


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def compiled(num_towers, optimizer=None, **arguments):
    model = build()
    if num_towers:
        model = keras_dp.DataParallelModel(model, devices=num_towers)
    model.compile(optimizer or keras.optimizers.SGD(1.0, momentum=0.9), "mse", **arguments)
    return model


def wait(x):
    time.sleep(0.3)
    return x


def slow():
    """Returns a dataset that takes 0.3 seconds for each batch."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return dataset.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float64), (None, 4)), y))


def waits(model, x, y=None, callbacks=(), **arguments):
    """Fits, and returns the share of waiting in each epoch."""
    callbacks = [keras_dp.callbacks.InputWait(), *callbacks]
    arguments = {"epochs": 2, "verbose": 0, "shuffle": False, **arguments}
    return model.fit(x, y, callbacks=callbacks, **arguments).history["input_wait"]


def test_input_wait_is_the_share_of_the_time_that_steps_wait_for_slices():
    parallel = compiled(2, "sgd")
    assert "input_wait" not in parallel.fit(X, Y, verbose=0).history
    starved = waits(parallel, slow())
    fed = waits(parallel, X, Y, batch_size=1)
    assert min(starved) > 0.3
    assert 0 <= fed[-1] < min(starved)
    assert "input_wait" not in parallel.fit(X, Y, verbose=0).history


def test_on_gpus_nothing_is_measured_unless_the_callback_asks():
    parallel = compiled(2, "sgd")
    parallel.distribute_strategy.waiting = Waiting(is_costly=True)  # as if all devices were GPUs
    seconds = parallel.distribute_strategy.waiting.seconds
    parallel.fit(X, Y, verbose=0)
    assert seconds.numpy() == 0
    assert waits(parallel, slow())[0] > 0
    before = seconds.numpy()
    parallel.fit(X, Y, verbose=0)
    assert seconds.numpy() == before


def test_tracing_and_what_callbacks_call_are_no_wait():
    """The data are in memory: next to the first trace and to what a callback does, nothing is waited for."""

    class Calls(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.2)
            self.model.predict(X, verbose=0)
            self.model.evaluate(X, Y, verbose=0)

    data = tf.data.Dataset.from_tensors((X, Y)).cache().repeat(10)
    measured = waits(compiled(2, "sgd", steps_per_execution=5), data, callbacks=[Calls()], validation_data=(X, Y))
    assert len(measured) == 2
    assert max(measured) < 0.3


def test_input_wait_refuses_plain_models_and_op_determinism(monkeypatch):
    """TensorFlow has no public way to end its op determinism."""
    with pytest.raises(ValueError, match="measures the towers of a DataParallelModel"):
        waits(compiled(None), X, Y)
    monkeypatch.setattr(input_wait, "op_determinism_is_on", lambda: True)
    with pytest.raises(ValueError, match="refuses after tf.config.experimental.enable_op_determinism"):
        waits(compiled(2), X, Y)


def ramp(base, scale, warmup_steps, steps):
    """Returns the rates of Goyal et al. 2017, section 2.2: equal increments at each step, from the base to the scaled rate."""
    return base * np.interp(np.arange(steps), [0, warmup_steps], [1, scale]) if warmup_steps else np.full(steps, scale * base)


def rates_of(model, callbacks, data=(X, Y), **arguments):
    """Fits with three steps in an epoch, and returns the rates of all steps and the history."""
    rates = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    arguments = {"batch_size": 4, "epochs": 5, "verbose": 0, "shuffle": False, "callbacks": [*callbacks, watch], **arguments}
    return rates, model.fit(*data, **arguments).history


def assert_ramp(warmup_epochs=2, num_towers=2, initial_epoch=0, steps_per_execution=1, accumulating=False):
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=3) if accumulating else None
    model = compiled(num_towers, optimizer, steps_per_execution=steps_per_execution)
    rates, history = rates_of(model, [LearningRateWarmup(0.01, 8, warmup_epochs)], initial_epoch=initial_epoch)
    expected = ramp(0.01, 8, 3 * warmup_epochs, 15)[3 * initial_epoch :]
    are_first = np.arange(len(expected)) % 3 % steps_per_execution == 0
    np.testing.assert_allclose(rates, expected[are_first], rtol=1e-12)
    np.testing.assert_allclose(history["learning_rate"], expected[2::3], rtol=1e-12)


WARMUPS = {
    "ends within an epoch": {"warmup_epochs": 2.5},
    "has no epochs, without towers": {"warmup_epochs": 0, "num_towers": None},
    # The rate of a new optimizer is ignored, as after `load_weights` of the weights alone.
    "starts in its middle with a new optimizer": {"initial_epoch": 1},
    "is over with a new optimizer": {"initial_epoch": 3},
    "counts the batches that Adam accumulates": {"accumulating": True},
    "sets the rate of the first of the steps that run together": {"steps_per_execution": 2},
}


@pytest.mark.parametrize("name", WARMUPS)
def test_warmup_ramps_at_every_step_and_logs_the_rate(name):
    assert_ramp(**WARMUPS[name])


def test_the_callback_is_the_schedule():
    model = compiled(2, keras.optimizers.SGD(keras_dp.schedules.WarmupThen(0.01, 8, 6), momentum=0.9))
    one = compiled(2)
    one.set_weights(model.get_weights())
    rates_of(one, [LearningRateWarmup(0.01, 8, 2, momentum_correction=False)])
    rates_of(model, [])
    assert_same(one.get_weights(), model.get_weights(), 1e-9)


@pytest.mark.parametrize("place", [0, 1])
def test_a_rate_that_plateaus_lower_stays_lower(place):
    callbacks = [LearningRateWarmup(0.01, 8, 3)]
    callbacks.insert(place, keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9))
    rates, _ = rates_of(compiled(2), callbacks)
    # The first epoch improves on infinity; each later epoch halves the rate.
    np.testing.assert_allclose(rates, ramp(0.01, 8, 9, 15) * np.repeat([1, 1, 0.5, 0.25, 0.125], 3), rtol=1e-6)


@pytest.mark.parametrize(("place", "epoch", "rate"), [(0, 2, 0.16), (1, 3, 0.008)])
def test_a_scheduler_takes_over_after_the_warmup(place, epoch, rate):
    callbacks = [LearningRateWarmup(0.01, 8, 2)]
    callbacks.insert(place, keras.callbacks.LearningRateScheduler(lambda now: 0.08 if now < epoch else rate))
    rates, _ = rates_of(compiled(2), callbacks)
    np.testing.assert_allclose(rates, [*ramp(0.01, 8, 6, 3 * epoch), *[rate] * (15 - 3 * epoch)], rtol=1e-9)


def test_the_rate_before_the_warmup_says_nothing():
    """After a single step before `fit`, the optimizer's initial rate was mistaken for a rate that a plateau had lowered."""
    model = compiled(2, keras.optimizers.SGD(0.01, momentum=0.9))
    model.train_on_batch(X[:1], Y[:1])
    rates, _ = rates_of(model, [LearningRateWarmup(0.1, 8, 2)])
    np.testing.assert_allclose(rates, ramp(0.1, 8, 6, 16)[1:], rtol=1e-12)


def test_rounding_does_not_lower_the_rate():
    keras.config.set_floatx("bfloat16")
    rates, _ = rates_of(compiled(None), [LearningRateWarmup(0.01, 8, 40)], epochs=42)
    np.testing.assert_allclose(rates, ramp(0.01, 8, 120, 126), rtol=0.01)


def test_an_optimizer_that_is_warm_is_said_to_be(caplog):
    model = compiled(2)
    rates_of(model, [LearningRateWarmup(0.01, 8, 1)], epochs=2)
    assert "LearningRateWarmup" not in caplog.text
    rates, _ = rates_of(model, [LearningRateWarmup(0.001, 4, 1)], epochs=2)
    np.testing.assert_allclose(rates, 0.08, rtol=1e-12)
    assert "has seen 6 batches already, so that the warm-up of 3 steps is over" in caplog.text
    assert "new optimizer to warm up again" in caplog.text


@pytest.mark.parametrize(("by", "num_towers"), [("backup", 2), ("fit", None)])
def test_warmup_resumes_in_the_middle(tmp_path, caplog, num_towers, by):
    """The reduction by a plateau is kept, although a checkpoint holds only the rate and the iterations."""
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9, cooldown=9)
    backup = [keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)] if by == "backup" else []
    unbroken = compiled(num_towers)
    weights = unbroken.get_weights()
    expected, _ = rates_of(unbroken, [LearningRateWarmup(0.01, 8, 4), plateau])
    broken = compiled(num_towers)
    broken.set_weights(weights)
    begun, _ = rates_of(broken, [LearningRateWarmup(0.01, 8, 4), plateau, *backup], epochs=3)
    np.testing.assert_allclose(begun, expected[:9], rtol=1e-12)
    resuming = compiled(num_towers) if by == "backup" else broken
    caplog.clear()
    resumed, _ = rates_of(resuming, [LearningRateWarmup(0.01, 8, 4), *backup], initial_epoch=0 if by == "backup" else 3)
    assert "resumes at step 9 with the rate 0.0" in caplog.text
    np.testing.assert_allclose(resumed, expected[9:], rtol=1e-6)
    assert_same(unbroken.get_weights(), resuming.get_weights(), 1e-5)


def test_warmup_resumes_where_steps_run_together():
    model = compiled(2, steps_per_execution=2)
    rates_of(model, [LearningRateWarmup(0.01, 8, 2)], epochs=1)
    model.optimizer.learning_rate = float(model.optimizer.learning_rate) * 0.5
    rates, _ = rates_of(model, [LearningRateWarmup(0.01, 8, 2)], initial_epoch=1)
    np.testing.assert_allclose(rates, 0.5 * ramp(0.01, 8, 6, 15)[3:][np.arange(12) % 3 != 1], rtol=1e-12)


def test_warmup_with_mixed_precision():
    keras.config.set_floatx("float32")
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = compiled(2)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    assert isinstance(model.inner_model.optimizer, keras.optimizers.LossScaleOptimizer)
    rates, _ = rates_of(model, [LearningRateWarmup(0.01, 8, 2), keras_dp.callbacks.MomentumCorrection()])
    # The first steps overflow, so that the optimizer does not count them; the epochs do.
    np.testing.assert_allclose(rates, ramp(0.01, 8, 6, 15), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_of_unknown_length_needs_the_number_of_steps():
    """A CallbackList that begins by itself does not know it either."""
    model = compiled(2)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).filter(lambda x, y: True)
    with pytest.raises(ValueError, match="does not know how many steps an epoch has"):
        rates_of(model, [LearningRateWarmup(0.01, 8, 2)], [data], batch_size=None)
    with pytest.raises(ValueError, match="does not know how many steps an epoch has"):
        keras.callbacks.CallbackList([LearningRateWarmup(0.01, 8, 2)], model=model).on_train_begin()
    rates, _ = rates_of(model, [LearningRateWarmup(0.01, 8, 2, steps_per_epoch=3)], [data], batch_size=None, epochs=1)
    np.testing.assert_allclose(rates, ramp(0.01, 8, 6, 3), rtol=1e-12)


def test_warmup_does_not_set_the_rate_of_a_schedule():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    with pytest.raises(ValueError, match=r"Wrap each schedule: keras_dp.schedules.WarmupThen\(schedule, scale, warmup_steps"):
        rates_of(compiled(2, keras.optimizers.SGD(schedule)), [LearningRateWarmup(0.01, 8, 2)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "`base_learning_rate` must be a positive number. Received: base_learning_rate=0"),
        ((0.1, -1), "`scale` must be a positive number. Received: scale=-1"),
        ((0.1, 8, -1), "`warmup_epochs` must be a number, 0 or more. Received: warmup_epochs=-1"),
        ((0.1, 8, 5, 0), "`steps_per_epoch` must be a positive number. Received: steps_per_epoch=0"),
    ],
)
def test_bad_arguments_of_the_warmup(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearningRateWarmup(*arguments)
