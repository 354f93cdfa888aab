"""Relations between runs on towers, which hold whatever one device computes."""

import functools

import keras
import numpy as np
import pytest
from comparison import assert_same, twins
from keras import layers, ops

import keras_dp

DRAW = np.random.default_rng(11)
ROWS = 12
IMAGES = DRAW.normal(size=(ROWS, 6, 6, 2))
# Sentences of different lengths: 0 is masked.
TOKENS = DRAW.integers(1, 20, (ROWS, 5)) * (np.arange(5) < DRAW.integers(1, 6, (ROWS, 1)))
CLASSES, WEIGHTS = DRAW.integers(0, 3, ROWS), DRAW.uniform(size=ROWS)


def convolutions(normalized):
    inputs = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, 3)(inputs)
    x = layers.BatchNormalization(momentum=0.7)(x) if normalized else layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.MaxPooling2D()(layers.ReLU()(x)))))


def recurrent():
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(20, 4, mask_zero=True), layers.LSTM(3), layers.Dense(3)]
    )


def attention():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class PairsOfRows(keras.losses.Loss):
    """Compares each row with each other one, so that no tower has all that the loss needs."""

    def call(self, y_true, y_pred):
        same = ops.cast(ops.equal(y_true[:, None], y_true[None]), y_pred.dtype)
        distances = ops.sum((y_pred[:, None] - y_pred[None]) ** 2, axis=-1)
        return ops.mean(same * distances + (1 - same) * ops.relu(1 - distances), axis=1)


CROSSENTROPY = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
CASES = {
    "batch normalization": (functools.partial(convolutions, normalized=True), IMAGES, CROSSENTROPY),
    "convolutions": (functools.partial(convolutions, normalized=False), IMAGES, CROSSENTROPY),
    "recurrent": (recurrent, TOKENS, CROSSENTROPY),
    "attention": (attention, TOKENS, CROSSENTROPY),
    "pairs of rows": (recurrent, TOKENS, PairsOfRows),
}


def trained(model, loss, order, towers, batch_size=ROWS, steps=None):
    """Trains on the rows in an order, and returns the losses, the weights, and the predictions in the first order."""
    x, inner = model
    parallel = keras_dp.DataParallelModel(inner, devices=towers)
    parallel.compile(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=steps), loss())
    arguments = {"sample_weight": WEIGHTS[order], "batch_size": batch_size, "epochs": 3, "shuffle": False, "verbose": 0}
    losses = parallel.fit(x[order], CLASSES[order], **arguments).history["loss"]
    predictions = np.empty((ROWS, 3))
    predictions[order] = parallel.predict(x[order], batch_size=5, verbose=0)
    return losses, inner.get_weights(), predictions


@pytest.mark.parametrize("case", list(CASES))
def test_results_depend_neither_on_the_number_of_towers_nor_on_the_order_of_rows(case):
    build, x, loss = CASES[case]
    models = [(x, model) for model in twins(build, 3)]
    expected = trained(models[0], loss, np.arange(ROWS), 2)
    assert_same(expected, trained(models[1], loss, np.arange(ROWS), 4), 1e-9, "towers")
    assert_same(expected, trained(models[2], loss, np.random.default_rng(5).permutation(ROWS), 3), 1e-9, "order")


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("batch normalization", "pairs of rows")])
def test_an_accumulating_optimizer_makes_one_batch_of_two(case):
    build, x, loss = CASES[case]
    whole, halves = ((x, model) for model in twins(build))
    losses, *expected = trained(whole, loss, np.arange(ROWS), 3)
    received_losses, *received = trained(halves, loss, np.arange(ROWS), 2, ROWS // 2, 2)
    assert_same(expected, received, 1e-9)
    assert_same(losses, received_losses, 1e-9)


@pytest.mark.parametrize("case", ["batch normalization", "pairs of rows"])
def test_halves_of_a_batch_are_not_the_batch_where_rows_meet(case):
    """A negative control: normalization and pairs see the rows of one batch."""
    build, x, loss = CASES[case]
    whole, halves = ((x, model) for model in twins(build))
    expected = trained(whole, loss, np.arange(ROWS), 3)
    with pytest.raises(AssertionError):
        assert_same(expected, trained(halves, loss, np.arange(ROWS), 2, ROWS // 2, 2), 1e-9)
