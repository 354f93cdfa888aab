"""Refuse objects that cannot be wrapped."""

from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_models
from keras_dp.wrapping.one_state import is_made


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
