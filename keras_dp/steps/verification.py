"""Compare the first step of each trace with one device, while a model trains."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dp import choices
from keras_dp.batches.slicing import Slice, is_cut, own_spec
from keras_dp.batches.whole_tensors import leaves_of
from keras_dp.keras_internals.keras_models import all_variables, noted
from keras_dp.partition.inspecting.other_state import call_of_python, change_of_other_state
from keras_dp.partition.inspecting.step_check import StepCheck
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.towers import TowerSteps

logger = logging.getLogger("keras_dp")


class Verification:
    """Checks the first step of each trace as `check_step` does, if that is wanted, and refuses to go on if it differs.

    Args:
        verify: whether it is wanted. None asks the environment variable KERAS_DP_VERIFY.
        steps: the steps on towers.

    Raises:
        ValueError: if the variable is neither 0 nor 1, or there are several workers.
    """

    def __init__(self, verify: bool | None, steps: TowerSteps):
        said = os.environ.get("KERAS_DP_VERIFY", "0") if verify is None else str(int(verify))
        if said not in ("0", "1"):
            raise ValueError(f"KERAS_DP_VERIFY must be 0 or 1. Received: KERAS_DP_VERIFY={said!r}")
        workers = steps.inputs.collectives.count
        if said == "1" and workers > 1:
            raise ValueError(
                "verify=True compares the steps of one worker. Verify the program without TF_CONFIG. Received: verify=True on "
                f"{workers} workers"
            )
        self._steps, self._is_wanted = steps, said == "1"
        self._verified: set[tuple[str, str]] = set()

    def is_due(self, name: choices.Step, types: Any) -> bool:
        """Returns whether the next step for batches of some types is to be compared."""
        return self._is_wanted and (name, repr(types)) not in self._verified

    def forget(self, name: choices.Step) -> None:
        """Compares a step again, whose function is made anew: its loss, optimizer or layers may be others."""
        self._verified = {compared for compared in self._verified if compared[0] != name}

    @contextlib.contextmanager
    def of_step(self, name: choices.Step, batch: Any, types: Any = None) -> Iterator[None]:
        """Compares a step on one device and on towers, after the step that runs within this context, if it is the first one.

        Args:
            name: the step.
            batch: the batch, or its N slices.
            types: the types of its batches, which count as compared if the step is the same; None for those of the batch.

        Raises:
            RuntimeError: if a result, a variable or a tensor differs. The variables are as before the step.
        """
        if self._is_wanted and types is None:
            types = {path: own_spec(leaf) for path, leaf in leaves_of(batch)}
        if not self.is_due(name, types):
            yield
            return
        restore = noted(all_variables(self._steps.model))
        yield
        try:
            check = self._checked(name, batch)
        except Exception:
            # One device may have no memory for the whole batch.
            restore()
            raise
        if check is None or check.is_exact:
            self._verified.add((name, repr(types)))
            return
        restore()
        where, instead = f"The first operation that differs: {check.first or 'none'}.", "devices=1"
        if check.only_with_xla:
            where = "Without XLA, it is the same: the difference comes from how XLA compiles the towers."
            instead = "jit_compile=False"
        advice = f"This is a fault of keras_dp: please report it with the program, and train with {instead} until it is mended."
        options, received = self._steps.options, "verify=True"
        if options.batch_norm != "sync" or options.gradient_dtype is not None:
            advice = "Moments or rounded gradients of each tower's own have another result by design: leave out verify."
            received += f", batch_norm={options.batch_norm!r}, gradient_dtype={options.gradient_dtype!r}"
        raise RuntimeError(
            f"The first {name} step for these batches differs on towers from one device by "
            f"{check.largest_difference:.1e}. {where} On one device, rounding alone makes no such difference. The weights "
            f"are as before the step. {advice} Received: {received}"
        )

    def _checked(self, name: choices.Step, batch: Any) -> StepCheck | None:
        """Compares a step; returns None if it cannot be run once more."""
        slices: Sequence[Slice] = batch if is_cut(batch) else self._steps.slices_of(batch)
        with same_random_states():
            comparison = self._steps.comparison(name, slices)
            unrepeatable = change_of_other_state(comparison.traced) or call_of_python(comparison.traced)
            if unrepeatable is not None:
                logger.warning(
                    "verify=True does not compare the %s step: to run it once more may change state that cannot be brought "
                    "back, by %s.",
                    name,
                    unrepeatable,
                )
                return None
            ends = comparison.ends()
            # Tensors inside are compared only to name the operation: those of a whole batch need much memory.
            return ends if ends.is_exact else comparison.check()
