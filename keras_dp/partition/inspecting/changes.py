"""Judge a variable by its change in a step, however small the variable is."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_dp.partition.inspecting.rounding import LAST_PLACES, UNITS


@dataclasses.dataclass(frozen=True)
class Change:
    """Tells how a step changes a variable on one device, on towers, and on one device with other rounding.

    Attributes:
        start: the variable before the step.
        plain: the variable after the step on one device.
        on_towers: the variable after the step on towers.
        start_otherwise: the variable before the step, rounded otherwise.
        otherwise: the variable after the step on one device, if the batch and the variables are rounded otherwise.
    """

    start: np.ndarray
    plain: np.ndarray
    on_towers: np.ndarray
    start_otherwise: np.ndarray
    otherwise: np.ndarray

    @property
    def largest(self) -> float:
        """The largest change of an entry on one device."""
        return _largest(self.plain, self.start)

    @property
    def own(self) -> float:
        """The largest difference between the changes on one device with the one rounding and the other."""
        return _largest(_change(self.otherwise, self.start_otherwise), _change(self.plain, self.start))

    @property
    def is_known(self) -> bool:
        """Whether the variable holds finite floating-point numbers and keeps its shape, so that its change is a number."""
        values = (self.start, self.plain, self.on_towers, self.start_otherwise, self.otherwise)
        return (
            self.plain.dtype.name in LAST_PLACES
            and self.plain.size > 0
            and len({value.shape for value in values}) == 1
            and all(np.isfinite(value.astype(np.float64)).all() for value in values)
        )

    def excess(self, tolerance: float, explained: float) -> float:
        """Returns the difference between one device and towers as a multiple of the allowed one.

        The tolerance is a share of the variable's largest change, or of its largest entry if it does not change. Units of the
        last place are allowed as well: a change is rounded when it is added to the variable.

        Args:
            tolerance: the share.
            explained: the difference that rounding explains.
        """
        size = float(np.abs(self.plain.astype(np.float64)).max())
        scale = min(1.0, self.largest or size or 1.0)
        apart = _largest(self.plain, self.on_towers)
        return apart / max(tolerance * scale, explained, UNITS * LAST_PLACES[self.plain.dtype.name] * size)


def below_rounding(kinds: Sequence[str], changes: Sequence[Change], half: float) -> list[bool]:
    """Tells for each variable whether its change, on one device and on towers, is what rounding makes of nothing.

    A gradient that is zero, as that of a bias before batch normalization, is a sum of numbers of half precision that cancel
    each other. What rounding leaves of it may be any number up to the last place of other gradients; squares of it, as Adam
    keeps them, any up to the square of that.

    Args:
        kinds: the kinds of the variables: a change is small beside the largest one of its kind.
        changes: the changes.
        half: the relative size of the last place in half precision; 0 if there is none.
    """
    known = [change.is_known for change in changes]
    largest = dict.fromkeys(kinds, 0.0)
    are_squares = dict.fromkeys(kinds, True)
    for kind, change, is_known in zip(kinds, changes, known, strict=True):
        if is_known:
            largest[kind] = max(largest[kind], change.largest)
            are_squares[kind] &= bool(change.plain.astype(np.float64).min() >= 0.0)
    floors = {kind: size * half ** (2 if are_squares[kind] else 1) for kind, size in largest.items()}
    return [
        is_known and max(change.largest, _largest(change.on_towers, change.start)) < floors[kind]
        for kind, change, is_known in zip(kinds, changes, known, strict=True)
    ]


def _change(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.asarray(after.astype(np.float64) - before.astype(np.float64))


def _largest(after: np.ndarray, before: np.ndarray) -> float:
    return float(np.abs(_change(after, before)).max())
