"""Say how far a step on towers and the same step on one device agree."""

import dataclasses
from collections.abc import Mapping

from keras_dp.partition.inspecting.tolerance import Measured


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Tells how far tensors of one kind differ between one device and towers.

    Attributes:
        measured: the tensors, by their names.
    """

    measured: Mapping[str, Measured]

    @property
    def largest_difference(self) -> float:
        """The largest difference."""
        return max([0.0, *(one.apart for one in self.measured.values())])

    @property
    def rounding(self) -> float:
        """The largest difference of any of them on one device, if the batch and the variables are rounded otherwise."""
        return max([0.0, *(one.own for one in self.measured.values())])

    @property
    def different(self) -> dict[str, Measured]:
        """The tensors that differ by more than is allowed, by their names."""
        return {name: one for name, one in self.measured.items() if one.is_different}


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operation whose result differs on towers, although its inputs are the same.

    Attributes:
        type: the type of the operation.
        name: the name of the tensor.
        placement: the placement of the tensor.
        difference: the largest difference, relative for numbers above 1 and absolute for others.
        line: the user's line that made the operation, if known.
    """

    type: str
    name: str
    placement: str
    difference: float
    line: str

    def __str__(self) -> str:
        where = f", made in {self.line}" if self.line else ""
        return f"{self.type} {self.name!r}, {self.placement}, differs by {self.difference:.1e}{where}"


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """Tells whether a step on towers is the same as on one device, from the same state.

    Attributes:
        step: the name of the step.
        tolerance: the largest difference that counts as none, relative to the size of the numbers where these are large, and to
            the largest change of a variable in the step. More counts as none where one device differs from itself if numbers
            are rounded otherwise.
        results: the tensors that the step returned, by their places among these.
        variables: the values of the variables after the step, by their names.
        tensors: the tensors within the step that were compared, by their names.
        comparable: the number of tensors within the step that can be compared.
        first: the first operation that differs; None if there is none, or none was looked for.
        jit_compile: whether XLA compiled the towers. The tensors within the step are compared without XLA, which would fuse
            them away.
        only_with_xla: whether results or variables differ although the same step without XLA is the same.
    """

    step: str
    tolerance: float
    results: Agreement
    variables: Agreement
    tensors: Agreement = Agreement({})
    comparable: int = 0
    first: Difference | None = None
    jit_compile: bool = False
    only_with_xla: bool = False

    @property
    def largest_difference(self) -> float:
        """The largest difference of results and variables."""
        return max(self.results.largest_difference, self.variables.largest_difference)

    @property
    def is_exact(self) -> bool:
        """Whether no result, no variable and no tensor that was compared differs by more than rounding explains."""
        return not (self.results.different or self.variables.different or self.tensors.different)

    def __str__(self) -> str:
        verdict = "the same" if self.is_exact else "different"
        xla = ", compiled by XLA" if self.jit_compile else ""
        of_all = f"{len(self.tensors.measured):,} of {self.comparable:,} tensors inside"
        of_all += ", without XLA, which fuses them" if self.jit_compile else ""
        kinds = {"results": self.results, "variables": self.variables, of_all: self.tensors}
        lines = [f"{self.step} step on one device and on towers{xla}: {verdict} (tolerance {self.tolerance:.0e})"]
        lines += [f"  {name}: {self._in_words(agreement)}" for name, agreement in kinds.items() if agreement.measured]
        lines += [
            f"  variable {name!r} differs by {one.apart:.1e}, {one.excess:.3g} times as much as is allowed"
            for name, one in self.variables.different.items()
        ]
        if self.only_with_xla:
            lines.append("  without XLA, the step is the same: the difference comes from how XLA compiles the towers")
        if self.first is not None:
            lines.append(f"  first operation that differs although its inputs do not: {self.first}")
        return "\n".join(lines)

    def _in_words(self, agreement: Agreement) -> str:
        words = f"{'different' if agreement.different else 'the same'}, to {agreement.largest_difference:.1e}"
        if agreement.different or agreement.largest_difference <= self.tolerance:
            return words
        return f"{words}: on one device, rounding the batch and the variables otherwise changes up to {agreement.rounding:.1e}"
