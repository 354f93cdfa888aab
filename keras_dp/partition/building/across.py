"""Define the exchanges between workers that the partition needs."""

from collections.abc import Sequence
from typing import Any, Protocol

Tensor = Any


class Across(Protocol):
    """Defines the exchanges between workers.

    All workers make the same exchanges in the same order. Each exchange adds operations to the current graph.

    Attributes:
        keeps_rows: whether the step's results have this worker's rows alone, where they have rows.
        one_by_one: whether an exchange begins when the one before it is done, in the same order on all workers.
    """

    keeps_rows: bool
    one_by_one: bool

    def reduced(self, own: Tensor, reduction: str) -> Tensor:
        """Returns the sum, or another reduction, over the workers.

        Args:
            own: this worker's part; without rows, a value that does not change the result, such as zeros for a sum.
            reduction: as in `placements.Partial`.
        """

    def sums(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums of several tensors, which are sent together."""

    def stacked(self, own: Tensor) -> Tensor:
        """Returns the tensors of all workers along a new first axis, in the order of the workers.

        Args:
            own: a tensor of the same shape on all workers.
        """

    def counts(self, own: Tensor) -> Tensor:
        """Returns the W numbers that the workers pass, int32, in the order of the workers."""

    def gathered(self, own: Tensor, axis: int, counts: Tensor | None = None) -> Tensor:
        """Returns the rows of all workers, in the order of the workers.

        Args:
            own: any number of rows of this worker.
            axis: the axis of the rows.
            counts: the number of rows of each worker, if known.
        """
