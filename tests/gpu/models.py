"""Build the models of the test on GPUs, and their data."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from ways_of_wrapping import wrapped

from keras_dp.cli.models import PositionEmbedding

Data = tuple[np.ndarray, np.ndarray]

# Batches of 11, 11, 11 and 1 rows: slices are uneven, and the last batch has fewer rows than towers.
ROWS, BATCH_SIZE = 34, 11

CLASSES = 4
TOKENS, LENGTH = 20, 6
# Of the large transformer.
VOCABULARY, POSITIONS, WIDTH, BLOCKS = 16_000, 128, 768, 10


class Case(NamedTuple):
    """Holds functions that build a model, which returns logits of shape (rows, CLASSES), and make a number of rows (x, y).

    `has_float64` says whether the kernels of GPUs compute the model right in float64. TensorFlow has no fused batch
    normalization in float64. Its recurrent kernels leave arbitrary numbers at the padded steps, in plain Keras, too, and the
    gradient of the padding's embedding takes them.
    """

    build: Callable[[], keras.Model]
    data: Callable[[int], Data]
    has_float64: bool = True


class FusedBatchNormalization(layers.Layer):
    """Normalizes images with the fused kernel of cuDNN, which Keras 3 itself does not call."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=input_shape[-1:], initializer="ones", dtype="float32", autocast=False)
        self.offset = self.add_weight(shape=input_shape[-1:], initializer="zeros", dtype="float32", autocast=False)

    def call(self, x):
        return tf.compat.v1.nn.fused_batch_norm(x, self.scale.value, self.offset.value, is_training=True)[0]


def images(rows):
    """Makes rows of (12, 12, 3) and their classes."""
    random = np.random.default_rng(1)
    return random.normal(size=(rows, 12, 12, 3)), random.integers(0, CLASSES, rows)


def whole_sequences(rows):
    """Makes rows of LENGTH tokens, and their classes."""
    random = np.random.default_rng(2)
    return random.integers(1, TOKENS, (rows, LENGTH)), random.integers(0, CLASSES, rows)


def sequences(rows):
    """Makes the same, padded with 0 at their ends."""
    tokens, classes = whole_sequences(rows)
    lengths = np.random.default_rng(3).integers(1, LENGTH + 1, (rows, 1))
    return np.where(np.arange(LENGTH) < lengths, tokens, 0), classes


def of_images(*stack):
    return keras.Sequential([keras.Input((12, 12, 3)), *stack, layers.Dense(CLASSES)])


def dense():
    return of_images(layers.Flatten(), layers.Dense(32, "tanh"))


def convolutions():
    """Builds a network with the kinds of convolution, batch normalization and pooling."""
    return of_images(
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.SeparableConv2D(8, 3, padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2DTranspose(8, 3, strides=2, use_bias=False),
        layers.BatchNormalization(),
        layers.Conv2D(8, 3, strides=2, activation="gelu"),
        layers.GlobalAveragePooling2D(),
    )


def fused_batch_norm():
    return of_images(layers.Conv2D(8, 3), FusedBatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D())


def recurrent(*stack):
    """Builds a classifier of tokens from recurrent layers, which use cuDNN's kernels on GPUs."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, 8, mask_zero=True)(tokens)
    for layer in stack:
        x = layer(x)
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def lstm():
    return recurrent(layers.LSTM(8, return_sequences=True), layers.LSTM(8))


def gru():
    return recurrent(layers.Bidirectional(layers.GRU(8)))


def attention():
    """Builds a small transformer with masks."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


CASES = {
    "convolutions": Case(convolutions, images),
    "lstm": Case(lstm, whole_sequences),
    "gru": Case(gru, whole_sequences),
    "attention": Case(attention, sequences),
    "dense": Case(dense, images),
    "padded lstm": Case(lstm, sequences, has_float64=False),
    "padded gru": Case(gru, sequences, has_float64=False),
    "fused batch norm": Case(fused_batch_norm, images, has_float64=False),
}


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fresh(floatx="float64", policy=None):
    """Forgets all models, and sets the precision and the seeds, so that all that is built next begins with the same weights."""
    keras.utils.clear_session()
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy or floatx)
    keras.utils.set_random_seed(3)


def on(devices, model, **arguments):
    """Returns the model on towers; the model itself, if there are no devices."""
    return model if devices is None else wrapped(model, devices=devices, **arguments)


def compiled(model, optimizer, jit_compile=False):
    """Compiles a model, and returns it. By default, plain Keras would use XLA on GPUs, and keras_dp would not."""
    model.compile(optimizer, loss(), jit_compile=jit_compile)
    return model


def trained(name, devices, optimizer, rows=ROWS, batch_size=BATCH_SIZE, floatx="float64", jit_compile=False, **arguments):
    """Trains a model of `CASES` from the beginning, on towers if there are devices, and returns it."""
    fresh(floatx)
    model = compiled(on(devices, CASES[name].build(), **arguments), optimizer(), jit_compile)
    x, y = CASES[name].data(rows)
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model


def large_transformer():
    """Builds and compiles a language model with 96 million weights, for `keras-dp bench`."""
    tokens = keras.Input((POSITIONS,), dtype="int32")
    x = PositionEmbedding()(layers.Embedding(VOCABULARY, WIDTH)(tokens))
    for _ in range(BLOCKS):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(12, WIDTH // 12)(normalized, normalized, use_causal_mask=True)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    return compiled(model, keras.optimizers.Adam(1e-4))
