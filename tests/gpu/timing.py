"""Time the training steps of a model in this process."""

from typing import Any

import keras
import numpy as np

from keras_dp.cli.bench.measurement import StepTimes


def step_milliseconds(model: keras.Model, dataset: Any, steps: int, warm_up: int) -> np.ndarray:
    """Trains on an endless dataset, and returns the time of each step after the first ones.

    Args:
        model: a compiled model.
        dataset: endless batches.
        steps: the number of timed steps.
        warm_up: the number of untimed steps before them.
    """
    times = StepTimes()
    model.fit(dataset, steps_per_epoch=warm_up + steps, shuffle=False, callbacks=[times], verbose=0)
    return np.array(times.milliseconds()[warm_up:])
