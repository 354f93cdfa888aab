"""Every optimizer of Keras, with each of its options, gives one device's weights and optimizer state."""

import keras
import numpy as np
import pytest
from comparison import assert_same, assert_same_training, largest_change, same_on_towers, values
from keras import layers, optimizers

import keras_dp

rng = np.random.default_rng(4)
X = rng.normal(size=(23, 5))
Y = rng.normal(size=(23, 3))


def build():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh", name="hidden"), layers.Dense(3, name="out")])


def assert_exact(make_optimizer, **arguments):
    return assert_same_training(build, lambda: {"optimizer": make_optimizer(), "loss": "mse"}, [((X, Y), 9)], 3, **arguments)


def test_schedule_free_starts_as_in_keras():
    """It starts from zeros: TensorFlow drops the assignments of the trace that makes variables."""
    assert_exact(lambda: optimizers.ScheduleFreeAdamW(0.05))


def test_optimizers_by_config():
    assert_exact(lambda: {"class_name": "Adam", "config": {"learning_rate": 0.01}}, epochs=1)


@same_on_towers(build, 3)
def test_options_of_optimizers(model):
    """Under tf.distribute, clipping silently trains other weights, averages with a frequency crash, and accumulation does.

    As in Keras, the mean of accumulated batches of different size counts each batch once.
    """
    averages = {"use_ema": True, "ema_momentum": 0.7}
    options = [
        {"clipnorm": 0.05, "loss_scale_factor": 64.0},
        {"clipvalue": 0.01, **averages},
        {"global_clipnorm": 0.05, **averages, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2},
    ]
    histories = []
    for option in options:
        model.compile(optimizers.SGD(0.05, 0.9, **option), "mse")
        histories.append(model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history)
    return histories


# The arguments of each schedule.
SCHEDULES = {
    "CosineDecay": (0.1, 4),
    "CosineDecayRestarts": (0.1, 2),
    "ExponentialDecay": (0.1, 2, 0.5),
    "InverseTimeDecay": (0.1, 2, 0.5),
    "PiecewiseConstantDecay": ([2, 4], [0.1, 0.05, 0.01]),
    "PolynomialDecay": (0.1, 4),
}


def test_every_learning_rate_schedule():
    """A layer trains with each."""
    schedules = optimizers.schedules
    assert {*SCHEDULES, "LearningRateSchedule"} == {name for name in vars(schedules) if name[0].isupper()}

    def build():
        return keras.Sequential([keras.Input((5,)), *[layers.Dense(3, name=name) for name in SCHEDULES]])

    def compiled():
        made = {f"{name}/.*": optimizers.SGD(getattr(schedules, name)(*given), 0.9) for name, given in SCHEDULES.items()}
        return {"optimizer": optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(), made)), "loss": "mse"}

    assert_same_training(build, compiled, [((X, Y), 9)], 3)


def test_several_optimizers_in_one():
    def make_optimizer():
        chosen = {".*hidden/.*": optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1)}
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(0.01), chosen))

    assert_exact(make_optimizer, wrapper_arguments={"parameter_device": "sharded"})


class SignDescent(optimizers.Optimizer):
    """Takes a step of fixed size against the sign of the gradient, which no mean of the towers' steps can equal."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


def test_optimizers_of_ones_own():
    assert_exact(lambda: SignDescent(0.01))


def test_dynamic_loss_scale():
    """The scale grows after two finite steps."""

    def scaled():
        inner = optimizers.Adam(0.01, gradient_accumulation_steps=2)
        return optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)

    one, parallel = assert_exact(scaled)
    assert float(one.optimizer.dynamic_scale.numpy()) == float(parallel.optimizer.dynamic_scale.numpy()) == 64.0


@same_on_towers(build, 3)
def test_an_infinite_gradient_in_one_tower(model):
    """The step is skipped and the scale halved. tf.distribute checks replica 0 alone: inf in replica 1 destroys the weights."""
    y = Y.copy()
    y[17] = np.inf  # The last row of the second batch, in the last tower's slice.
    model.compile(optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=8.0), "mse")
    scales, changes = [], []
    for begin in (0, 9, 18):
        before = model.get_weights()
        model.train_on_batch(X[begin : begin + 9], y[begin : begin + 9])
        scales.append(float(model.optimizer.dynamic_scale.numpy()))
        changes.append(bool(largest_change(before, model.get_weights())))
    assert scales == [8.0, 4.0, 4.0]
    assert changes == [True, False, True]


@pytest.mark.parametrize(
    ("policy", "auto_scale_loss"),
    [("mixed_float16", True), ("mixed_float16", False), ("mixed_bfloat16", True), ("float16", True), ("bfloat16", True)],
)
def test_mixed_precision(policy, auto_scale_loss):
    """Scales and steps are equal, and weights are equal up to rounding of activations. Loss scaling follows the policy."""
    keras.config.set_floatx("float32")

    results = []
    for wrap in (lambda model: model, lambda model: keras_dp.DataParallelModel(model, devices=3)):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy(policy)
        model = build()
        before = model.get_weights()
        trained = wrap(model)
        trained.compile(optimizers.SGD(0.05), "mse", auto_scale_loss=auto_scale_loss)
        assert hasattr(trained.optimizer, "initial_scale") is (policy == "mixed_float16" and auto_scale_loss)
        # The user's optimizer is in a LossScaleOptimizer, and not another layer below.
        assert getattr(trained.optimizer, "inner_optimizer", trained.optimizer).__class__ is optimizers.SGD
        history = trained.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
        results.append((history, model.get_weights(), values(trained.optimizer)))
        assert np.abs(np.float32(model.get_weights()[0]) - np.float32(before[0])).max() > 0.01
    keras.config.set_dtype_policy("float32")
    as_float = keras.tree.map_structure(np.float64, results)
    assert_same(as_float[0], as_float[1], 0.05 if "bfloat16" in policy else 0.01)
