"""Define placements: where the rows of a tensor are."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import numpy as np

from keras_dp.partition.facts.rows import GLOBAL, Number, Rows


@dataclasses.dataclass(frozen=True)
class Replicate:
    """The placement of a tensor that is the same for the whole batch.

    It exists once, at home, unless each tower makes the same, as the result of a loop.
    """


@dataclasses.dataclass(frozen=True)
class Shard:
    """The placement of a tensor that has entries for each row; a tower has the entries of its own rows.

    Attributes:
        axis: the axis of the rows.
        blocks: the segments of this axis, as in `Rows`.
    """

    axis: int
    blocks: tuple[Any, ...] = (1,)


@dataclasses.dataclass(frozen=True)
class Partial:
    """The placement of a tensor of which each tower has a part; the reduction of all parts is the tensor.

    Attributes:
        reduction: "sum", "max", "min", "prod", "all" or "any"; or "variance" (see `moments`).
    """

    reduction: str = "sum"


@dataclasses.dataclass(frozen=True)
class ListOf:
    """The placement of a TensorList on each tower.

    Attributes:
        element: the `Facts` of its elements; None while it is empty.
    """

    element: "Facts | None" = None


@dataclasses.dataclass(frozen=True)
class Own:
    """The placement of a value that each tower has for itself, such as the moments of its slice.

    One device has no such value: see `own`.
    """


Placement = Replicate | Shard | Partial | ListOf | Own
REPLICATE, OWN = Replicate(), Own()


@dataclasses.dataclass(frozen=True)
class LocalShape:
    """The form of a shape that counts the tower's own rows."""


@dataclasses.dataclass(frozen=True)
class AnyShape:
    """The form of integers for which the tower's own version and the whole batch's version give the same result."""


LOCAL_SHAPE, ANY_SHAPE = LocalShape(), AnyShape()
Need = Placement | LocalShape | AnyShape


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The facts of a tensor that are known before there is a batch. They do not change, and are compared as a whole.

    Attributes:
        placement: where its rows are.
        entries: for a small tensor of integers, an object array of numbers (see `rows`); None if they are not known.
        shape: the sizes that rules know beyond TensorFlow, a tuple with None for each unknown size; for a resource, its handle
            data.
    """

    placement: Placement = REPLICATE
    entries: np.ndarray | None = None
    shape: Any = None

    def __post_init__(self) -> None:
        if self.entries is not None:
            self.entries.setflags(write=False)
        if isinstance(self.shape, list):
            object.__setattr__(self, "shape", tuple(self.shape))

    @functools.cached_property
    def _identity(self) -> Hashable:
        entries = None if self.entries is None else (self.entries.shape, tuple(self.entries.flat))
        is_known = self.shape is None or isinstance(self.shape, tuple)
        return self.placement, entries, self.shape if is_known else self.shape.SerializeToString()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def numbers(self) -> list[Number] | None:
        """The entries as a list; None if they are not known."""
        return None if self.entries is None else list(self.entries.flat)

    @property
    def integers(self) -> list[int] | None:
        """The entries as a list, if all are plain integers; else None."""
        numbers = self.numbers
        return numbers if numbers is not None and all(isinstance(number, int) for number in numbers) else None

    def counts_rows(self) -> bool:
        """Returns whether an entry is a multiple of the number of rows, which differs from tower to tower."""
        return self.entries is not None and any(isinstance(number, Rows) for number in self.entries.flat)

    def is_local_shape(self) -> bool:
        """Returns whether the entries are known to have a version that counts the tower's own rows."""
        return self.entries is not None and GLOBAL not in self.entries.flat


def array_of(numbers: Any) -> np.ndarray:
    """Returns an object array: with one axis for a list of numbers, without axes for one number."""
    if isinstance(numbers, list):
        result = np.empty(len(numbers), object)
        for i, number in enumerate(numbers):
            result[i] = number
        return result
    result = np.empty((), object)
    result[()] = numbers
    return result
