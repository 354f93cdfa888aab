"""Declare what the partition asks of workers that each have towers."""

from collections.abc import Sequence
from typing import Any, Protocol

Tensor = Any


class Across(Protocol):
    """Exchanges between workers, which all make the same ones in the same order; each adds operations to the current graph."""

    def reduced(self, own: Tensor, reduction: str) -> Tensor:
        """The sum, or another reduction, of what each worker has.

        Args:
            own: what this worker has: what changes nothing, such as zeros for a sum, if it has no rows.
            reduction: as in `placements.Partial`.
        """

    def sums(self, own: Sequence[Tensor]) -> list[Tensor]:
        """The sums of several tensors at once."""

    def counts(self, own: Tensor) -> Tensor:
        """The number of each worker, int32, from that of this one."""

    def gathered(self, own: Tensor, axis: int, counts: Tensor | None = None) -> Tensor:
        """The rows of all workers, in the order of the workers.

        Args:
            own: the rows of this worker, any number of them.
            axis: along which the rows are.
            counts: how many each worker has, if that is known.
        """
