"""Describe the facts of a model and its data that must be the same on all workers."""

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp.keras_internals import keras_models


def described_model(model: keras.Model) -> dict[str, Any]:
    """Describes the facts of a model that must be the same on all workers, by readable names."""
    layers = keras_models.flatten_layers(model)
    facts = {f"layer {i}": _configuration(layer) for i, layer in enumerate(layers)}
    if not model.compiled:
        return facts
    optimizer = {} if model.optimizer is None else _configuration(model.optimizer)
    return facts | {"the optimizer": optimizer, "the loss": _written(model.loss)}


def described_graph(nodes: Sequence[Any], variables: Sequence[tf.Variable], model: keras.Model) -> str:
    """Describes which operations a step has, in which order, on which of the model's variables; not their names and sizes.

    Args:
        nodes: the NodeDefs of the step, each after those that it takes.
        variables: the variables of the step.
        model: the model.
    """
    numbers = {node.name: number for number, node in enumerate(nodes)}
    of_model = {variable.value.ref(): number for number, variable in enumerate(keras_models.all_variables(model))}
    taken = [[numbers.get(name.lstrip("^").partition(":")[0]) for name in node.input] for node in nodes]
    operations = [f"{node.op}{inputs}" for node, inputs in zip(nodes, taken, strict=True)]
    described = f"{operations} {[of_model.get(variable.ref()) for variable in variables]}"
    return f"{len(nodes)} operations, checksum {hashlib.blake2b(described.encode(), digest_size=4).hexdigest()}"


def described_data(value: Any) -> Any:
    """Describes an argument of `fit`, `evaluate` or `predict` for comparison: arrays by dtype, shape and checksum."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return described_data(tf.nest.flatten(value, expand_composites=True))
    if tf.is_tensor(value) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return f"an array of shape {list(array.shape)}"
        sample = np.ascontiguousarray(array.flat[:: max(1, array.size // _SAMPLED_ELEMENTS)])
        digest = hashlib.blake2b(sample.tobytes(), digest_size=4).hexdigest()
        return f"{array.dtype} of shape {list(array.shape)}, checksum {digest}"
    if isinstance(value, dict):
        return {str(key): described_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described_data(item) for item in value]
    # Pipelines may differ in their last transformation, such as take(n). Their batches are compared while they train.
    return "Dataset" if isinstance(value, tf.data.Dataset) else type(value).__name__


_SAMPLED_ELEMENTS = 2**16


def _configuration(thing: Any) -> dict[str, Any]:
    """Returns an object's class and configuration, without names, seeds and rates. The chief sends seeds and rates to all."""
    try:
        config = thing.get_config()
    except Exception:  # A user's class whose configuration cannot be read is compared by its name.
        config = {}
    return {"class": type(thing).__name__, **_written(config)}


_LEFT_OUT = ("name", "seed", "layers", "input_layers", "output_layers", "nodes", "build_config")


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        # A rate that is a number is a variable, which the chief sends to all; schedules are compared, and dtypes as text.
        left_out = _LEFT_OUT if isinstance(value.get("learning_rate"), dict) else (*_LEFT_OUT, "learning_rate")
        kept = {str(key): item for key, item in value.items() if key not in left_out}
        return {key: str(item) if key == "dtype" else _written(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, keras.losses.Loss):
        return _configuration(value)
    return getattr(value, "__name__", type(value).__name__)
