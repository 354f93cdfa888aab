"""Define the names that a wrapped model has twice: one for towers, and one for the model inside."""

import copy
from typing import Any

import keras

from keras_dp.keras_internals.checkpoints import CheckpointedOptimizer
from keras_dp.wrapping.in_trace import in_trace
from keras_dp.wrapping.one_state import Front, own_of, users_class


class OfTowers:
    """Is an attribute that a wrapper's trainer has in place of the model inside."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Remembers the name."""
        self._name = name

    def __get__(self, parallel: Any, owner: type) -> Any:
        """Returns the trainer's attribute; of a class, the user's."""
        return getattr(users_class(owner), self._name) if parallel is None else getattr(own_of(parallel), self._name)

    def __set__(self, parallel: Any, value: Any) -> None:
        """Sets the trainer's attribute."""
        setattr(own_of(parallel), self._name, value)


class Step:
    """Is a step of the model, which runs on towers. A step that is set on a wrapper is set on the model inside."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Remembers the name."""
        self._name = name

    def __get__(self, parallel: Any, owner: type) -> Any:
        """Returns the step on towers; of a class, the user's own."""
        if parallel is None:
            return getattr(users_class(owner), self._name)
        own = own_of(parallel)
        return own.on_towers(parallel, getattr(own.inside, self._name))

    def __set__(self, parallel: Any, step: Any) -> None:
        """Sets a step of a whole batch. A step that was read from a wrapper before is the model's own again."""
        inside = own_of(parallel).inside
        step = getattr(step, "step_of_model", step)
        if getattr(step, "__func__", None) is getattr(type(inside), self._name):
            vars(inside).pop(self._name, None)
        else:
            setattr(inside, self._name, step)

    def __delete__(self, parallel: Any) -> None:
        """Removes a step that was set."""
        delattr(own_of(parallel).inside, self._name)


class LastHistory:
    """Is the history of the last `fit`. The model inside has a copy that refers to it, and keeps no wrapper alive."""

    def __get__(self, parallel: Any, owner: type) -> Any:
        """Returns the history, also one of the model inside, trained by itself."""
        if parallel is None:
            return self
        own = own_of(parallel)
        history, kept = own.history
        return history if own.inside.history is kept else own.inside.history

    def __set__(self, parallel: Any, history: Any) -> None:
        """Sets the history of both."""
        own, kept = own_of(parallel), history
        if isinstance(history, keras.callbacks.History):
            kept = copy.copy(history)
            kept.set_model(own.inside)
        own.history = history, kept
        own.inside.history = kept


class InFront(CheckpointedOptimizer, Front):
    """Stands in front of the user's class in the class of a wrapper. All that it does not define is one for both.

    - Steps run on towers. The model inside has the user's, which are traced.
    - Functions of Keras's trainer are compiled for towers. The model inside trains with its own, on one device.
    - The strategy cuts batches, and the optimizer combines gradients. The model inside has neither.
    - `history` refers to the wrapper, and that of the model inside to the model inside.
    - `jit_compile` is whether XLA compiles what towers compute.
    - A call is one of the model inside, which becomes the layer of a model that calls a wrapper.
    """

    __slots__ = ()

    train_step = Step()
    test_step = Step()
    predict_step = Step()
    train_function = OfTowers()
    test_function = OfTowers()
    predict_function = OfTowers()
    distribute_strategy = OfTowers()
    optimizer = OfTowers()
    jit_compile = OfTowers()
    history = LastHistory()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs, computed on one device."""
        own = own_of(self)
        if len(own.devices) > 1 and not own.loops and not in_trace():
            values = keras.tree.flatten((args, kwargs))
            if not any(isinstance(value, keras.KerasTensor) for value in values):
                own.messages.model_was_called()
        return own.inside(*args, **kwargs)

    def __dir__(self) -> list[str]:
        # Keras saves all parts that `dir` names, and the model inside is no part of itself.
        names = {*dir(type(self)), *vars(self)}
        return sorted(names if hasattr(own_of(self).inside, "inner_model") else names - {"inner_model"})
