"""Warn when a method that a model's class adds trains the model on one device."""

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

logger = logging.getLogger("keras_dp")


class OwnTraining:
    """Watches the methods that a user's class adds to `keras.Model`, such as a `train(dataset)`.

    They run as they are, on the model itself: a step that they call is eager Python there, and may be any function. So they
    train on one device.

    Args:
        model: the inner model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._told = False
        self._watched = functools.cache(self._watch)

    def watched(self, method: types.MethodType) -> types.MethodType:
        """Returns a method of the model that warns, the first time that optimizers of the model make updates in it."""
        function = method.__func__
        is_plain = isinstance(function, types.FunctionType) and not _runs_later(function)
        if not is_plain or method.__self__ is not self._model or hasattr(keras.Model, function.__name__):
            return method
        return types.MethodType(self._watched(function), self._model)

    def _watch(self, function: types.FunctionType) -> Callable[..., Any]:
        @functools.wraps(function)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._updates()
            result = function(model, *args, **kwargs)
            if not self._told and self._updates() > before:
                self._told = True
                logger.warning(
                    "The model's own %s() trained on one device: it ran on the model itself. To train on the towers, call "
                    "fit(dataset) of the DataParallelModel, or its train_step(data) in a loop outside of the model, where data "
                    "may be any nested structure of tensors with rows; see docs/own_steps.md.",
                    function.__name__,
                )
            return result

        return method

    def _updates(self) -> int:
        """Returns how many updates the optimizers that are attributes of the model have made; 0 while a function is traced."""
        if not tf.executing_eagerly():
            return 0
        return sum(int(one.iterations) for one in vars(self._model).values() if isinstance(one, keras.optimizers.Optimizer))


def _runs_later(function: Any) -> bool:
    """Returns whether a call of a function only makes a generator or a coroutine."""
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_of_kind(function) for is_of_kind in kinds)
