"""Warn when a wrapped model is fitted directly, on one device."""

import logging
from typing import Any

import keras

logger = logging.getLogger("keras_dp")


class PlainTraining:
    """Takes the place of an inner model's train function: Keras makes none while there is one.

    Args:
        model: the inner model, which has no train function yet.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._told = False

    def __call__(self, iterator: Any) -> Any:
        """Warns, the first time, and replaces itself by Keras's own train function."""
        if not self._told:
            self._told = True
            logger.warning(
                "The model %r was compiled through its DataParallelModel, but is fitted directly: it trains on one device. To "
                "train on the towers, fit the DataParallelModel: parallel.fit(...).",
                self._model.name,
            )
        self._model.make_train_function(force=True)
        return self._model.train_function(iterator)
