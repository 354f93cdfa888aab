"""Keep the steps that a program sets on a wrapper, in place of the steps of the model's class."""

from collections.abc import Callable
from typing import Any

import keras

Step = Callable[[Any], Any]


class SetSteps:
    """Sets steps on the inner model, since a step of the user's is written for a whole batch, and towers have slices.

    A step may call the one that it has replaced, as tools do that patch a model. It has read that one from the wrapper, whose
    method then runs the replaced step on the whole batch.

    Args:
        model: the inner model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._replaced: dict[str, list[Step]] = {}
        self._calls = 0  # of replaced steps within each other

    def set(self, name: str, step: Step) -> None:
        """Sets a step."""
        self._replaced.setdefault(name, []).append(getattr(self._model, name))
        setattr(self._model, name, step)

    def restore(self, name: str) -> None:
        """Removes all steps that were set in place of the class's own."""
        self._replaced.pop(name, None)
        vars(self._model).pop(name, None)

    def run_replaced(self, name: str, data: Any) -> Any:
        """Runs the step that was replaced last, on a whole batch; within that step, the one that it has replaced, and so on."""
        steps = self._replaced.get(name) or [getattr(type(self._model), name).__get__(self._model)]
        step = steps[max(len(steps) - 1 - self._calls, 0)]
        self._calls += 1
        try:
            return step(data)
        finally:
            self._calls -= 1
