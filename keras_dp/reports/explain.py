"""Explain a step of a `DataParallelModel` to its user, and warn of rows that it gathers."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from keras_dp import choices
from keras_dp.arithmetic.share import ArithmeticOfRows
from keras_dp.batches.slicing import Slice
from keras_dp.partition.inspecting import explanation
from keras_dp.partition.inspecting.explanation import Explanation
from keras_dp.partition.step import Partition
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.towers import TowerSteps

logger = logging.getLogger("keras_dp")


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
    steps, batch = inspected("explain", parallel, batch, step)
    slices = steps.slices_of(batch)
    partition, arithmetic = counted(steps, step, slices)
    explained = explanation.explain(partition, steps.inputs.devices, int(slices[0].batch_rows))
    return dataclasses.replace(explained, share_of_arithmetic=arithmetic.share if arithmetic else None)


def counted(steps: TowerSteps, step: choices.Step, slices: Sequence[Slice]) -> tuple[Partition, ArithmeticOfRows | None]:
    """Partitions a step without running it, and counts its arithmetic; None for arithmetic that is not known."""
    steps.make_layers(step, slices)
    with same_random_states():
        traced = steps.trace(step, slices)
        partition = traced.partition()
        return partition, traced.arithmetic(partition)


def warn_of_gathered_rows(partition: Partition, devices: Sequence[str], batch_rows: int) -> bool:
    """Warns about operations that gather many rows of batches of so many. Returns whether there is any."""
    notable = explanation.explain(partition, devices, batch_rows).notable()
    for once in notable:
        logger.warning(
            "%s gathers %s of rows in each step, and is computed once: %s%s. An operation on each row by itself, or a sum "
            "over rows, stays on the towers. print(parallel.explain(batch)) lists all operations that gather rows.",
            *(once.type, explanation.bytes_in_words(once.bytes or 0), once.reason, f" ({once.line})" if once.line else ""),
        )
    return bool(notable)
