"""Make `keras.models.clone_model` tell what it has cloned."""

import functools
from collections.abc import Callable
from typing import Any

from keras.src.models import cloning
from keras.src.saving import serialization_lib


class _Configuration(dict[str, Any]):
    """Is the configuration of a model, which remembers the model."""

    model: Any


class _Serialization:
    """Replaces Keras's serialization in the module that clones models.

    Args:
        of_clone: see `pass_clones_through`.
    """

    def __init__(self, of_clone: Callable[[Any, Any], Any]):
        self._of_clone = of_clone

    def serialize_keras_object(self, model: Any) -> _Configuration:
        """Returns the configuration of a model."""
        config = _Configuration(serialization_lib.serialize_keras_object(model))
        config.model = model
        return config

    def deserialize_keras_object(self, config: _Configuration, **arguments: Any) -> Any:
        """Returns a model of a configuration."""
        return self._of_clone(config.model, serialization_lib.deserialize_keras_object(config, **arguments))


def pass_clones_through(of_clone: Callable[[Any, Any], Any]) -> None:
    """Makes `clone_model` return `of_clone(model, clone)` in place of a clone, from now on, wherever it was imported."""

    def passing(clone_model: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clone_model)
        def cloned(model: Any, *args: Any, **kwargs: Any) -> Any:
            return of_clone(model, clone_model(model, *args, **kwargs))

        return cloned

    cloning._clone_sequential_model = passing(cloning._clone_sequential_model)
    cloning._clone_functional_model = passing(cloning._clone_functional_model)
    cloning.serialization_lib = _Serialization(of_clone)
