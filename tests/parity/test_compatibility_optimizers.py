"""Every optimizer of Keras, with each of its options, gives one device's weights and optimizer state."""

import keras
import numpy as np
import pytest
from comparison import assert_same, assert_same_script, assert_same_training, largest_change, same_on_towers, values
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


@pytest.mark.parametrize("name", ["rmsprop", {"class_name": "Adam", "config": {"learning_rate": 0.01}}], ids=str)
def test_optimizers_by_name_and_config(name):
    assert_exact(lambda: name, epochs=1)


def one_after_the_other(*made):
    """Trains with one optimizer after the other, each from the weights of the last. Their configurations are kept."""
    configurations = [optimizers.serialize(optimizer) for optimizer in made]

    def script(model):
        seen = []
        for configuration in configurations:
            model.compile(optimizers.deserialize(configuration), "mse")
            seen.append(model.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history)
            seen.append((model.optimizer.learning_rate.numpy(), model.optimizer.iterations.numpy()))
        return seen

    assert_same_script(build, script, 3)


def test_clipping():
    """tf.distribute clips each replica's gradient before it sums them, and silently trains other weights."""
    options = {"clipnorm": 0.05}, {"clipvalue": 0.01}, {"global_clipnorm": 0.05}
    one_after_the_other(*[optimizers.SGD(0.05, **option) for option in options])


def test_moving_averages_of_weights():
    """tf.distribute crashes if a frequency is set."""
    averages = {"use_ema": True, "ema_momentum": 0.7}
    one_after_the_other(optimizers.Adam(0.05, **averages), optimizers.Adam(0.05, **averages, ema_overwrite_frequency=2))


def test_gradient_accumulation():
    """tf.distribute crashes. As in Keras, the mean of batches of different size counts each batch once."""
    assert_exact(lambda: optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=2))


SCHEDULES = {
    "CosineDecay": (0.1, 4),
    "CosineDecayRestarts": (0.1, 2),
    "ExponentialDecay": (0.1, 2, 0.5),
    "InverseTimeDecay": (0.1, 2, 0.5),
    "PiecewiseConstantDecay": ([2, 4], [0.1, 0.05, 0.01]),
    "PolynomialDecay": (0.1, 4),
}


def test_every_learning_rate_schedule():
    schedules = optimizers.schedules
    assert {*SCHEDULES, "LearningRateSchedule"} == {name for name in vars(schedules) if name[0].isupper()}
    one_after_the_other(*[optimizers.SGD(getattr(schedules, name)(*given), 0.9) for name, given in SCHEDULES.items()])


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


def test_static_loss_scale():
    assert_exact(lambda: optimizers.SGD(0.1, loss_scale_factor=64.0, global_clipnorm=0.1))


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


def test_no_loss_scaling_when_it_is_refused():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    plain, parallel = build(), keras_dp.DataParallelModel(build(), devices=3)
    for scales in (True, False):
        for model in (plain, parallel):
            model.compile(optimizers.SGD(0.05), "mse", auto_scale_loss=scales)
            assert hasattr(model.optimizer, "initial_scale") is scales
        assert np.isfinite(parallel.fit(X, Y, batch_size=9, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_mixed_precision(policy):
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
        trained.compile(optimizers.SGD(0.05), "mse")
        assert hasattr(trained.optimizer, "initial_scale") is (policy == "mixed_float16")
        history = trained.fit(X, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
        results.append((history, model.get_weights(), values(trained.optimizer)))
        assert np.abs(np.float32(model.get_weights()[0]) - np.float32(before[0])).max() > 0.01
    keras.config.set_dtype_policy("float32")
    as_float = keras.tree.map_structure(np.float64, results)
    assert_same(as_float[0], as_float[1], 0.05 if "bfloat16" in policy else 0.01)
