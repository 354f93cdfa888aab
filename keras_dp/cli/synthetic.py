"""Make batches of random data for any model."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp.keras_internals import keras_models

BATCHES = 16
SEED = 0


def dataset(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    """Returns endless batches (x, y) of `arrays`, which are ready in memory and the same in every process.

    Args:
        model: a built and compiled model, Functional or Sequential.
        batch_size: the number of rows in each batch.

    Raises:
        ValueError: if the model's inputs are not numbers of known shapes.
    """
    x, y = arrays(model, batch_size)
    x = keras.tree.map_structure(lambda tensor, drawn: tf.cast(drawn, tensor.dtype), _inputs_of(model), x)
    options = tf.data.Options()
    # Autotuning sometimes stalls a pipeline for far longer than a step takes.
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices((x, keras.tree.lists_to_tuples(y))).repeat().prefetch(2).with_options(options)


def arrays(model: keras.Model, batch_size: int) -> tuple[Any, Any]:
    """Returns `BATCHES` batches x and y of random numbers, in arrays of shape (BATCHES, batch_size, ...).

    Float inputs are standard normal. Integer inputs are uniform, below the size of the model's smallest embedding. Targets are
    class numbers for a sparse categorical cross-entropy, and otherwise uniform between 0 and 1.

    Args:
        model: as for `dataset`.
        batch_size: as for `dataset`.

    Raises:
        ValueError: as for `dataset`.
    """
    refuse_unknown_inputs(model)
    random = np.random.default_rng(SEED)
    inputs = _inputs_of(model)
    outputs = model.compute_output_spec(inputs)
    embeddings = [layer for layer in keras_models.flatten_layers(model) if isinstance(layer, keras.layers.Embedding)]
    limit = min((layer.input_dim for layer in embeddings), default=2)
    x = keras.tree.map_structure(lambda tensor: _inputs(random, tensor, batch_size, limit), inputs)
    pairs = zip(keras.tree.flatten(outputs), _losses(model, outputs), strict=True)
    return x, keras.tree.pack_sequence_as(outputs, [_targets(random, output, loss, batch_size) for output, loss in pairs])


def refuse_unknown_inputs(model: keras.Model) -> None:
    """Raises a ValueError if a model's inputs are not numbers of known shapes."""
    if not getattr(model, "inputs", None):
        raise ValueError(
            "The model must have known inputs: it must be Functional, or Sequential with a keras.Input. Received: "
            f"{type(model).__name__}. Return keras.Model(inputs, outputs)."
        )
    for tensor in model.inputs:
        _shape(tensor, 1)
        dtype = tf.as_dtype(tensor.dtype)
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
            raise ValueError(f"Inputs must be floats, integers or booleans. Received: {tensor.name!r} of dtype {tensor.dtype}")


def _inputs_of(model: keras.Model) -> Any:
    """Returns a model's only input, or its inputs by name."""
    return {tensor.name: tensor for tensor in model.inputs} if len(model.inputs) > 1 else model.inputs[0]


def _inputs(random: np.random.Generator, tensor: Any, batch_size: int, limit: int) -> Any:
    """Makes BATCHES batches for one input, of shape (BATCHES, batch size, ...)."""
    shape = _shape(tensor, batch_size)
    if tf.as_dtype(tensor.dtype).is_floating:
        return random.standard_normal(shape, dtype="float32")
    return random.integers(limit, size=shape)


def _targets(random: np.random.Generator, output: Any, loss: Any, batch_size: int) -> Any:
    """Makes BATCHES batches of targets for one output, of shape (BATCHES, batch size, ...)."""
    shape = _shape(output, batch_size)
    loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy) or loss is keras.losses.sparse_categorical_crossentropy:
        return random.integers(shape[-1], size=shape[:-1])
    return random.random(shape, dtype="float32")


def _losses(model: keras.Model, outputs: Any) -> list[Any]:
    """Lists the loss of each output."""
    if isinstance(model.loss, dict):
        return [model.loss.get(name) for name in (sorted(outputs) if isinstance(outputs, dict) else model.output_names)]
    losses = keras.tree.flatten(model.loss)
    return losses if len(losses) > 1 else losses * len(model.outputs)


def _shape(tensor: Any, batch_size: int) -> tuple[int, ...]:
    if None in tensor.shape[1:]:
        raise ValueError(
            f"Only the batch size may be unknown in the shapes of inputs and outputs. Received: {tensor.name!r} of shape "
            f"{tuple(tensor.shape)}. Give keras.Input its whole shape."
        )
    return (BATCHES, batch_size, *tensor.shape[1:])
