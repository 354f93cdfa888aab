"""The promise: towers train the same weights and return the same numbers as plain Keras on one device."""

import keras
import numpy as np
import pytest
from comparison import assert_towers_match_one_device
from keras import layers, losses, optimizers

# Rows and batch size: 41 rows in batches that towers divide unevenly; 34 with a last batch of one row.
BATCHES = {"uneven": (41, 13), "nearly empty": (34, 11)}

rng = np.random.default_rng(0)


def images(rows):
    return rng.normal(size=(rows, 8, 8, 3)), rng.integers(0, 4, rows)


def sequences(rows):
    tokens = rng.integers(1, 20, (rows, 6))
    lengths = rng.integers(1, 7, rows)
    return np.where(np.arange(6) < lengths[:, None], tokens, 0), rng.integers(0, 4, rows)


def conv_with_batch_norm():
    stack = [layers.Conv2D(6, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D()]
    stack += [layers.Conv2D(6, 3), layers.BatchNormalization(scale=False), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((8, 8, 3)), *stack, layers.Dense(4)])


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, layers.Dense(4)(layers.LSTM(7)(layers.Embedding(20, 5, mask_zero=True)(inputs))))


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


MODELS = {
    "conv and batch norm": (conv_with_batch_norm, images),
    "lstm with mask": (recurrent, sequences),
    "attention": (attention, sequences),
}


def compile_arguments():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": optimizers.Adam(0.01), "loss": loss, "metrics": ["accuracy"]}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_every_kind_of_batch(model):
    """tf.distribute silently trains wrong weights where a replica has no rows, and saves replica 0's moving statistics."""
    build, make_data = MODELS[model]
    datasets = [(make_data(rows), batch_size) for rows, batch_size in BATCHES.values()]
    assert_towers_match_one_device(build, compile_arguments, datasets, 3)
