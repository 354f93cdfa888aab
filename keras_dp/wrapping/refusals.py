"""Refuse objects that cannot be wrapped."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_models
from keras_dp.wrapping.in_front import InFront
from keras_dp.wrapping.one_state import is_made

# Keras's own steps ask the model for these.
PARTS_OF_STEPS = frozenset(
    ["__call__", "call", "compute_loss", "compute_metrics", "get_metrics_result", "losses", "metrics", "trainable_weights"]
)


def refuse_what_cannot_train(model: Any) -> None:
    """Raises a ValueError for all but a `keras.Model` that can train on towers."""
    refuse_strategy()
    refuse_keras_2("model", model)
    if not isinstance(model, keras.Model):
        is_function = callable(model) and not isinstance(model, keras.Layer)
        raise ValueError(
            "DataParallelModel wraps a keras.Model, as keras.Sequential([...]) or keras.Model(inputs, outputs) makes them. "
            f"Received: {model!r} of type {type(model)}"
            f"{'. Call it, and wrap what it returns' if is_function else ''}"
        )
    if is_made(model):
        raise ValueError(f"The model is a DataParallelModel already; use it directly. Received: {model.name!r}")
    if model.distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "The model was built inside a tf.distribute scope, so that its variables are mirrored already. Build it outside. "
            f"Received: {model.name!r}, built under a {type(model.distribute_strategy).__name__}"
        )


def refuse_strategy() -> None:
    """Raises a ValueError inside a `tf.distribute` scope."""
    if tf.distribute.has_strategy():
        raise ValueError(
            "keras_dp distributes the model itself and cannot run inside a tf.distribute scope. Remove "
            f"`with strategy.scope():`. Received: {type(tf.distribute.get_strategy()).__name__}"
        )


def refuse_keras_2(kind: str, value: Any) -> None:
    """Raises a ValueError for a model or optimizer of Keras 2, which has other packages than Keras 3."""
    if keras_models.is_of_keras_2(value):
        raise ValueError(
            f"This {kind} is of Keras 2, and keras_dp is for Keras 3. Make it with `import keras`, not tf_keras; if it comes "
            f"from tf.keras, unset TF_USE_LEGACY_KERAS. Received: {value!r} of type {type(value)}"
        )


def refuse_parts_of_steps(kind: type, own: Sequence[type]) -> None:
    """Raises a TypeError if a subclass of DataParallelModel has a step, or a part of one: those of the model inside run.

    Args:
        kind: the subclass.
        own: the classes before DataParallelModel in its order of methods.
    """
    steps = PARTS_OF_STEPS.union(name for name in vars(InFront) if not name.startswith("_"))
    hidden = sorted(steps.intersection(name for one in own for name in vars(one)))
    if hidden:
        raise TypeError(
            f"A subclass of DataParallelModel has no {hidden[0]} of its own: steps are the model's. Define it in the class of "
            f"the model, and wrap that. Received: {kind.__name__} with {', '.join(hidden)}"
        )


def refuse_model_of_its_own(parallel: Any, model: Any) -> None:
    """Raises a TypeError for an object of a subclass of DataParallelModel that was made without its model."""
    if not is_made(parallel):
        raise TypeError(
            f"{type(parallel).__name__} must take the model as its first argument, or as inner_model: the class of a wrapper "
            "is made from the model's, before __init__ runs. Make the model outside, in a function for instance. "
            f"Received: no model before __init__, and {model!r} in it"
        )
