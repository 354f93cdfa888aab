"""Properties that hold without knowing the right result: none of them runs plain Keras.

They see what a comparison with one device cannot: a fault that plain Keras and the towers would share, such as in the data.
"""

import keras
import numpy as np
import pytest
from comparison import assert_same, largest_change, values
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
ROWS = 24


def images(rows):
    return rng.normal(size=(rows, 8, 8, 2)), rng.normal(size=(rows, 2))


def sentences(rows):
    tokens = rng.integers(1, 9, (rows, 5)) * (np.arange(5) < rng.integers(1, 6, (rows, 1)))
    return tokens, rng.normal(size=(rows, 2))


def convolutions():
    stack = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(), layers.Flatten()]
    return keras.Sequential([keras.Input((8, 8, 2)), *stack, layers.Dense(2, kernel_regularizer="l2")])


def attention():
    """Normalizes and pools attention between embeddings with a mask, which a recurrent layer takes as well."""
    tokens = keras.Input((5,))
    x = layers.Embedding(9, 4, mask_zero=True)(tokens)
    pooled = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x)))
    return keras.Model(tokens, layers.Dense(2)(layers.Concatenate()([pooled, layers.LSTM(3)(x)])))


CASES = {"convolutions": (convolutions, images, (1, 2, 3, 4)), "attention": (attention, sentences, (1, 3))}


def trained(build, x, y, towers, batch_size, optimizer=None):
    """Trains from the same weights each time, and returns the last loss and the state."""
    keras.utils.set_random_seed(1)
    parallel = keras_dp.DataParallelModel(build(), devices=towers)
    parallel.compile(optimizer or keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"])
    history = parallel.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return history, parallel.inner_model.get_weights(), values(parallel.optimizer.inner_optimizer)


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_towers_gives_the_same_result(case):
    """Batches of 10, 10 and 4 rows: slices are uneven."""
    build, data, numbers = CASES[case]
    x, y = data(ROWS)
    one, *others = (trained(build, x, y, towers, 10) for towers in numbers)
    for other in others:
        assert_same(one, other, 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_rows_does_not_matter(case):
    """Rows that trade places within their batch move to other towers; the loss, the weights and the statistics stay."""
    build, data, _ = CASES[case]
    x, y = data(ROWS)
    order = np.concatenate([begin + rng.permutation(8) for begin in range(0, ROWS, 8)])
    assert not np.array_equal(order, np.arange(ROWS))
    assert_same(trained(build, x, y, 3, 8), trained(build, x[order], y[order], 3, 8), 1e-9)


def test_a_batch_is_two_halves_of_an_accumulating_optimizer():
    """The mean of two halves is the mean of the whole. Batch normalization would see other moments."""
    x, y = sentences(ROWS)
    whole = trained(attention, x, y, 3, 8, keras.optimizers.SGD(0.1, momentum=0.9))
    halves = trained(attention, x, y, 3, 4, keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    assert_same(whole[1], halves[1], 1e-9)


def test_the_order_of_rows_matters_to_a_model_that_counts_them():
    """The control: a weight for each place in the batch."""

    class Placed(layers.Layer):
        def call(self, x):
            return x * keras.ops.cast(keras.ops.arange(keras.ops.shape(x)[0])[:, None] + 1, x.dtype)

    def build():
        return keras.Sequential([keras.Input((6,)), Placed(), layers.Dense(2)])

    x, y = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 2))
    order = np.concatenate([np.arange(begin, begin + 8)[::-1] for begin in range(0, ROWS, 8)])
    (_, one, _), (_, other, _) = trained(build, x, y, 3, 8), trained(build, x[order], y[order], 3, 8)
    assert largest_change(one, other) > 1e-3
