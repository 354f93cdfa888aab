"""With accumulate="rows", accumulated batches of different sizes give the result of one batch with all their rows."""

import copy

import keras
import numpy as np
import pytest
from comparison import largest_change
from keras import layers

import keras_dp

X = np.sin(np.arange(88.0)).reshape(22, 4)
Y = np.cos(np.arange(44.0)).reshape(22, 2)
WEIGHTS = np.linspace(0.1, 3.0, 22)
# Eleven rows, as batches of 4, 4 and 3, are one step.
STEPS = 3
WINDOWS = [range(11), range(11, 22)] * 2
PARTS = [rows[begin : begin + 4] for rows in WINDOWS for begin in (0, 4, 8)]

OPTIMIZERS = {
    "SGD": lambda **arguments: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, **arguments),
    "Adam": lambda **arguments: keras.optimizers.Adam(0.01, **arguments),
    "clipped": lambda **arguments: keras.optimizers.SGD(0.5, global_clipnorm=0.05, **arguments),
    "loss scaling": lambda **arguments: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, **arguments), initial_scale=8.0
    ),
}


def build():
    keras.utils.set_random_seed(3)
    hidden = layers.Dense(5, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(2)])


def train(model, batches, x=X):
    for rows in map(list, batches):
        model.train_on_batch(x[rows], Y[rows], WEIGHTS[rows])
    return model.get_weights()


def plain(optimizer, batches, model=None, x=X):
    model = model or build()
    model.compile(optimizer, "mse")
    return train(model, batches, x)


def accumulating(name, num_towers=2, accumulate="rows", steps=STEPS, **wrapper_arguments):
    model = keras_dp.DataParallelModel(build(), devices=num_towers, **wrapper_arguments)
    inner_optimizer = OPTIMIZERS[name](gradient_accumulation_steps=steps)
    model.compile(keras_dp.DataParallelOptimizer(inner_optimizer, accumulate=accumulate), "mse")
    return model


def two_batches_by_rows(learning_rate=1.0, **arguments):
    inner_optimizer = keras.optimizers.SGD(learning_rate, gradient_accumulation_steps=2, **arguments)
    return keras_dp.DataParallelOptimizer(inner_optimizer, accumulate="rows")


@pytest.mark.parametrize(
    ("name", "num_towers", "wrapper_arguments"),
    [("SGD", 1, {}), ("Adam", 3, {"parameter_device": "sharded"}), ("clipped", 3, {}), ("loss scaling", 3, {})],
)
def test_uneven_batches_are_one_batch(name, num_towers, wrapper_arguments):
    received = train(accumulating(name, num_towers, **wrapper_arguments), PARTS)
    assert largest_change(plain(OPTIMIZERS[name](), WINDOWS), received) < 1e-9


def test_keras_own_mean_of_means_is_another_thing():
    received = train(accumulating("SGD", accumulate="batches"), PARTS)
    assert largest_change(plain(OPTIMIZERS["SGD"](), WINDOWS), received) > 1e-4


def test_through_fit_with_windows_across_epochs():
    """An epoch has three batches, of 4, 4 and 3 rows, so that a window of two batches ends in the next epoch."""
    model = accumulating("Adam", steps=2)
    model.fit(X[:11], Y[:11], 4, epochs=2, shuffle=False, verbose=0, sample_weight=WEIGHTS[:11])
    expected = plain(OPTIMIZERS["Adam"](), ([*range(8)], [*range(8, 11), *range(4)], [*range(4, 11)]))
    assert largest_change(expected, model.get_weights()) < 1e-9


def test_a_batch_that_overflows_is_left_out_with_its_rows():
    """The second of four batches is infinite: the loss scale falls, and the window holds the other three batches."""
    model, x = accumulating("loss scaling"), X.copy()
    x[4:8] = np.inf
    received = train(model, (range(4), range(4, 8), range(8, 11), range(11, 13)), x)
    expected = plain(keras.optimizers.SGD(0.1, momentum=0.9), ([*range(4), *range(8, 13)],))
    assert largest_change(expected, received) < 1e-9
    assert model.optimizer.dynamic_scale.numpy() == 4.0


def test_embeddings_of_rows_that_occur_twice():
    def tokens():
        keras.utils.set_random_seed(3)
        return keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(6, 2), layers.Flatten(), layers.Dense(2)])

    x = np.arange(66).reshape(22, 3) % 6
    model = keras_dp.DataParallelModel(tokens(), devices=2)
    model.compile(two_batches_by_rows(0.1), "mse")
    expected = plain(keras.optimizers.SGD(0.1), [range(7)], tokens(), x)
    assert largest_change(expected, train(model, (range(4), range(4, 7)), x)) < 1e-9


def test_state_that_is_restored_in_the_middle_of_a_window(tmp_path):
    """Restoring the variables discards the rows of the window in progress, in this process as from a file."""
    model, path = accumulating("Adam"), tmp_path / "middle.weights.h5"
    begin, end = [range(4), range(4, 8)], [range(8, 12), range(12, 16), range(16, 20)]
    train(model, begin)
    model.save_weights(path)
    variables = [*model.variables, *model.inner_model.optimizer.variables]
    state = [variable.numpy() for variable in variables]
    expected = train(model, end)
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value)
    loaded = accumulating("Adam")
    loaded.inner_model.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(path)
    for way, restored in {"assigned": model, "loaded": loaded}.items():
        assert largest_change(expected, train(restored, end)) < 1e-12, way


@pytest.mark.parametrize(
    ("name", "copied"), [("Adam", copy.copy), ("loss scaling", copy.deepcopy), ("Adam", keras.models.clone_model)]
)
def test_copies_and_clones_weight_rows_too(name, copied):
    """A file holds no such argument, and these pass through one: a copy once averaged over batches, in silence."""
    model = accumulating(name, batch_norm="local")
    train(model, PARTS[:6])
    other = copied(model)
    assert other.optimizer.accumulate == "rows"
    if copied is keras.models.clone_model:
        other.set_weights(build().get_weights())
        model = accumulating(name)
    before = other.get_weights()
    expected = train(model, PARTS[:6])
    assert largest_change(before, other.get_weights()) == 0.0
    assert largest_change(expected, train(other, PARTS[:6])) < 1e-12


def test_in_a_loop_of_ones_own():
    weight, optimizer = keras.Variable([0.0]), two_batches_by_rows()
    optimizer.apply_tower_gradients([[[1.0]], [[1.0]]], [weight], rows=3)
    optimizer.apply_tower_gradients([[[-1.0]], [[-1.0]]], [weight], rows=1)
    assert weight.numpy() == [-(3 * 2 - 1 * 2) / 4]
    with pytest.raises(ValueError, match="give their number. Received: rows=None"):
        optimizer.apply_tower_gradients([[[1.0]]], [weight])


def test_what_overwrites_its_variable_is_not_weighted():
    """The scales of float8 are such variables: Keras takes the largest of their values."""
    scale, weight, optimizer = keras.Variable([1.0]), keras.Variable([0.0]), two_batches_by_rows()
    scale.overwrite_with_gradient = True
    for value, rows in ((5.0, 6), (3.0, 2)):
        optimizer.apply_tower_gradients([[[value], [value]]], [scale, weight], rows=rows)
    assert scale.numpy() == [5.0]
    assert weight.numpy() == [-(6 * 5.0 + 2 * 3.0) / 8]


def test_infinite_gradients_that_keras_clips_count():
    weight, optimizer = keras.Variable([0.0]), two_batches_by_rows(clipvalue=0.5)
    for value in (np.inf, 1.0, 0.25, 0.25):
        optimizer.apply_tower_gradients([[[value]]], [weight], rows=2)
    assert weight.numpy() == [-0.75]


def test_bad_arguments():
    accumulates = keras.optimizers.OptimizerMap(keras.optimizers.SGD(gradient_accumulation_steps=2))
    for inner_optimizer, accumulate, message in [
        ("sgd", "rows", "accumulates none, or is made of several. Give a single optimizer with gradient_accumulation_steps"),
        (keras.optimizers.MultiOptimizer(accumulates), "rows", "or is made of several. Give a single optimizer"),
        ("sgd", "elements", "`accumulate` must be one of 'batches', 'rows'. Received: accumulate='elements'"),
    ]:
        with pytest.raises(ValueError, match=message):
            keras_dp.DataParallelOptimizer(inner_optimizer, accumulate=accumulate)
    model = accumulating("SGD")
    model.run_eagerly = True
    with pytest.raises(ValueError, match="weights the gradients of towers, and run_eagerly=True runs none"):
        model.fit(X, Y, verbose=0)
