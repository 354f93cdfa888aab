"""Explain a step of a `DataParallelModel` to its user."""

import dataclasses
from typing import Any

from keras_dp import choices
from keras_dp.partition.inspecting.explanation import Explanation
from keras_dp.reports.explaining import counted, explained
from keras_dp.reports.wrapped import inspected


def explain(parallel: Any, batch: Any = None, step: choices.Step = "train") -> Explanation:
    """Explains how a step is partitioned: where towers meet, how many bytes they send, and what is computed once.

    Counts the share of the arithmetic that towers divide among themselves. The step is traced for it, also with other numbers
    of rows: Python code in the step runs more often. The states of `random` and NumPy remain as they are.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> parallel.explain((np.ones((8, 4)), np.ones((8, 1)))).once
    []

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".

    Raises:
        ValueError: if there is no such step, the model is not a compiled `DataParallelModel`, or runs eagerly, or needs
            another batch.
    """
    trainer, batch = inspected("explain", parallel, batch, step)
    steps = trainer.tower_steps
    slices = steps.slices_of(batch)
    partition, arithmetic = counted(steps, step, slices)
    explanation = explained(partition, steps, int(slices[0].batch_rows))
    return dataclasses.replace(explanation, share_of_arithmetic=arithmetic.share if arithmetic else None)
