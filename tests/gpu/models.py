"""Build the models of the test on GPUs, and their data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_dp
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

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=input_shape[-1:], initializer="ones", dtype="float32", autocast=False)
        self.offset = self.add_weight(shape=input_shape[-1:], initializer="zeros", dtype="float32", autocast=False)

    def call(self, x: Any) -> Any:
        return tf.compat.v1.nn.fused_batch_norm(x, self.scale.value, self.offset.value, is_training=True)[0]


def images(rows: int) -> Data:
    """Makes rows of (12, 12, 3) and their classes."""
    random = np.random.default_rng(1)
    return random.normal(size=(rows, 12, 12, 3)), random.integers(0, CLASSES, rows)


def whole_sequences(rows: int) -> Data:
    """Makes rows of LENGTH tokens, and their classes."""
    random = np.random.default_rng(2)
    return random.integers(1, TOKENS, (rows, LENGTH)), random.integers(0, CLASSES, rows)


def sequences(rows: int) -> Data:
    """Makes the same, padded with 0 at their ends."""
    tokens, classes = whole_sequences(rows)
    lengths = np.random.default_rng(3).integers(1, LENGTH + 1, (rows, 1))
    return np.where(np.arange(LENGTH) < lengths, tokens, 0), classes


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((12, 12, 3)), layers.Flatten(), layers.Dense(32, "tanh"), layers.Dense(CLASSES)])


def convolutions() -> keras.Model:
    """Builds a network with the kinds of convolution, batch normalization and pooling."""
    stack = [
        layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.SeparableConv2D(8, 3, padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2DTranspose(8, 3, strides=2, use_bias=False),
        layers.BatchNormalization(),
        layers.Conv2D(8, 3, strides=2, activation="gelu"),
        layers.GlobalAveragePooling2D(),
    ]
    return keras.Sequential([keras.Input((12, 12, 3)), *stack, layers.Dense(CLASSES)])


def fused_batch_norm() -> keras.Model:
    """Builds a convolution and a fused batch normalization."""
    stack = [layers.Conv2D(8, 3), FusedBatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((12, 12, 3)), *stack, layers.Dense(CLASSES)])


def recurrent(*stack: layers.Layer) -> keras.Model:
    """Builds a classifier of tokens from recurrent layers, which use cuDNN's kernels on GPUs."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, 8, mask_zero=True)(tokens)
    for layer in stack:
        x = layer(x)
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def lstm() -> keras.Model:
    return recurrent(layers.LSTM(8, return_sequences=True), layers.LSTM(8))


def gru() -> keras.Model:
    return recurrent(layers.Bidirectional(layers.GRU(8)))


def attention() -> keras.Model:
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


def loss() -> keras.losses.Loss:
    """Returns the loss of all these models."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fresh(floatx: str = "float64", policy: str | None = None) -> None:
    """Forgets all models, and sets the precision and the seeds, so that all that is built next begins with the same weights."""
    keras.utils.clear_session()
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy or floatx)
    keras.utils.set_random_seed(3)


def on(devices: list[str] | None, model: keras.Model, **arguments: Any) -> Any:
    """Returns the model on towers; the model itself, if there are no devices."""
    return model if devices is None else keras_dp.DataParallelModel(model, devices=devices, **arguments)


def compiled(model: Any, optimizer: keras.optimizers.Optimizer, jit_compile: Any = False) -> Any:
    """Compiles a model, and returns it. By default, plain Keras would use XLA on GPUs, and keras_dp would not."""
    model.compile(optimizer, loss(), jit_compile=jit_compile)
    return model


def large_transformer() -> keras.Model:
    """Builds and compiles a language model with 96 million weights, for `keras-dp bench`."""
    tokens = keras.Input((POSITIONS,), dtype="int32")
    x = PositionEmbedding()(layers.Embedding(VOCABULARY, WIDTH)(tokens))
    for _ in range(BLOCKS):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(12, WIDTH // 12)(normalized, normalized, use_causal_mask=True)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x)))
    model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
    # By default, plain Keras uses XLA on GPUs, and keras_dp does not.
    model.compile(keras.optimizers.Adam(1e-4), loss(), jit_compile=False)
    return model
