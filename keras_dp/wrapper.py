"""ModelWrapper: a Keras model that shows another one's face, and says which models it cannot show."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams

_STEPS = ("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function")

# What Keras's trainer sets on the model that it trains, beside what it sets on every model when it is made.
_TRAINER_SETS = {"optimizer", "history", "stop_training", "stop_evaluating", "stop_predicting"}

# These write down a model's graph or configuration, or exchange its weights with the optimizer's: they do not steer training.
_OBSERVERS = (keras.callbacks.OrbaxCheckpoint, keras.callbacks.SwapEMAWeights, keras.callbacks.TensorBoard)


class ModelWrapper(keras.Model):
    """A `keras.Model` around an inner one, which remains the model that is saved, shown and inspected.

    Args:
        inner_model: a `keras.Model` with Keras's own training steps.

    Raises:
        ValueError: if it is not.
    """

    def __init__(self, inner_model: keras.Model):
        refuse_strategy()
        if not isinstance(inner_model, keras.Model):
            raise ValueError(f"DataParallelModel wraps a keras.Model. Received: {inner_model!r} of type {type(inner_model)}")
        if isinstance(inner_model, ModelWrapper):
            raise ValueError(f"The model is a DataParallelModel already; use it as it is. Received: {inner_model.name!r}")
        _refuse_mirrored(inner_model)
        _refuse_own_steps(inner_model)
        _refuse_stateful(inner_model)
        super().__init__(name=inner_model.name, dtype=inner_model.dtype_policy)
        self.inner_model = inner_model
        self.built = inner_model.built

    def __getattr__(self, name: str) -> Any:
        """What a `keras.Model` does not have, such as `inputs` or the attributes of a user's class, is the inner model's."""
        if name.startswith("_") or name == "inner_model":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of a user's class are set on the inner model, where its methods read them."""
        inner_model = vars(self).get("inner_model")
        is_own = name.startswith("_") or name in vars(self) or name in _TRAINER_SETS or hasattr(type(self), name)
        if inner_model is None or is_own or not hasattr(inner_model, name):
            super().__setattr__(name, value)
        else:
            setattr(inner_model, name, value)

    def show_inner_model(self, callbacks: Any) -> None:
        """Has callbacks that ask for a model's class, configuration or optimizer see the inner model in place of this one."""

        def set_model(callback: keras.callbacks.Callback, model: keras.Model) -> None:
            type(callback).set_model(callback, model.inner_model if isinstance(model, ModelWrapper) else model)

        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        for callback in keras.tree.flatten(callbacks.callbacks if is_list else callbacks or []):
            if isinstance(callback, _OBSERVERS):
                callback.set_model = functools.partial(set_model, callback)
                if is_list:
                    callback.set_model(self)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The inner model's outputs, on one device."""
        if keras_seams.accepts_training(self.inner_model):
            return self.inner_model(inputs, training=training)
        return self.inner_model(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The inner model's loss, on one device. See `keras.Model.compute_loss`."""
        return self.inner_model.compute_loss(*args, **kwargs)

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the inner model's metrics, and returns them. See `keras.Model.compute_metrics`."""
        return self.inner_model.compute_metrics(*args, **kwargs)

    @property
    def layers(self) -> list[keras.Layer]:
        """The inner model's layers."""
        return self.inner_model.layers

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The inner model's metrics."""
        return self.inner_model.metrics

    def get_metrics_result(self) -> dict[str, Any]:
        """The results of the inner model's metrics."""
        return self.inner_model.get_metrics_result()

    def reset_metrics(self) -> None:
        """Resets the inner model's metrics."""
        self.inner_model.reset_metrics()

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the inner model, with its optimizer; the file loads without keras_dp. See `keras.Model.save`."""
        return self.inner_model.save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the inner model's weights. See `keras.Model.save_weights`."""
        return self.inner_model.save_weights(*args, **kwargs)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the inner model's weights. See `keras.Model.load_weights`."""
        return self.inner_model.load_weights(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Exports the inner model. See `keras.Model.export`."""
        return self.inner_model.export(*args, **kwargs)

    def summary(self, *args: Any, **kwargs: Any) -> Any:
        """Prints the inner model's summary. See `keras.Model.summary`."""
        return self.inner_model.summary(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Refused: a wrapper is never serialized.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "A DataParallelModel is not serialized, cloned or pickled itself: the inner model is what is kept. Use "
            f"parallel.save(...), or parallel.inner_model in its place. Received: {self.name!r}"
        )


def refuse_strategy() -> None:
    """Raises a ValueError inside a `tf.distribute` scope."""
    if tf.distribute.has_strategy():
        raise ValueError(
            "keras_dp distributes the model itself and cannot run inside a tf.distribute scope. Remove "
            f"`with strategy.scope():`. Received: {type(tf.distribute.get_strategy()).__name__}"
        )


def _refuse_mirrored(model: keras.Model) -> None:
    if model.distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "The model was built inside a tf.distribute scope, so that its variables are mirrored already. Build it outside. "
            f"Received: {model.name!r}, built under a {type(model.distribute_strategy).__name__}"
        )


def _refuse_own_steps(model: keras.Model) -> None:
    for name in _STEPS:
        if _function(getattr(model, name)) is not getattr(keras.Model, name):
            raise ValueError(
                f"The model has its own {name}(), which cannot be cut into towers. Override compute_loss() instead, and call "
                "keras_dp.cross_tower_sum() in layers and losses where all rows of the global batch count. "
                f"Received: {model.name!r} of type {type(model).__name__}"
            )


def _refuse_stateful(model: keras.Model) -> None:
    for layer in keras_seams.flatten_layers(model):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"The layer {layer.name!r} is stateful: it keeps a state for each row of a fixed batch, and the towers have "
                "slices of other sizes. Build it with stateful=False, or train the model on one device."
            )


def _function(method: Callable[..., Any]) -> Any:
    return getattr(method, "__func__", method)
