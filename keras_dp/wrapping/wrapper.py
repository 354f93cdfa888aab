"""Wrap a Keras model, and refuse models that cannot train on towers."""

import functools
import types
from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.versions import callback_classes
from keras_dp.wrapping.own_loops import CALLS, FUNCTIONS, STEPS, is_own, own_loops, view_for_loops
from keras_dp.wrapping.own_training import OwnTraining
from keras_dp.wrapping.proxy import Proxy
from keras_dp.wrapping.set_steps import SetSteps

# The attributes that Keras's trainer keeps on the model that it trains, or reads to feed it.
_TRAINER_STATE = (
    *("train_function", "test_function", "predict_function", "distribute_strategy", "distribute_reduction_method"),
    *("compiled", "run_eagerly", "steps_per_execution", "unrolled_steps_per_execution", "history"),
    *("stop_training", "stop_evaluating", "stop_predicting"),
)

# These save a model's graph or configuration, or swap its weights with the optimizer's. They do not steer training.
_OBSERVERS = callback_classes("OrbaxCheckpoint", "SwapEMAWeights", "TensorBoard")


class ModelWrapper(Proxy, keras.Model):
    """Wraps a `keras.Model`, which remains the model that is saved, shown and inspected.

    Args:
        inner_model: a `keras.Model`. If it overrides `fit`, `evaluate` or `predict`, the wrapper calls its method, in which
            `super().fit()` runs on towers.

    Raises:
        ValueError: if it is not a `keras.Model`, or cannot be trained on towers.
    """

    _inside = "inner_model"
    _own = frozenset({*_TRAINER_STATE, *CALLS, *FUNCTIONS, *STEPS})

    def __init__(self, inner_model: keras.Model):
        refuse_strategy()
        refuse_keras_2("model", inner_model)
        if not isinstance(inner_model, keras.Model):
            is_function = callable(inner_model) and not isinstance(inner_model, keras.Layer)
            raise ValueError(
                "DataParallelModel wraps a keras.Model, as keras.Sequential([...]) or keras.Model(inputs, outputs) makes them. "
                f"Received: {inner_model!r} of type {type(inner_model)}"
                f"{'. Call it, and wrap what it returns' if is_function else ''}"
            )
        if isinstance(inner_model, ModelWrapper):
            raise ValueError(f"The model is a DataParallelModel already; use it directly. Received: {inner_model.name!r}")
        _refuse_mirrored(inner_model)
        super().__init__(name=inner_model.name, dtype=inner_model.dtype_policy)
        self._calls_on_towers = 0
        self._own_loops = frozenset(own_loops(inner_model))
        self._own_training = OwnTraining(inner_model)
        self.inner_model = inner_model
        self._set_steps = SetSteps(inner_model)

    @functools.cached_property
    def _view_for_loops(self) -> Any:
        return view_for_loops(self.inner_model, self, _TRAINER_STATE)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or type(value) is not types.MethodType or "_own_training" not in vars(self):
            return value
        return self._own_training.watched(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in STEPS:
            super().__setattr__(name, value)
        elif getattr(value, "__self__", None) is self and value.__name__ == name:
            # The wrapper's own method was read before, and is set again.
            self._set_steps.restore(name)
        else:
            self._set_steps.set(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in STEPS:
            super().__delattr__(name)
        elif name in vars(self.inner_model):
            self._set_steps.restore(name)
        else:
            raise AttributeError(f"{name} was not set on {type(self).__name__} {self.name!r}")

    def _shown_for(self, name: str) -> Any:
        return self._view_for_loops if name in vars(self).get("_own_loops", ()) else super()._shown_for(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the inner model's outputs, computed on one device."""
        return self.inner_model(*args, **kwargs)

    def _show_inner_model(self, callbacks: Any) -> None:
        """Gives the inner model, in place of this one, to callbacks that read a model's class, configuration or optimizer."""

        def set_model(callback: keras.callbacks.Callback, model: keras.Model) -> None:
            type(callback).set_model(callback, model.inner_model if isinstance(model, ModelWrapper) else model)

        for callback in listed(callbacks):
            if isinstance(callback, _OBSERVERS):
                callback.set_model = functools.partial(set_model, callback)
                # Keras does not set the model again for an existing CallbackList; setting it twice would write twice.
                if isinstance(callbacks, keras.callbacks.CallbackList) and callback.model is not self.inner_model:
                    callback.set_model(self)


def listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Lists the callbacks in an argument of `fit`: None, one, several however nested, or a `CallbackList`."""
    inside = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks or []
    return list(keras.tree.flatten(inside))


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


def _refuse_mirrored(model: keras.Model) -> None:
    if model.distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "The model was built inside a tf.distribute scope, so that its variables are mirrored already. Build it outside. "
            f"Received: {model.name!r}, built under a {type(model.distribute_strategy).__name__}"
        )


def has_own_step(model: keras.Model) -> bool:
    """Returns whether a model overrides its training, test or prediction step."""
    return any(is_own(model, name) for name in STEPS)


def has_own_compile(model: keras.Model) -> bool:
    """Returns whether a model overrides `compile`."""
    return is_own(model, "compile")
