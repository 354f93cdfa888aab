"""Warn when a method of a model's own class trains or evaluates the model on one device."""

import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import keras

from keras_dp.wrapping.one_state import own_of, users_class

CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

logger = logging.getLogger("keras_dp")


def is_own(model: keras.Model, name: str) -> bool:
    """Returns whether a model overrides a method of `keras.Model`."""
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def has_own_step(model: keras.Model) -> bool:
    """Returns whether a model overrides its training, test or prediction step."""
    return any(is_own(model, name) for name in ("train_step", "test_step", "predict_step"))


def own_function(model: keras.Model, step: str) -> Any:
    """Returns the function that a program has set for a step, as `model.train_function`; None if a method makes it."""
    function = getattr(model, f"{step}_function")
    module = getattr(getattr(function, "python_function", function), "__module__", None) or ""
    is_made = is_own(model, f"make_{step}_function") or module.startswith(("keras.", "keras_dp."))
    return None if is_made else function


def listed(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Lists the callbacks in an argument of `fit`: None, one, several however nested, or a `CallbackList`."""
    inside = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks or []
    return list(keras.tree.flatten(inside))


def watched_methods(own_class: type) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a user's class, by name, so that each warns, once, if all that it computes is on one device.

    Methods that override others of Keras are left out, except `fit`, `evaluate`, `predict` and `*_on_batch`.
    """
    own = [base for base in own_class.__mro__ if base not in keras.Model.__mro__ and not base.__module__.startswith("keras.")]
    names = dict.fromkeys(name for base in own for name in vars(base))
    found = ((name, inspect.getattr_static(own_class, name)) for name in names)
    return {
        name: _watched(name, member)
        for name, member in found
        if isinstance(member, types.FunctionType)
        and any(vars(base).get(name) is member for base in own)
        and not name.startswith("_")
        and (name in CALLS or not hasattr(keras.Model, name))
        and not _runs_later(member)
    }


def _watched(name: str, function: types.FunctionType) -> Callable[..., Any]:
    """Wraps a method. It has computed on one device if optimizers have made updates, or nothing else can be seen of it.

    A method that has once used towers may call functions that were traced then, and whose steps cannot be seen any more.
    """

    @functools.wraps(function)
    def method(parallel: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = own_of(parallel)
        uses, updates = trainer.uses, trainer.updates()
        # A program may have replaced the method of the class since.
        result = getattr(users_class(type(parallel)), name)(parallel, *args, **kwargs)
        if trainer.uses > uses:
            trainer.methods_on_towers.add(name)
        elif name in CALLS or trainer.updates() > updates:
            if name not in trainer.methods_on_towers:
                trainer.messages.method_ran_alone(name, name if name in CALLS else "fit")
            trainer.methods_on_towers.add(name)
        return result

    return method


def _runs_later(function: Any) -> bool:
    """Returns whether a call of a function only makes a generator or a coroutine."""
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return any(is_of_kind(function) for is_of_kind in kinds)
