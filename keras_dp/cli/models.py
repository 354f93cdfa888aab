"""Build or import the model that a command trains."""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

Tensor = Any

VOCABULARY = 5_000
SEQUENCE_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and how to train it if it is not compiled yet.

    Attributes:
        build: a function that returns a built `keras.Model`.
        batch_size: the default number of rows in a batch.
        objective: a function that returns the loss and the metrics, as arguments of `keras.Model.compile`.
    """

    build: Callable[[], keras.Model]
    batch_size: int
    objective: Callable[[], dict[str, Any]]


def workload(name: str) -> Workload:
    """Finds the model with a name.

    Args:
        name: a built-in model, or "module:function" for a function without arguments that returns a built `keras.Model`. The
            module may be in the current directory.

    Raises:
        ValueError: if there is no such model.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f"A model is one of {', '.join(BUILT_IN)}, or my_module:build_function. Received: {name!r}")
    return Workload(function_named(name), 64, regression)


def function_named(name: str) -> Callable[[], Any]:
    """Returns the function "module:function"; imports the module, which may be in the current directory, and so runs it.

    Raises:
        ValueError: if there is no such module or function.
    """
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"The module {module_name} cannot be imported: {error}. Received: {name!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"The module {module_name} has no function {function_name!r}. Received: {name!r}")
    return function


def refuse_what_is_not_timed(model: keras.Model) -> None:
    """Raises a ValueError for a model whose steps cannot be timed one by one."""
    if model.steps_per_execution != 1:
        raise ValueError(
            "Steps are timed one by one. Received: a model that is compiled with "
            f"steps_per_execution={model.steps_per_execution}. Compile it without this argument."
        )


def classification() -> dict[str, Any]:
    """Returns the cross-entropy of class numbers from logits, and accuracy."""
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}


def optimizer() -> keras.optimizers.Optimizer:
    """Returns the optimizer of a model that is not compiled."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


def regression() -> dict[str, Any]:
    """Returns the mean squared error."""
    return {"loss": "mse"}


def small() -> keras.Model:
    """Builds a network with a convolution, batch normalization and dropout; it returns logits of shape (batch, 10)."""
    stack = [keras.layers.Conv2D(16, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    stack += [keras.layers.Dropout(0.2), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((16, 16, 3)), *stack])


def mlp() -> keras.Model:
    """Builds an MLP 784-512-512-10 for images of digits as rows of pixels; it returns logits of shape (batch, 10)."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def resnet20() -> keras.Model:
    """Builds ResNet-20 for CIFAR, with parameter-free shortcuts (He et al. 2016, option A).

    The model returns logits of shape (batch, 10).
    """

    def convolution(x: Tensor, filters: int, strides: int = 1) -> Tensor:
        x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        return keras.layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(convolution(inputs, 16))
    for filters, first_strides in ((16, 1), (32, 2), (64, 2)):
        for strides in (first_strides, 1, 1):
            shortcut = x
            if strides == 2:
                shortcut = keras.ops.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (filters // 4, filters // 4)))
            x = keras.layers.ReLU()(convolution(x, filters, strides))
            x = keras.layers.ReLU()(keras.layers.Add()([convolution(x, filters), shortcut]))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def resnet50() -> keras.Model:
    """Builds ResNet-50 for ImageNet, as in `keras.applications`; it returns logits of shape (batch, 1000)."""
    return keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3), classes=1_000, classifier_activation=None)


def transformer(blocks: int = 4) -> keras.Model:
    """Builds a language model with pre-norm blocks; it returns logits of the next token, of shape (batch, 64, 5000)."""
    width = 128
    tokens = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = PositionEmbedding()(keras.layers.Embedding(VOCABULARY, width)(tokens))
    for _ in range(blocks):
        normalized = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)
        x = keras.layers.Add()([x, attention(normalized, normalized, use_causal_mask=True)])
        hidden = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(width)(hidden)])
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(x)))


class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector to each position of a sequence of shape (batch, positions, width)."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the vectors, of shape (positions, width)."""
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, x: Tensor) -> Tensor:
        """Returns the sum, in the shape of `x`."""
        return x + self.vectors


def lstm() -> keras.Model:
    """Builds a language model with two LSTMs of 128 units; it returns logits of the next token, (batch, 64, 5000)."""
    tokens = keras.Input((SEQUENCE_LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 128)(tokens)
    for _ in range(2):
        x = keras.layers.LSTM(128, return_sequences=True)(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))


def unet() -> keras.Model:
    """Builds a U-Net on images of 64 x 64 pixels, with 16, 32 and 64 channels; it returns logits, (batch, 64, 64, 4)."""

    def convolutions(x: Tensor, filters: int) -> Tensor:
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        return x

    inputs = keras.Input((64, 64, 3))
    fine = convolutions(inputs, 16)
    middle = convolutions(keras.layers.MaxPooling2D()(fine), 32)
    x = convolutions(keras.layers.MaxPooling2D()(middle), 64)
    for skipped, filters in ((middle, 32), (fine, 16)):
        x = keras.layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolutions(keras.layers.Concatenate()([x, skipped]), filters)
    return keras.Model(inputs, keras.layers.Conv2D(4, 1)(x))


BUILT_IN = {
    "small": Workload(small, 64, classification),
    "mlp": Workload(mlp, 256, classification),
    "resnet20": Workload(resnet20, 64, classification),
    "resnet50": Workload(resnet50, 16, classification),
    "transformer": Workload(transformer, 64, classification),
    "lstm": Workload(lstm, 64, classification),
    "unet": Workload(unet, 16, classification),
}
