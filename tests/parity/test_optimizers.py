"""LARS is the paper's, LARS and Lamb train on towers, and biases and normalization are excluded from weight decay."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_training
from keras import layers

import keras_dp
from keras_dp.large_batches.lars import LARS
from keras_dp.large_batches.weight_decay import exclude_from_weight_decay

X = np.sin(np.arange(44.0)).reshape(11, 4)
Y = np.cos(np.arange(22.0)).reshape(11, 2)


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.ReLU(), layers.Dense(2)])


def lars(w, gradients, rate, momentum, decay, trust, nesterov=False, adapted=True):
    """Returns a weight after several gradients, by algorithm 1 of You et al. 2017."""
    v = np.zeros_like(w)
    for g in gradients:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        total = g + decay * w if adapted else g
        local_rate = trust * norms[0] / (norms[1] + decay * norms[0]) if adapted and all(norms) else 1.0
        v = momentum * v + rate * local_rate * total
        w = w - (momentum * v + rate * local_rate * total if nesterov else v)
    return w


def applied(optimizer, gradients, *variables):
    """Applies the same gradients to each of several variables, and returns what these are then."""
    for gradient in gradients:
        optimizer.apply([gradient] * len(variables), variables)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_the_papers(nesterov):
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=(3, 4)), random.normal(size=(5, 3, 4))
    (received,) = applied(LARS(0.5, 0.875, 0.125, 0.25, nesterov), gradients, keras.Variable(start))
    np.testing.assert_allclose(received, lars(start, gradients, 0.5, 0.875, 0.125, 0.25, nesterov), rtol=1e-12)


def test_lars_where_a_norm_is_zero_is_sgd():
    for weight, gradient in ((np.zeros(2), np.ones(2)), (np.ones(2), np.zeros(2))):
        (received,) = applied(LARS(0.5, 0.0, 0.25, 0.001), [gradient], keras.Variable(weight))
        np.testing.assert_allclose(received, weight - 0.5 * (gradient + 0.25 * weight))


def test_what_lars_does_not_decay_it_does_not_adapt():
    start, gradients = np.full(3, 2.0), np.ones((2, 3))
    one, other = keras.Variable(start), keras.Variable(start)
    optimizer = LARS(0.5, 0.875, 0.25, 0.001)
    optimizer.exclude_from_weight_decay(var_list=[one])
    received = applied(optimizer, gradients, one, other)
    np.testing.assert_allclose(received[0], lars(start, gradients, 0.5, 0.875, 0.25, 0.001, adapted=False))
    np.testing.assert_allclose(received[1], lars(start, gradients, 0.5, 0.875, 0.25, 0.001))


def test_lars_adds_up_rows_of_sparse_gradients_before_it_measures_them():
    start = np.arange(6.0).reshape(3, 2)
    rows = tf.IndexedSlices(tf.ones((2, 2), tf.float64), tf.constant([1, 1]), tf.constant([3, 2]))
    (sparse,) = applied(LARS(0.5, 0.0, 0.25, 0.25), [rows], keras.Variable(start))
    np.testing.assert_allclose(sparse, lars(start, [np.array([[0.0, 0], [2, 2], [0, 0]])], 0.5, 0.0, 0.25, 0.25), rtol=1e-12)


OPTIMIZERS = {
    "LARS, Nesterov, clipped": lambda: LARS(2.0, 0.9, 1e-2, 0.05, nesterov=True, global_clipnorm=0.1),
    "LARS, accumulating": lambda: LARS(2.0, 0.9, 1e-2, 0.05, gradient_accumulation_steps=2),
    "Lamb, clipped": lambda: keras.optimizers.Lamb(0.05, weight_decay=0.1, clipnorm=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_towers(name):
    """Norms are taken of whole variables and of the gradients of whole batches, wherever the variables live."""
    wrapper_arguments = {"parameter_device": "sharded" if "clipped" in name else None}
    assert_same_training(build, lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"}, [((X, Y), 6)], 3, wrapper_arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_decay": None}, "`weight_decay` must be a number, 0 or more. Received: weight_decay=None"),
        ({"trust_coefficient": 0}, "`trust_coefficient` must be a positive number. Received: trust_coefficient=0"),
    ],
)
def test_bad_arguments_of_lars(arguments, message):
    with pytest.raises(ValueError, match=message):
        LARS(**arguments)


def layers_of_all_kinds():
    """Builds a model with kernels and embeddings, and with all kinds of weights that should not decay."""
    tokens = keras.Input((3,), dtype="int32")
    x = layers.Embedding(5, 4)(tokens)
    x = layers.MultiHeadAttention(2, 2)(x, x)
    x = layers.LayerNormalization()(layers.Conv1D(4, 2, padding="same")(x))
    x = layers.RMSNormalization(axis=[1, 2])(layers.GroupNormalization(2)(x))
    x = layers.PReLU()(layers.GRU(4, return_sequences=True)(x))
    return keras.Model(tokens, layers.Dense(2)(layers.BatchNormalization()(layers.Flatten()(x))))


def decayed(model, step):
    """Returns the names of variables that a step changes, and of those that it does not. No variable is zero before."""
    model.set_weights([value + 1.0 for value in model.get_weights()])
    before = [variable.numpy() for variable in model.trainable_variables]
    step()
    names = {True: set(), False: set()}
    for variable, value in zip(model.trainable_variables, before, strict=True):
        names[bool((variable.numpy() != value).any())].add(variable.name)
    return names[True], names[False]


def without_gradients(optimizer, model):
    variables = model.trainable_variables
    return lambda: optimizer.apply([np.zeros(variable.shape) for variable in variables], variables)


def test_biases_and_normalization_do_not_decay():
    model = layers_of_all_kinds()
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.25)
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, "mse")
    assert decayed(model, without_gradients(optimizer, model))[0] == {"kernel", "recurrent_kernel", "embeddings"}


@pytest.mark.parametrize(("parameter_device", "excluded"), [("CPU:1", "before wrapping"), ("sharded", "after wrapping")])
def test_what_does_not_decay_does_not_on_towers(excluded, parameter_device):
    """Variables stay the same objects when they move to another device."""
    weights = []
    for num_towers in (None, 2):
        keras.utils.set_random_seed(0)
        model = build()
        model.set_weights([value + 1.0 for value in model.get_weights()])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.5)
        if excluded == "before wrapping":
            exclude_from_weight_decay(optimizer, model)
        if num_towers:
            model = keras_dp.DataParallelModel(model, devices=num_towers, parameter_device=parameter_device)
        if excluded == "after wrapping":
            exclude_from_weight_decay(optimizer, model)
        model.compile(optimizer, "mse")
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_same(*weights, 1e-9)


def test_excluding_from_several_optimizers():
    model = build()
    parts = [keras.optimizers.SGD(0.5, weight_decay=0.25) for _ in range(2)]
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(parts[0], {".*kernel": parts[1]}))
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, "mse")
    assert decayed(model, without_gradients(optimizer, model)) == ({"kernel"}, {"bias", "gamma", "beta"})


@pytest.mark.parametrize(
    ("num_towers", "make"),
    [(None, lambda: LARS(2.0, 0.9, 0.5, nesterov=True)), (2, lambda: keras.optimizers.SGD(0.05, 0.9, weight_decay=0.5))],
    ids=["plain", "towers"],
)
def test_a_loaded_model_excludes_again_what_keras_does_not_save(tmp_path, num_towers, make):
    model = build()
    optimizer = make()
    exclude_from_weight_decay(optimizer, model)
    model.compile(optimizer, "mse")
    model.fit(X, Y, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == optimizer.get_config()
    if num_towers:
        loaded = keras_dp.DataParallelModel(loaded, devices=num_towers)
    exclude_from_weight_decay(loaded.optimizer, loaded)
    for one in (model, loaded):
        one.fit(X, Y, epochs=3, shuffle=False, verbose=0)
    assert_same(model.get_weights(), loaded.get_weights(), 1e-9)


def test_excluded_between_two_fits():
    model = keras_dp.DataParallelModel(build(), devices=2)
    model.compile(keras.optimizers.SGD(0.0625, weight_decay=8.0), lambda y_true, y_pred: 0.0 * y_pred)
    model.fit(X, Y, verbose=0)
    exclude_from_weight_decay(model.optimizer, model)
    assert decayed(model, lambda: model.fit(X, Y, verbose=0)) == ({"kernel"}, {"bias", "gamma", "beta"})


def test_excluding_needs_an_optimizer_and_variables():
    with pytest.raises(ValueError, match="compile with, not its name. Received: optimizer='sgd'"):
        exclude_from_weight_decay("sgd", build())
    with pytest.raises(ValueError, match="not built has no variables that could be excluded"):
        exclude_from_weight_decay(keras.optimizers.SGD(weight_decay=0.1), keras.Sequential([layers.Dense(2)]))
