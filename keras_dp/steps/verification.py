"""Compare the first step of each trace with one device, while a model trains."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.slicing import Slice, own_spec
from keras_dp.batches.whole_tensors import leaves_of
from keras_dp.keras_internals.keras_models import all_variables
from keras_dp.partition.inspecting.comparison import compare, compare_ends
from keras_dp.partition.inspecting.other_state import call_of_python, change_of_other_state
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.towers import TowerSteps

logger = logging.getLogger("keras_dp")

_ENVIRONMENT_VARIABLE = "KERAS_DP_VERIFY"
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_TOLERANCE_OF_OTHERS = 1e-2


def tolerance() -> float:
    """Returns the largest difference that counts as none, for Keras's dtype."""
    return _TOLERANCES.get(keras.config.floatx(), _TOLERANCE_OF_OTHERS)


class Verification:
    """Runs the first step of each trace on one device, too, and refuses to go on if the results differ.

    Args:
        steps: the steps on towers.
    """

    def __init__(self, steps: TowerSteps):
        self._steps = steps
        self._verified: set[tuple[str, str]] = set()

    def is_new(self, name: choices.Step, types: Any) -> bool:
        """Returns whether no step for batches of some types was compared."""
        return (name, repr(types)) not in self._verified

    @contextlib.contextmanager
    def of_step(self, name: choices.Step, types: Any, batch: Any) -> Iterator[None]:
        """Compares a step on one device and on towers, after the step that runs within this context.

        Args:
            name: the step.
            types: the types of its batches, which count as compared if the step is the same.
            batch: the batch, or its N slices.

        Raises:
            RuntimeError: if a result, a variable or a tensor differs. The variables are as before the step.
        """
        before = [(variable, np.array(variable)) for variable in all_variables(self._steps.model)]
        yield
        is_cut = isinstance(batch, tuple) and batch and isinstance(batch[0], Slice)
        slices: Sequence[Slice] = batch if is_cut else self._steps.slices_of(batch)
        with same_random_states():
            both = self._steps.both_ways(name, slices, tolerance())
            unrepeatable = change_of_other_state(both.traced) or call_of_python(both.traced)
            if unrepeatable is not None:
                logger.warning(
                    "verify=True does not compare the %s step: to run it once more may change state that cannot be brought "
                    "back, by %s.",
                    name,
                    unrepeatable,
                )
                self._verified.add((name, repr(types)))
                return
            check = compare_ends(name, both)
            if not check.is_exact:
                # Name the operation.
                check = compare(name, both)
        if check.is_exact:
            self._verified.add((name, repr(types)))
            return
        for variable, value in before:
            variable.assign(value)
        where = f"The first operation that differs: {check.first or 'none'}."
        instead = "devices=1"
        if check.only_with_xla:
            where = "Without XLA, it is the same: the difference comes from how XLA compiles the towers."
            instead = "jit_compile=False"
        raise RuntimeError(
            f"The first {name} step for these batches differs on towers from one device by "
            f"{check.largest_difference:.1e}. {where} On one device, rounding alone makes no such difference. The weights "
            "are as before the step. This is a fault of keras_dp: please report it with the program, and train with "
            f"{instead} until it is mended. Received: verify=True"
        )


def verification(verify: bool | None, steps: TowerSteps) -> Verification | None:
    """Returns the verification of steps if an argument wants it, or else the environment variable KERAS_DP_VERIFY; or None.

    Raises:
        ValueError: if the variable is neither 0 nor 1, or there are several workers.
    """
    said = os.environ.get(_ENVIRONMENT_VARIABLE, "0") if verify is None else str(int(verify))
    if said not in ("0", "1"):
        raise ValueError(f"{_ENVIRONMENT_VARIABLE} must be 0 or 1. Received: {_ENVIRONMENT_VARIABLE}={said!r}")
    workers = steps.inputs.collectives.count
    if said == "1" and workers > 1:
        raise ValueError(
            "verify=True compares the steps of one worker. Verify the program without TF_CONFIG. Received: verify=True on "
            f"{workers} workers"
        )
    return Verification(steps) if said == "1" else None


def types_of(batch: Any) -> Any:
    """Returns the types of the tensors of a batch."""
    return {path: own_spec(leaf) for path, leaf in leaves_of(batch)}


def iterator_of(batches: Sequence[Any], element_spec: Any) -> tf.data.Iterator:
    """Returns an iterator over batches that were taken from another one, with the types of that one."""
    return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=element_spec))
