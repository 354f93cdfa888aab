"""Say so when a wrapped model is fitted by itself, on one device."""

import logging
from typing import Any

import keras

logger = logging.getLogger("keras_dp")


class PlainTraining:
    """Stands where the train function of an inner model will be: Keras makes none as long as there is one.

    Args:
        model: the inner model, which has no train function.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._told = False

    def __call__(self, iterator: Any) -> Any:
        """Says what happens, the first time, and gives way to Keras's own train function."""
        if not self._told:
            self._told = True
            logger.warning(
                "The model %r was compiled through its DataParallelModel, and is fitted by itself: it trains on one device. To "
                "train on the towers, fit the DataParallelModel: parallel.fit(...).",
                self._model.name,
            )
        self._model.make_train_function(force=True)
        return self._model.train_function(iterator)
