"""Explain how a step of a model is partitioned, and warn of rows that it gathers."""

import logging
from collections.abc import Sequence

from keras_dp import choices
from keras_dp.arithmetic.share import ArithmeticOfRows
from keras_dp.batches.slicing import Slice
from keras_dp.partition.inspecting.explanation import Explanation, bytes_in_words, explain
from keras_dp.partition.step import Partition
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.towers import TowerSteps

logger = logging.getLogger("keras_dp")


def counted(steps: TowerSteps, step: choices.Step, slices: Sequence[Slice]) -> tuple[Partition, ArithmeticOfRows | None]:
    """Partitions a step without running it, and counts its arithmetic; None for arithmetic that is not known."""
    steps.make_layers(step, slices)
    with same_random_states():
        traced = steps.trace(step, slices)
        partition = traced.partition()
        return partition, traced.arithmetic(partition)


def explained(partition: Partition, steps: TowerSteps, batch_rows: int) -> Explanation:
    """Explains a partition for so many rows."""
    return explain(partition, steps.inputs.devices, batch_rows)


def warn_of_gathered_rows(explanation: Explanation) -> bool:
    """Warns about operations that gather many rows. Returns whether there is any."""
    notable = explanation.notable()
    for once in notable:
        logger.warning(
            "%s gathers %s of rows in each step, and is computed once: %s%s. An operation on each row by itself, or a sum "
            "over rows, stays on the towers. print(parallel.explain(batch)) lists all operations that gather rows.",
            *(once.type, bytes_in_words(once.bytes or 0), once.reason, f" ({once.line})" if once.line else ""),
        )
    return bool(notable)
