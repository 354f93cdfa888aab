"""Find into how many slices the rows of each device must be cut for a training step to fit in memory."""

from typing import Any

import tensorflow as tf

from keras_dp.reports.step_graph import restored_state, untouched
from keras_dp.reports.wrapped import inspected
from keras_dp.wrapping.one_state import own_of


def find_slices(parallel: Any, batch: Any = None) -> int:
    """Finds into how many slices each device's rows must be cut for a training step to fit in memory, and cuts them so.

    Runs a training step with the current `slices_per_device`, and with twice as many as long as the memory of a device is too
    small. All variables are restored afterwards. A tenth of the memory more may be needed when training goes on: other programs
    use the device, and memory is cut into pieces.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> keras_dp.find_slices(parallel, (np.ones((8, 4)), np.ones((8, 1))))
    1

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.

    Returns:
        The number of slices of each device, with which `parallel` trains from now on.

    Raises:
        ValueError: if the model is not a compiled `DataParallelModel`, or runs eagerly, or needs another batch, or its step
            changes other state than variables, or there are several workers.
        tf.errors.ResourceExhaustedError: if the memory is too small for slices of one row.
    """
    steps, batch = inspected("find_slices", parallel, batch, "train")
    trainer = own_of(parallel)
    trainer.refuse_workers_that_search()
    batch = steps.on_host(batch, finds_whole=True)

    def step() -> None:
        function = tf.function(lambda slices: steps.run_own("train", slices), autograph=False)
        slices = tuple(steps.slices_of(batch))
        function.get_concrete_function(slices)
        with restored_state(steps, "train"), steps.naming_failures():
            function(slices)

    with untouched(steps):
        trainer.fitting_slices.fitted("train", batch, step)
    return steps.slices_per_device
