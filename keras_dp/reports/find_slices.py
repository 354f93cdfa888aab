"""Find into how many slices the rows of each device must be cut for a training step to fit in memory."""

import logging
from typing import Any

import tensorflow as tf

from keras_dp.batches.slicing import known_rows
from keras_dp.error_notes import add_note
from keras_dp.reports.step_graph import make_variables, restored_state, untouched
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.towers import TowerSteps
from keras_dp.wrapping.one_state import own_of

logger = logging.getLogger("keras_dp")


def find_slices(parallel: Any, batch: Any = None) -> int:
    """Finds into how many slices each device's rows must be cut for a training step to fit in memory, and cuts them so.

    Runs a training step with the current `slices_per_device`, and with twice as many as long as the memory of a device is too
    small. All variables are restored afterwards. Later steps may need a little more memory. If the model has trained before,
    and more slices are found, draws of `tf.random.normal` and the like begin again.

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
            changes other state than variables, or it is being trained, or there are several workers.
        tf.errors.ResourceExhaustedError: if the memory is too small for slices of one row. The number of slices is as before.
    """
    steps, batch = inspected("find_slices", parallel, batch, "train")
    trainer = own_of(parallel)
    if trainer.loops or trainer.workers.count > 1:
        where = f"in {trainer.loops[-1]}()" if trainer.loops else f"on {trainer.workers.count} workers"
        raise ValueError(
            "find_slices() cuts batches into other slices, which those that are on their way, or other workers, do not have. "
            f"Call it before training, on one worker, and give its result as slices_per_device. Received: a call {where}"
        )
    batch = steps.on_host(batch, finds_whole=True)
    rows, before = known_rows(batch, steps.inputs.whole) or 1, steps.options.slices_per_device
    make_variables(steps, "train", steps.slices_of(batch))
    while True:
        slices = steps.options.slices_per_device
        try:
            with untouched(steps):
                _run(steps, batch)
            return slices
        except tf.errors.ResourceExhaustedError as error:
            if max(steps.inputs.shares.sizes(rows)) <= 1:
                trainer.cut_into(before)
                add_note(error, "keras_dp: Not even slices of one row fit in the memory of a device.")
                raise
        trainer.cut_into(2 * slices)
        logger.info("A training step does not fit in memory with slices_per_device=%d. Trying %d.", slices, 2 * slices)


def _run(steps: TowerSteps, batch: Any) -> None:
    """Runs a training step, and restores all that it changes."""
    function = tf.function(lambda slices: steps.run_own("train", slices), autograph=False)
    slices = tuple(steps.slices_of(batch))
    function.get_concrete_function(slices)
    with restored_state(steps, "train"):
        function(slices)
