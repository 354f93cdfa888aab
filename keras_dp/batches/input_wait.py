"""Log how long towers wait for input."""

import time
from typing import Any

import keras

from keras_dp.partition.tensorflow_internals import op_determinism_is_on


class InputWait(keras.callbacks.Callback):
    """Logs `input_wait`: the share of an epoch's time, 0 to 1, in which the towers waited for their slices.

    If it is far from 0, the input pipeline limits training, and more towers will not make it faster.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> data = np.ones((8, 4)), np.ones((8, 1))
    >>> history = parallel.fit(*data, callbacks=[keras_dp.callbacks.InputWait()], verbose=0).history
    >>> 0 <= history["input_wait"][0] <= 1
    True

    Validation counts as well. In a profile, the same time shows as `IteratorGetNext`.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts to measure.

        Raises:
            ValueError: if the model is not a `DataParallelModel`, or TensorFlow's op determinism is on.
        """
        waiting = getattr(self.model.distribute_strategy, "waiting", None)
        if waiting is None:
            raise ValueError(
                "InputWait measures the towers of a DataParallelModel. Pass it to the fit() of such a model. "
                f"Received: model={self.model!r}"
            )
        if op_determinism_is_on():
            raise ValueError(
                "InputWait reads the time in each step, which TensorFlow refuses after "
                "tf.config.experimental.enable_op_determinism(). Leave out the callback, or the call."
            )
        self._waited = waiting.seconds
        self._waited.assign(0.0)
        self._begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `input_wait` to the epoch's logs."""
        if logs is not None:
            logs["input_wait"] = min(float(self._waited.numpy()) / (time.perf_counter() - self._begin), 1.0)
