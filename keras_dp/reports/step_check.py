"""Compare one step on one device with the same step on towers."""

import dataclasses
from typing import Any

from keras_dp import choices
from keras_dp.partition.inspecting.agreement import Agreement, Comparison
from keras_dp.partition.inspecting.comparison import compare
from keras_dp.reports.step_graph import refuse_other_state
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.random_states import same_random_states
from keras_dp.steps.verification import tolerance as tolerance_of_floats


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """Tells whether a step on towers is the same as on one device.

    Attributes:
        step: "train", "test" or "predict".
        comparison: the comparison of results, variables and tensors.
        tolerance: the largest difference that counts as none, relative to the size of the numbers where these are large, and to
            the largest change of a variable in the step. More counts as none where one device differs from itself if numbers
            are rounded otherwise.
    """

    step: str
    comparison: Comparison
    tolerance: float

    @property
    def largest_difference(self) -> float:
        """The largest difference of results and variables."""
        return self.comparison.largest_difference

    @property
    def is_exact(self) -> bool:
        """Whether no result, no variable and no tensor that was compared differs by more than rounding explains."""
        return self.comparison.is_same

    def __str__(self) -> str:
        comparison = self.comparison
        verdict = "the same" if self.is_exact else "different"
        xla = ", compiled by XLA" if comparison.jit_compile else ""
        of_all = f"{len(comparison.tensors.differences):,} of {comparison.comparable:,} tensors inside"
        of_all += ", without XLA, which fuses them" if comparison.jit_compile else ""
        kinds = {"results": comparison.results, "variables": comparison.variables, of_all: comparison.tensors}
        lines = [f"{self.step} step on one device and on towers{xla}: {verdict} (tolerance {self.tolerance:.0e})"]
        lines += [f"  {name}: {self._in_words(agreement)}" for name, agreement in kinds.items() if agreement.differences]
        lines += [
            f"  variable {name!r} differs by {apart:.1e}, {comparison.variables.excesses[name]:.3g} times as much as is allowed"
            for name, apart in comparison.variables.different.items()
        ]
        if comparison.only_with_xla:
            lines.append("  without XLA, the step is the same: the difference comes from how XLA compiles the towers")
        if comparison.first is not None:
            lines.append(f"  first operation that differs although its inputs do not: {comparison.first}")
        return "\n".join(lines)

    def _in_words(self, agreement: Agreement) -> str:
        words = f"{'the same' if agreement.is_same else 'different'}, to {agreement.largest_difference:.1e}"
        is_rounding = agreement.is_same and agreement.largest_difference > self.tolerance
        if not is_rounding:
            return words
        return f"{words}: on one device, rounding the batch and the variables otherwise changes up to {agreement.rounding:.1e}"


def check_step(parallel: Any, batch: Any = None, step: choices.Step = "train", tolerance: float | None = None) -> StepCheck:
    """Runs one step on one device and partitioned on towers, from the same state, and compares the two.

    Compares results, variables, and tensors that are spread over the step. If anything differs, looks further until it can name
    the first operation that differs although its inputs do not, with the user's line. The model and its optimizers stay
    unchanged.

    TensorFloat-32, to which GPUs round factors in float32, is off meanwhile. Where XLA compiles the towers, results and
    variables of the step that it has compiled are compared with plain Keras's on one device without XLA. The tensors inside are
    compared without XLA, which fuses them away.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> keras_dp.check_step(parallel, (np.ones((8, 4)), np.ones((8, 1)))).is_exact
    True

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".
        tolerance: the largest difference that counts as none; None for 1e-9 in float64, 1e-4 in float32. For a variable, as a
            share of its largest change in the step, so that small variables count as much as large ones.

    Raises:
        ValueError: if there is no such step, the model is not a compiled `DataParallelModel`, or runs eagerly, or needs
            another batch, or its step changes other state than variables, such as a table or an iterator.
    """
    trainer, batch = inspected("check_step", parallel, batch, step)
    within = tolerance or tolerance_of_floats()
    steps = trainer.tower_steps
    slices = steps.slices_of(batch)
    steps.make_layers(step, slices)
    with same_random_states():
        both = steps.both_ways(step, slices, within)
        refuse_other_state(both.traced)
        return StepCheck(step, compare(both), within)
