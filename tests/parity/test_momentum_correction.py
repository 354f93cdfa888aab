"""Momentum correction equals the reference update of Goyal et al. 2017, equation 9, in NumPy."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp
from keras_dp.large_batches import momentum_correction
from keras_dp.large_batches.momentum_correction import MomentumCorrection
from keras_dp.large_batches.warmup import LearningRateWarmup

X = np.sin(np.arange(32.0)).reshape(16, 2)
Y = np.cos(np.arange(16.0)).reshape(16, 1)
BATCH_SIZE = 4
MOMENTUM = 0.875  # Keras rounds it to float32, which would change 0.9
RATES = [0.01, 0.01, 0.08, 0.05, 0.05, 0.2, 0.02, 0.02]
WARM = [0.01 + 0.07 * min(step / 6, 1) for step in range(8)]  # of a warmup of one and a half epochs


def linear():
    """Builds a linear map x w with known weights; `reference` computes its gradients."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[0.3], [-0.2]])])
    return model


def gradient(w, step):
    """Returns the gradient of the loss of the batch of a step."""
    rows = slice(BATCH_SIZE * step % len(X), BATCH_SIZE * step % len(X) + BATCH_SIZE)
    return 2 / BATCH_SIZE * X[rows].T @ (X[rows] @ w - Y[rows])


def reference(rates, nesterov=False):
    """Returns the weights w after steps of u <- m u + g, w <- w - rate u; with Nesterov, w <- w - rate (g + m u)."""
    w, u = np.array([[0.3], [-0.2]]), 0.0
    for step, rate in enumerate(rates):
        g = gradient(w, step)
        u = MOMENTUM * u + g
        w = w - rate * (g + MOMENTUM * u if nesterov else u)
    return w


class Rates(keras.callbacks.Callback):
    """Sets the rate of each step."""

    def __init__(self, rates):
        super().__init__()
        self.rates = list(rates)

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = self.rates.pop(0)


class Steps(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def __call__(self, step):
        return keras.ops.take(keras.ops.convert_to_tensor(self.rates, "float64"), keras.ops.cast(step, "int32"))

    def get_config(self):
        return {"rates": self.rates}


def wrapped(model, num_towers):
    return keras_dp.DataParallelModel(model, devices=num_towers) if num_towers else model


def fit(model, callbacks, epochs=2, **arguments):
    return model.fit(X, Y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **arguments)


@pytest.mark.parametrize(("by", "nesterov", "num_towers"), [("callback", False, 3), ("schedule", True, None)])
def test_corrected_sgd_is_the_reference(by, nesterov, num_towers):
    model = wrapped(linear(), num_towers)
    rate = Steps([*RATES, 0.0]) if by == "schedule" else 1.0
    model.compile(keras.optimizers.SGD(rate, MOMENTUM, nesterov), "mse")
    fit(model, [*([Rates(RATES)] if by == "callback" else []), MomentumCorrection()])
    np.testing.assert_allclose(model.get_weights()[0], reference(RATES, nesterov), atol=1e-12)


def test_without_correction_it_is_not():
    model = linear()
    model.compile(keras.optimizers.SGD(1.0, MOMENTUM), "mse")
    fit(model, [Rates(RATES)])
    assert np.abs(model.get_weights()[0] - reference(RATES)).max() > 1e-3


@pytest.mark.parametrize(("num_towers", "with_separate_callback"), [(None, False), (2, True)])
def test_the_warmup_corrects_by_itself_and_once(num_towers, with_separate_callback):
    model = wrapped(linear(), num_towers)
    model.compile(keras.optimizers.SGD(1.0, MOMENTUM), "mse")
    warmup = LearningRateWarmup(0.01, 8, warmup_epochs=1.5)
    fit(model, [warmup, MomentumCorrection()] if with_separate_callback else [warmup])
    np.testing.assert_allclose(model.get_weights()[0], reference(WARM), atol=1e-12)


def test_the_warmup_can_leave_the_velocity_alone():
    weights = []
    for callback in (LearningRateWarmup(0.01, 8, 1.5, momentum_correction=False), Rates(WARM)):
        model = linear()
        model.compile(keras.optimizers.SGD(1.0, MOMENTUM), "mse")
        fit(model, [callback])
        weights.append(model.get_weights()[0])
    np.testing.assert_allclose(*weights, atol=1e-12)
    assert np.abs(weights[0] - reference(WARM)).max() > 1e-3


def resumed(tmp_path, make_callbacks, rate=1.0, num_towers=None):
    """Returns the weights after a training that is interrupted after its first epoch, and restored by a new model.

    Args:
        tmp_path: a folder.
        make_callbacks: a function that takes a backup, and returns all callbacks in their order.
        rate: the learning rate, or a schedule.
        num_towers: the number of towers; None for the plain model.
    """
    for epochs in (1, 2):
        model = wrapped(linear(), num_towers)
        model.compile(keras.optimizers.SGD(rate, MOMENTUM), "mse")
        backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        history = fit(model, make_callbacks(backup), epochs=epochs)
    assert history.epoch == [1]
    return model.get_weights()[0]


def test_training_that_is_resumed_corrects_its_first_step(tmp_path):
    by_warmup = resumed(tmp_path / "a", lambda backup: [LearningRateWarmup(0.01, 8, 1.5), backup], num_towers=2)
    np.testing.assert_allclose(by_warmup, reference(WARM), atol=1e-12)
    by_schedule = resumed(tmp_path / "b", lambda backup: [MomentumCorrection(), backup], Steps([*WARM, 0.0]))
    np.testing.assert_allclose(by_schedule, reference(WARM), atol=1e-12)


def test_rmsprop_with_momentum_is_corrected():
    """Its velocity sums rate g / sqrt(v), and is compared with one that sums g / sqrt(v)."""
    model = linear()
    model.compile(keras.optimizers.RMSprop(1.0, rho=0.9, momentum=0.9, epsilon=1e-7), "mse")
    fit(model, [Rates(RATES), MomentumCorrection()])
    w, u, squares = np.array([[0.3], [-0.2]]), 0, 0
    for step, rate in enumerate(RATES):
        g = gradient(w, step)
        squares = 0.9 * squares + 0.1 * g**2
        u = 0.9 * u + g / np.sqrt(squares + 1e-7)
        w = w - rate * u
    np.testing.assert_allclose(model.get_weights()[0], w, atol=1e-12)


def test_through_loss_scaling_and_sharded_variables():
    model = keras_dp.DataParallelModel(linear(), devices=2, parameter_device="sharded")
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, MOMENTUM), initial_scale=4.0), "mse")
    fit(model, [Rates(RATES), MomentumCorrection()])
    np.testing.assert_allclose(model.get_weights()[0], reference(RATES), atol=1e-12)


def test_each_of_several_optimizers_has_its_velocity():
    """Two kernels share each gradient, and have other rates."""
    inputs, rates = keras.Input((2,)), [RATES, RATES[::-1]]
    parts = [layers.Dense(1, use_bias=False, name=name) for name in ("left", "right")]
    model = keras.Model(inputs, parts[0](inputs) + parts[1](inputs))
    left, right = (keras.optimizers.SGD(Steps([*of_part, 0.0]), MOMENTUM) for of_part in rates)
    model.compile(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(left, {".*right/.*": right})), "mse")
    w, u = [part.get_weights()[0] for part in parts], [0.0, 0.0]
    fit(model, [MomentumCorrection()])
    for step, of_step in enumerate(zip(*rates, strict=True)):
        g = gradient(sum(w), step)
        u = [MOMENTUM * velocity + g for velocity in u]
        w = [weight - rate * velocity for weight, rate, velocity in zip(w, of_step, u, strict=True)]
    for part, expected in zip(parts, w, strict=True):
        np.testing.assert_allclose(part.get_weights()[0], expected, atol=1e-12)


def test_a_rate_of_zero_forgets_the_velocity():
    model = linear()
    model.compile(keras.optimizers.SGD(1.0, MOMENTUM), "mse")
    fit(model, [Rates([0.0125] * 3 + [0.0]), MomentumCorrection()], epochs=1)
    assert not model.optimizer.momentums[0].numpy().any()
    before = model.get_weights()[0]
    fit(model, [Rates([0.125] * 4), MomentumCorrection()], epochs=1)
    anew = linear()
    anew.set_weights([before])
    anew.compile(keras.optimizers.SGD(0.125, MOMENTUM), "mse")
    fit(anew, [], epochs=1)
    np.testing.assert_allclose(model.get_weights()[0], anew.get_weights()[0], atol=1e-12)


def test_a_rate_that_changes_between_two_fits():
    model = wrapped(linear(), 2)
    model.compile(keras.optimizers.SGD(0.02, MOMENTUM), "mse")
    fit(model, [MomentumCorrection()], epochs=1)
    model.optimizer.learning_rate = 0.005
    fit(model, [MomentumCorrection()], epochs=1)
    np.testing.assert_allclose(model.get_weights()[0], reference([0.02] * 4 + [0.005] * 4), atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_resumed_with_a_rate_that_does_not_change_nothing_is_corrected(tmp_path, order):
    def callbacks(backup):
        made = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.02), backup, MomentumCorrection()]
        return [made[place] for place in order]

    np.testing.assert_allclose(resumed(tmp_path, callbacks), reference([0.02] * 8), atol=1e-12)


def test_resumed_where_the_warmup_ends(tmp_path):
    weights = resumed(tmp_path, lambda backup: [backup, LearningRateWarmup(0.01, 8, 1)])
    np.testing.assert_allclose(weights, reference([0.01 + 0.07 * min(step / 4, 1) for step in range(8)]), atol=1e-12)


def test_velocities_of_16_bits_follow_small_changes():
    keras.config.set_floatx("float16")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0, MOMENTUM), "mse")
    model.optimizer.build(model.trainable_variables)
    (velocity,) = model.optimizer.momentums
    velocity.assign(np.full((2, 1), 1000.0))
    follower = momentum_correction.Velocity.of(model.optimizer)
    follower.follow(1.0005, lambda: 1.0)
    # float16 rounds 1.0005 to 1.0, but can represent 1000.5.
    np.testing.assert_array_equal(velocity.numpy(), np.full((2, 1), 1000.5))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (keras.optimizers.Adam, "Adam keeps no velocity that the learning rate is part of"),
        (keras.optimizers.SGD, "SGD was made without momentum"),
    ],
)
def test_it_says_why_it_does_nothing(optimizer, reason):
    one, other = linear(), linear()
    for model in (one, other):
        model.compile(optimizer(0.1), "mse")
    fit(one, [Rates(RATES)])
    with pytest.warns(UserWarning, match=f"MomentumCorrection does nothing: {reason}"):
        fit(other, [Rates(RATES), MomentumCorrection()])
    np.testing.assert_array_equal(one.get_weights()[0], other.get_weights()[0])


def test_steps_that_run_together_with_a_schedule_are_refused():
    model = linear()
    model.compile(keras.optimizers.SGD(Steps(RATES), MOMENTUM), "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="cannot correct between steps that are executed together"):
        fit(model, [MomentumCorrection()])
