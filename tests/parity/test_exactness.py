"""The promise: towers train the same weights and return the same numbers as plain Keras on one device."""

import keras
import numpy as np
import pytest
from comparison import assert_towers_match_one_device
from keras import layers, losses, optimizers

# Rows and batch size: 36 rows in even batches; 41 in batches that towers divide unevenly; 34 with a last batch of one row.
BATCHES = {"even": (36, 12), "uneven": (41, 13), "nearly empty": (34, 11)}

rng = np.random.default_rng(0)


def images(rows):
    return rng.normal(size=(rows, 8, 8, 3)), rng.integers(0, 4, rows)


def sequences(rows):
    tokens = rng.integers(1, 20, (rows, 6))
    lengths = rng.integers(1, 7, rows)
    return np.where(np.arange(6) < lengths[:, None], tokens, 0), rng.integers(0, 4, rows)


def dense():
    return keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(16, "tanh"), layers.Dense(4)])


def conv_with_batch_norm():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(6, 3),
            layers.BatchNormalization(scale=False),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


def recurrent(layer):
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(20, 5, mask_zero=True), layer(7), layers.Dense(4)]
    )


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(9, "relu")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(4)

    def call(self, inputs, training=None):
        x = self.hidden(keras.ops.reshape(inputs, (-1, 192)))
        return self.out(self.norm(x, training=training))


MODELS = {
    "dense": (dense, images),
    "conv and batch norm": (conv_with_batch_norm, images),
    "lstm with mask": (lambda: recurrent(layers.LSTM), sequences),
    "gru with mask": (lambda: recurrent(layers.GRU), sequences),
    "attention": (attention, sequences),
    "subclassed": (Subclassed, images),
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
