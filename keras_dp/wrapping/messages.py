"""Tell the user of a wrapper what computes on one device, most of it once."""

import logging

logger = logging.getLogger("keras_dp")


class Messages:
    """Holds which messages a wrapper has told."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def has_told(self, message: str) -> bool:
        """Returns whether a message has been told."""
        return message in self._told

    def note(self, message: str) -> None:
        """Remembers that a message has been told."""
        self._told.add(message)

    def is_first(self, message: str) -> bool:
        """Returns whether a message has not been told so far, and remembers it."""
        is_first = not self.has_told(message)
        self.note(message)
        return is_first

    def model_was_called(self) -> None:
        """Logs, once, that a call of the model computes on one device."""
        if self.is_first("call"):
            logger.info(
                "Calling the model computes on one device, and a loop of your own that does so trains there. The towers run in "
                "fit, evaluate, predict and the *_on_batch methods: in a loop, call train_on_batch(x, y)."
            )

    def runs_eagerly(self) -> None:
        """Warns, once, that the model inside runs without towers."""
        if self.is_first("eager"):
            logger.warning(
                "The inner model runs eagerly on one device, without towers, so that it can be debugged line by line. "
                'The result is the same as with batch_norm="sync".'
            )

    def method_ran_alone(self, method: str, instead: str) -> None:
        """Warns that a method of the user's class has computed on one device, and names the method of Keras to call in it."""
        logger.warning(
            "The model's own %s() ran on one device: it called neither super().%s(), nor train_on_batch(), train_step() or "
            "similar methods, which run on the towers. See docs/own_steps.md.",
            *(method, instead),
        )
