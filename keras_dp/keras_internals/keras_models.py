"""Read, build and move Keras's models through their private names."""

import random
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.random import seed_generator


def is_of_keras_2(value: Any) -> bool:
    """Returns whether an object is from Keras 2, which is in other packages than Keras 3."""
    return any(base.__module__.startswith(("tf_keras.", "tensorflow.python.keras.")) for base in type(value).__mro__)


def flatten_layers(model: keras.Model) -> list[keras.Layer]:
    """Lists the model and every layer inside it, at any depth."""
    return list(model._flatten_layers())


def call_model(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model as Keras does: with `training` if its `call` takes that argument."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def is_built(model: keras.Model) -> bool:
    """Returns whether the model and all its layers have their variables."""
    return all(layer.built for layer in flatten_layers(model))


def build(model: keras.Model, x: Any) -> None:
    """Creates the variables of a model from the type specs of its inputs, unless it has them already."""
    if is_built(model):
        return
    keras_backend.compute_output_spec(lambda: call_model(model, keras.tree.map_structure(_placeholder, x), training=False))


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Creates the variables of a compiled model's metrics, losses and optimizer, from the type specs of a batch.

    Does the same as `model._symbolic_build`, which supports dense tensors only.
    """
    has_metrics = model._compile_metrics is not None and not model._compile_metrics.built
    has_loss = model._compile_loss is not None and not model._compile_loss.built

    def forward() -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_placeholder, batch))
        y_pred = call_model(model, x, training=False)
        if has_metrics:
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        if has_loss:
            model._compute_loss(x, y, y_pred, sample_weight, training=False)

    if has_metrics or has_loss:
        keras_backend.compute_output_spec(forward)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def _placeholder(spec: Any) -> Any:
    """Creates a placeholder for a type spec, dense, ragged or sparse, in the current graph."""
    if spec is None:
        return None
    if isinstance(spec, tf.TensorSpec):
        return tf.compat.v1.placeholder(spec.dtype, spec.shape)
    parts = tf.nest.map_structure(lambda part: tf.compat.v1.placeholder(part.dtype, part.shape), spec._component_specs)
    return spec._from_components(parts)


def forget_traces(model: keras.Model) -> None:
    """Makes Keras's trainer retrace a model's steps when they are next called."""
    model.train_function = model.test_function = model.predict_function = None


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric behind `loss` in the logs."""
    return model._loss_tracker


def compile_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """Returns the container of the metrics given to `compile`; its `metrics` lists them once it is built."""
    return model._compile_metrics


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch with which a callback makes `fit` begin; None for the argument of `fit`."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes `fit` begin with an epoch, when a callback calls this as training begins."""
    model._initial_epoch = epoch


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Lists the states of the random generators of a model; the last one serves operations without a seed."""
    states = [generator.state for layer in flatten_layers(model) for generator in layer._seed_generators]
    # The first call creates that generator with a seed from Python's `random`. The user's random numbers stay the same.
    before = random.getstate()
    try:
        return [*states, seed_generator.global_seed_generator().state]
    finally:
        random.setstate(before)


def move_variable(variable: keras.Variable, device: str) -> None:
    """Moves the value of a variable to another device; the variable stays the same object, also for optimizers."""
    old = variable.value
    with tf.device(device):
        variable._value = tf.Variable(old, trainable=old.trainable, name=variable.name, dtype=old.dtype)
    variable._value._unique_id = old._unique_id
