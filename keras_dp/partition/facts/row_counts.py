"""Count the rows of a batch and of the towers' slices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

USUAL_ROWS = 32  # of a tower


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The towers' rows of the global batch. All are `int`s if they are known while the step is traced, else int32 scalars.

    Attributes:
        batch_rows: B.
        begins: the index of each tower's first row, N numbers.
        own_rows: the number of each tower's rows, N numbers. A tower with 0 rows has borrowed one row.
        tower_rows: the largest number of a tower's rows in most batches, the same on all workers; a guess if it is not known.
            It decides between ways to the same result.
        worker_rows: the number of each worker's rows, W `int`s or an int32 tensor of them; None for a single worker.
    """

    batch_rows: Any
    begins: Sequence[Any]
    own_rows: Sequence[Any]
    tower_rows: int = USUAL_ROWS
    worker_rows: Any = None

    @property
    def known(self) -> "RowCounts | None":
        """The counts, if they are known while the step is traced; else None."""
        return self if isinstance(self.batch_rows, int) else None
