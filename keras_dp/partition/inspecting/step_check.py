"""Say how far a step on towers and the same step on one device agree."""

import dataclasses


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
class Agreement:
    """Tells how far tensors of one kind differ between one device and towers.

    Attributes:
        differences: by name, the largest difference of a tensor, relative for numbers above 1 and absolute for others.
        excesses: by name, the difference as a multiple of the one that is allowed; see `compare`.
        rounding: the largest difference of any of them on one device, if the batch and the variables are rounded otherwise.
    """

    differences: dict[str, float]
    excesses: dict[str, float]
    rounding: float

    @property
    def largest_difference(self) -> float:
        """The largest difference."""
        return max([0.0, *self.differences.values()])

    @property
    def is_same(self) -> bool:
        """Whether no tensor differs by more than is allowed."""
        return all(excess <= 1.0 for excess in self.excesses.values())

    @property
    def different(self) -> dict[str, float]:
        """By name, the differences of the tensors that differ by more than is allowed."""
        return {name: apart for name, apart in self.differences.items() if self.excesses[name] > 1.0}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares a step on one device with the same step on towers, from the same state.

    Attributes:
        results: the tensors that the step returned, by their places among these.
        variables: the values of the variables after the step, by their names.
        tensors: the tensors within the step that were compared, by their names.
        first: the first operation that differs; None if there is none, or none was looked for.
        comparable: the number of tensors within the step that can be compared.
        jit_compile: whether XLA compiled the towers. The tensors within the step are compared without XLA, which would fuse
            them away.
        only_with_xla: whether results or variables differ although the same step without XLA is the same.
    """

    results: Agreement
    variables: Agreement
    tensors: Agreement
    first: Difference | None
    comparable: int
    jit_compile: bool = False
    only_with_xla: bool = False

    @property
    def largest_difference(self) -> float:
        """The largest difference of results and variables."""
        return max(self.results.largest_difference, self.variables.largest_difference)

    @property
    def is_same(self) -> bool:
        """Whether no result, no variable and no tensor that was compared differs by more than is allowed."""
        return self.results.is_same and self.variables.is_same and self.tensors.is_same
