"""Time the training steps of a model in this process."""

import numpy as np

from keras_dp.cli.bench.measurement import StepTimes


def step_milliseconds(model, dataset, steps, warm_up):
    """Trains on an endless dataset, and returns the time of each of so many steps after the untimed first ones."""
    times = StepTimes()
    model.fit(dataset, steps_per_epoch=warm_up + steps, shuffle=False, callbacks=[times], verbose=0)
    return np.array(times.milliseconds()[warm_up:])
