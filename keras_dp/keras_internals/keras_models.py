"""Read, build and move Keras's models through their private names."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from keras_dp.keras_internals.keras_optimizers import optimizers_of


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


def forget_traces(model: keras.Model) -> None:
    """Makes Keras's trainer retrace a model's steps when they are next called."""
    model.train_function = model.test_function = model.predict_function = None


def follow_moved(moved: Mapping[int, tf.Variable]) -> None:
    """Makes all functions that TensorFlow has traced take variables from where they live by now.

    They are not traced again, as on one device: a trace that Keras makes while it builds a model changes no variables, and a
    later one would. Python's garbage collector knows all of them: a model may keep one in a list, and a program may have its
    own.

    Args:
        moved: what `move_variable` has made, by the identity of the handle before.
    """

    def handle(captured: Any) -> Any:
        return moved[id(captured)].handle if id(captured) in moved else captured

    def reference(before: "weakref.ref[tf.Variable]") -> "weakref.ref[tf.Variable]":
        variable = before()
        return weakref.ref(moved[id(variable.handle)]) if variable is not None and id(variable.handle) in moved else before

    kind = type(tf.function(lambda: None).get_concrete_function())
    for traced in [one for one in gc.get_objects() if type(one) is kind]:
        if any(id(captured) in moved for captured in traced._captured_inputs):
            traced.set_external_captures([*map(handle, traced._captured_inputs)])
        traced.graph._weak_variables = [*map(reference, traced.graph._weak_variables)]


@functools.cache
def _names_of_keras() -> frozenset[str]:
    return frozenset(vars(keras.Model()))


def plain_attributes(model: keras.Model) -> tuple[Any, ...]:
    """Returns the attributes of a model that a program set to numbers and texts, and whether layers are frozen, to compare."""
    own = ((name, value) for name, value in vars(model).items() if name not in _names_of_keras())
    plain = [(name, value) for name, value in own if isinstance(value, bool | int | float | str | bytes | None)]
    return tuple(plain), tuple(layer.trainable for layer in flatten_layers(model))


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric behind `loss` in the logs."""
    return model._loss_tracker


def compile_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """Returns the container of the metrics given to `compile`; its `metrics` lists them once it is built."""
    return model._compile_metrics


def was_told_to_use_xla(model: keras.Model) -> bool:
    """Returns whether a model was compiled with `jit_compile=True`, as far as this differs from Keras's choice on GPUs."""
    return bool(model.jit_compile) and not model._resolve_auto_jit_compile()


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch with which a callback makes `fit` begin; None for the argument of `fit`."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes `fit` begin with an epoch, when a callback calls this as training begins."""
    model._initial_epoch = epoch


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Lists the states of the random generators of a model, and of the one for operations without a seed, if it exists."""
    states = [generator.state for layer in flatten_layers(model) for generator in layer._seed_generators]
    without_seed = global_state.get_global_attribute("global_seed_generator")
    return states if without_seed is None else [*states, without_seed.state]


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Lists the variables of a model, its optimizers, its metrics and its random number generators, once each."""
    of_optimizers = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    of_metrics = [variable for metric in model.metrics for variable in metric.variables]
    variables = [*model.variables, *of_optimizers, *of_metrics, *seed_states(model)]
    return list({id(variable): variable for variable in variables}.values())


@contextlib.contextmanager
def restored(variables: Sequence[Any]) -> Iterator[None]:
    """Restores the values of some variables afterwards."""
    restore = noted(variables)
    try:
        yield
    finally:
        restore()


def noted(variables: Sequence[Any]) -> Callable[[], None]:
    """Notes the values of some variables on the host, and returns a function that restores them."""
    before = [np.array(variable) for variable in variables]

    def restore() -> None:
        for variable, value in zip(variables, before, strict=True):
            # A value that is assigned needs memory of its own, of which a device may have none left.
            if np.array(variable).tobytes() != value.tobytes():
                variable.assign(value)

    return restore


def move_variable(variable: keras.Variable, device: str) -> None:
    """Moves the value of a variable to another device; the variable stays the same object, also for optimizers.

    Functions that were traced before keep the old value: see `follow_moved` and `is_left_behind`.
    """
    old = variable.value
    # A function that is being traced would take a variable that is read in the usual way for its own.
    value = tf.raw_ops.ReadVariableOp(resource=old.handle, dtype=old.dtype)
    with tf.device(device):
        variable._value = tf.Variable(value, trainable=old.trainable, name=variable.name, dtype=old.dtype)
    variable._value._unique_id = old._unique_id
    old._keras_dp_is_left_behind = True


def is_left_behind(value: tf.Variable) -> bool:
    """Returns whether a variable lives elsewhere by now, in another `tf.Variable`."""
    return getattr(value, "_keras_dp_is_left_behind", False)
