"""Momentum correction equals the reference update of Goyal et al. 2017, equation 9, in NumPy."""

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import SGD

import keras_dp
from keras_dp.large_batches import momentum_correction
from keras_dp.large_batches.momentum_correction import MomentumCorrection
from keras_dp.large_batches.warmup import LearningRateWarmup

X = np.sin(np.arange(32.0)).reshape(16, 2)
Y = np.cos(np.arange(16.0)).reshape(16, 1)
BATCH_SIZE = 4
MOMENTUM = 0.875  # Keras rounds it to float32, which would change 0.9
START = np.array([[0.3], [-0.2]])
RATES = [0.01, 0.01, 0.08, 0.05, 0.05, 0.2, 0.02, 0.02]
WARM = [0.01 + 0.07 * min(step / 6, 1) for step in range(8)]  # of a warmup of one and a half epochs
WARM_IN_AN_EPOCH = [0.01 + 0.07 * min(step / 4, 1) for step in range(8)]


def linear(weights=START):
    """Builds a linear map x w with known weights; `reference` computes its gradients."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    model.set_weights([weights])
    return model


def gradient(w, step):
    rows = slice(BATCH_SIZE * step % len(X), BATCH_SIZE * step % len(X) + BATCH_SIZE)
    return 2 / BATCH_SIZE * X[rows].T @ (X[rows] @ w - Y[rows])


def reference(rates, nesterov=False):
    """Returns the weights w after steps of u <- m u + g, w <- w - rate u; with Nesterov, w <- w - rate (g + m u)."""
    w, u = START, 0.0
    for step, rate in enumerate(rates):
        g = gradient(w, step)
        u = MOMENTUM * u + g
        w = w - rate * (g + MOMENTUM * u if nesterov else u)
    return w


class Rates(keras.callbacks.Callback):
    def __init__(self, rates):
        super().__init__()
        self.rates = list(rates)

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = self.rates.pop(0)


def schedule(rates):
    return keras.optimizers.schedules.PiecewiseConstantDecay(list(range(len(rates) - 1)), list(rates))


def compiled(optimizer=None, model=None, **arguments):
    """Returns a compiled model, which is wrapped if there are arguments for it."""
    model = model or linear()
    model = keras_dp.DataParallelModel(model, **arguments) if arguments else model
    model.compile(optimizer or SGD(1.0, MOMENTUM), "mse")
    return model


def fit(model, *callbacks, epochs=2):
    model.fit(X, Y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()[0]


def scaled():
    return keras.optimizers.LossScaleOptimizer(SGD(1.0, MOMENTUM), initial_scale=4.0)


@pytest.mark.parametrize(
    ("optimizer", "callbacks", "arguments", "expected"),
    [
        (None, lambda: [Rates(RATES)], {"devices": 3}, reference(RATES)),
        (lambda: SGD(schedule(RATES), MOMENTUM, nesterov=True), list, {}, reference(RATES, nesterov=True)),
        (None, lambda: [LearningRateWarmup(0.01, 8, warmup_epochs=1.5)], {"devices": 2}, reference(WARM)),
        (scaled, lambda: [Rates(RATES)], {"devices": 2, "parameter_device": "sharded"}, reference(RATES)),
    ],
    ids=["by a callback", "by a schedule, with Nesterov", "with a warmup, once", "with loss scaling, sharded"],
)
def test_corrected_sgd_is_the_reference(optimizer, callbacks, arguments, expected):
    model = compiled(optimizer and optimizer(), **arguments)
    np.testing.assert_allclose(fit(model, *callbacks(), MomentumCorrection()), expected, atol=1e-12)


def test_the_warmup_corrects_by_itself_and_can_leave_the_velocity_alone():
    np.testing.assert_allclose(fit(compiled(), LearningRateWarmup(0.01, 8, 1.5)), reference(WARM), atol=1e-12)
    alone = fit(compiled(), LearningRateWarmup(0.01, 8, 1.5, momentum_correction=False))
    np.testing.assert_allclose(alone, fit(compiled(), Rates(WARM)), atol=1e-12)
    assert np.abs(alone - reference(WARM)).max() > 1e-3


same_rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.02)


@pytest.mark.parametrize(
    ("rate", "callbacks", "arguments", "expected"),
    [
        (1.0, lambda backup: [LearningRateWarmup(0.01, 8, 1.5), backup], {"devices": 2}, WARM),
        (1.0, lambda backup: [backup, LearningRateWarmup(0.01, 8, 1)], {}, WARM_IN_AN_EPOCH),
        (schedule(WARM), lambda backup: [MomentumCorrection(), backup], {}, WARM),
        (1.0, lambda backup: [same_rate, backup, MomentumCorrection()], {}, [0.02] * 8),
        (1.0, lambda backup: [MomentumCorrection(), backup, same_rate], {}, [0.02] * 8),
    ],
    ids=["in a warmup", "where a warmup ends", "by a schedule", "at the same rate", "in another order"],
)
def test_training_that_is_resumed_corrects_its_first_step(rate, callbacks, arguments, expected, tmp_path):
    """Training ends after its first epoch, and a new model goes on from a backup."""
    for epochs in (1, 2):
        model = compiled(SGD(rate, MOMENTUM), **arguments)
        weights = fit(model, *callbacks(keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)), epochs=epochs)
    assert model.history.epoch == [1]
    np.testing.assert_allclose(weights, reference(expected), atol=1e-12)


def test_a_rate_that_changes_between_two_fits():
    model = compiled(SGD(0.02, MOMENTUM), devices=2)
    fit(model, MomentumCorrection(), epochs=1)
    model.optimizer.learning_rate = 0.005
    weights = fit(model, MomentumCorrection(), epochs=1)
    np.testing.assert_allclose(weights, reference([0.02] * 4 + [0.005] * 4), atol=1e-12)


def test_a_rate_of_zero_forgets_the_velocity():
    model = compiled()
    before = fit(model, Rates([0.0125] * 3 + [0.0]), MomentumCorrection(), epochs=1)
    assert not model.optimizer.momentums[0].numpy().any()
    anew = fit(compiled(SGD(0.125, MOMENTUM), linear(before)), epochs=1)
    np.testing.assert_allclose(fit(model, Rates([0.125] * 4), MomentumCorrection(), epochs=1), anew, atol=1e-12)


def test_rmsprop_with_momentum_is_corrected():
    """Its velocity sums rate g / sqrt(v), and is compared with one that sums g / sqrt(v)."""
    model = compiled(keras.optimizers.RMSprop(1.0, rho=0.9, momentum=0.9, epsilon=1e-7))
    w, u, squares = START, 0, 0
    for step, rate in enumerate(RATES):
        g = gradient(w, step)
        squares = 0.9 * squares + 0.1 * g**2
        u = 0.9 * u + g / np.sqrt(squares + 1e-7)
        w = w - rate * u
    np.testing.assert_allclose(fit(model, Rates(RATES), MomentumCorrection()), w, atol=1e-12)


def test_each_of_several_optimizers_has_its_velocity():
    """Two kernels share each gradient, and have other rates."""
    inputs, rates = keras.Input((2,)), [RATES, RATES[::-1]]
    parts = [layers.Dense(1, use_bias=False, name=name) for name in ("left", "right")]
    model = keras.Model(inputs, parts[0](inputs) + parts[1](inputs))
    left, right = (SGD(schedule(of_part), MOMENTUM) for of_part in rates)
    compiled(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(left, {".*right/.*": right})), model)
    w, u = [part.get_weights()[0] for part in parts], [0.0, 0.0]
    fit(model, MomentumCorrection())
    for step, of_step in enumerate(zip(*rates, strict=True)):
        g = gradient(sum(w), step)
        u = [MOMENTUM * velocity + g for velocity in u]
        w = [weight - rate * velocity for weight, rate, velocity in zip(w, of_step, u, strict=True)]
    for part, expected in zip(parts, w, strict=True):
        np.testing.assert_allclose(part.get_weights()[0], expected, atol=1e-12)


def test_velocities_of_16_bits_follow_small_changes():
    keras.config.set_floatx("float16")
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    (velocity,) = model.optimizer.momentums
    velocity.assign(np.full((2, 1), 1000.0))
    momentum_correction.Velocity.of(model.optimizer).follow(1.0005, lambda: 1.0)
    # float16 rounds 1.0005 to 1.0, but can represent 1000.5.
    np.testing.assert_array_equal(velocity.numpy(), np.full((2, 1), 1000.5))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (keras.optimizers.Adam, "Adam keeps no velocity that the learning rate is part of"),
        (SGD, "SGD was made without momentum"),
    ],
)
def test_it_says_why_it_does_nothing(optimizer, reason):
    expected = fit(compiled(optimizer(0.1)), Rates(RATES))
    with pytest.warns(UserWarning, match=f"MomentumCorrection does nothing: {reason}"):
        received = fit(compiled(optimizer(0.1)), Rates(RATES), MomentumCorrection())
    np.testing.assert_array_equal(expected, received)


def test_steps_that_run_together_with_a_schedule_are_refused():
    model = linear()
    model.compile(SGD(schedule(RATES), MOMENTUM), "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="cannot correct between steps that are executed together"):
        fit(model, MomentumCorrection())
