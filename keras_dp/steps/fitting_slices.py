"""Cut the rows of devices into more slices when the memory of a device is too small for a step."""

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.slicing import known_rows, leaf_types
from keras_dp.keras_internals.keras_models import all_variables, noted
from keras_dp.keras_internals.replacing import replaced
from keras_dp.partition.tensorflow_internals import outside_of_traces
from keras_dp.steps.random_states import noted_random_states
from keras_dp.steps.towers import TowerSteps

logger = logging.getLogger("keras_dp")


class FittingSlices:
    """Runs first steps in as few slices as fit in the memory of the devices.

    A step that runs out of memory changes no weight, but may have drawn random numbers and counted an update: that is undone.

    Args:
        is_wanted: whether first steps are tried with more slices.
        steps: the steps on towers.
        cut_into: cuts each device's rows into a number of slices.
    """

    def __init__(self, is_wanted: bool, steps: TowerSteps, cut_into: Callable[[int], None]):
        self.is_wanted = is_wanted
        self._steps, self._cut_into = steps, cut_into
        self._fitted: set[tuple[str, str]] = set()

    def is_due(self, name: choices.Step, types: Any) -> bool:
        """Returns whether the next step for batches of some types may not fit."""
        return self.is_wanted and (name, repr(types)) not in self._fitted

    def run(self, name: choices.Step, batch: Any, step: Callable[[], Any], types: Any = None) -> Any:
        """Runs a step, and if it is the first one, with as many slices as it needs.

        Args:
            name: the step.
            batch: a global batch.
            step: runs the step with the current number of slices.
            types: the types of its batches; None for those of the batch.
        """
        if self.is_wanted and types is None:
            types = leaf_types(batch)
        if not self.is_due(name, types):
            return step()
        result = self.fitted(name, batch, step)
        self._fitted.add((name, repr(types)))
        return result

    def fitted(self, name: choices.Step, batch: Any, step: Callable[[], Any]) -> Any:
        """Runs a step, again with twice as many slices as long as a device has too little memory.

        Args:
            name: the step.
            batch: a global batch.
            step: runs the step with the current number of slices.

        Raises:
            tf.errors.ResourceExhaustedError: if the memory is too small for slices of one row.
        """
        steps = self._steps
        rows = known_rows(batch, steps.inputs.whole) or 1
        made, notes = steps.variables_made, self._noted()

        def variables_made() -> None:
            nonlocal notes
            made()
            with outside_of_traces():
                notes = self._noted()

        while True:
            slices = steps.slices_per_device
            try:
                with replaced(steps, "variables_made", variables_made):
                    return step()
            except tf.errors.ResourceExhaustedError:
                if max(steps.inputs.shares.sizes(rows)) <= 1:
                    raise
            for restore in notes:
                restore()
            self._cut_into(2 * slices)
            logger.warning(
                "The memory of a device is too small for its rows in %s: each device computes them in %d slices now, one after "
                "the other, with the same result.",
                "one slice" if slices == 1 else f"{slices} slices",
                2 * slices,
            )

    def _noted(self) -> tuple[Callable[[], None], ...]:
        """Notes all that a failed step may have changed, and returns functions that restore it."""
        return noted(all_variables(self._steps.model)), noted_random_states()
