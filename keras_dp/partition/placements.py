"""Define placements: where the rows of a tensor are."""

import dataclasses
from typing import Any

import numpy as np

from keras_dp.partition.rows import GLOBAL, Number, Rows


@dataclasses.dataclass(frozen=True)
class Replicate:
    """The same for the whole batch: there is one, at home."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """One entry for each row: a tower has those of its own rows.

    Attributes:
        axis: along which the rows are.
        blocks: the segments of this axis, as in `Rows`.
    """

    axis: int
    blocks: tuple[Any, ...] = (1,)


@dataclasses.dataclass(frozen=True)
class Partial:
    """A part on each tower, of which all together make the tensor.

    Attributes:
        reduction: "sum", "max", "min", "prod", "all" or "any"; or "variance" (see `moments`).
    """

    reduction: str = "sum"


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A TensorList on each tower.

    Attributes:
        element: the `Facts` of its elements; None while it is empty.
    """

    element: "Facts | None" = None


@dataclasses.dataclass(frozen=True)
class Own:
    """A value that each tower has for itself, as the moments of its slice are. One device has no such thing: see `own`."""


Placement = Replicate | Shard | Partial | ListOf | Own
REPLICATE, OWN = Replicate(), Own()


@dataclasses.dataclass(frozen=True)
class LocalShape:
    """The form in which a tower takes a shape: counting its own rows."""


@dataclasses.dataclass(frozen=True)
class AnyShape:
    """The form of integers of which the tower's own and those of the whole batch lead to the same."""


LOCAL_SHAPE, ANY_SHAPE = LocalShape(), AnyShape()
Need = Placement | LocalShape | AnyShape


@dataclasses.dataclass(eq=False)
class Facts:
    """Collects the facts of a tensor.

    Attributes:
        placement: where its rows are.
        entries: of a small tensor of integers, an object array of numbers (see `rows`); None if they are not known.
        shape: numbers that TensorFlow does not know, None where they are not known either; for a resource, its handle data.
    """

    placement: Placement = REPLICATE
    entries: np.ndarray | None = None
    shape: Any = None

    def __post_init__(self) -> None:
        self._identity = (
            self.placement,
            None if self.entries is None else (self.entries.shape, tuple(self.entries.flat)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def numbers(self) -> list[Number] | None:
        """The entries as a list, or None if they are not known."""
        return None if self.entries is None else list(self.entries.flat)

    @property
    def integers(self) -> list[int] | None:
        """The entries, if all are plain integers."""
        numbers = self.numbers
        return numbers if numbers is not None and all(isinstance(number, int) for number in numbers) else None

    def counts_rows(self) -> bool:
        """Whether an entry is a multiple of the number of rows, which is another one on each tower."""
        return self.entries is not None and any(isinstance(number, Rows) for number in self.entries.flat)

    def is_local_shape(self) -> bool:
        """Whether the tower's own version of the entries is known to be a shape of the tower's own rows."""
        return self.entries is not None and GLOBAL not in self.entries.flat


def array_of(numbers: Any) -> np.ndarray:
    """An object array of numbers, of the shape of a nested list."""
    if isinstance(numbers, list):
        result = np.empty(len(numbers), object)
        for i, number in enumerate(numbers):
            result[i] = number
        return result
    result = np.empty((), object)
    result[()] = numbers
    return result
