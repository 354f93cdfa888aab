"""Divide the rows of a batch among towers, in the proportions of their shares."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Tensor = Any

_MOST_SHARES = 10**6  # of all devices; times the rows of a batch, slices and workers, they fit into 64 bits


@dataclasses.dataclass(frozen=True)
class Shares:
    """Holds the share of each of a worker's towers in the rows of a batch.

    Slices follow each other, and each ends at the rows that are due to its tower and all before it, rounded down. So the last
    tower of all workers has a row of every batch that has any, and all workers have as many rows, to one.

    Attributes:
        of_towers: a positive integer for each tower.
    """

    of_towers: tuple[int, ...]

    @classmethod
    def alike(cls, towers: int) -> "Shares":
        """Returns the shares of towers that have as many rows each, to one."""
        return cls((1,) * towers)

    @classmethod
    def of_devices(cls, rows: Sequence[int] | None, devices: Sequence[str], slices_per_device: int) -> "Shares":
        """Returns the shares of the towers on some devices.

        Args:
            rows: a share for each device; None for the same for all.
            devices: the names of the devices.
            slices_per_device: the number of each device's towers, which have the same share.

        Raises:
            ValueError: if there is not one share for each device, or they are too large.
        """
        if rows is None:
            return cls.alike(len(devices) * slices_per_device)
        if len(rows) != len(devices):
            raise ValueError(
                f"`rows` must have one share for each of the {len(devices)} devices, {', '.join(devices)}. "
                f"Received: rows={rows!r}, of length {len(rows)}"
            )
        divisor = math.gcd(*rows)
        shares = [int(share) // divisor for share in rows]
        if sum(shares) > _MOST_SHARES:
            raise ValueError(
                f"`rows` must have shares whose sum is at most {_MOST_SHARES:,}, after division by their greatest common "
                f"divisor. Give rounded ones, such as [3, 2]. Received: rows={rows!r}"
            )
        return cls(tuple(share for share in shares for _ in range(slices_per_device)))

    def ranges(self, batch_rows: Tensor | int, worker: int = 0, workers: int = 1) -> list[tuple[Any, Any]]:
        """Returns the first row of each tower's slice, and the row after its last one.

        Args:
            batch_rows: B, an `int` or an int32 scalar, as the results are.
            worker: the index of the worker.
            workers: the number of workers, whose towers have the same shares.
        """
        sums = [0, *itertools.accumulate(self.of_towers * workers)]
        first, last = (len(self.of_towers) * index for index in (worker, worker + 1))
        own, whole = sums[first : last + 1], sums[-1]
        if isinstance(batch_rows, int):
            ends = [batch_rows * shares // whole for shares in own]
        else:
            # The product may need more than 32 bits.
            ends = tf.unstack(tf.cast(tf.cast(batch_rows, tf.int64) * own // whole, tf.int32))
        return list(itertools.pairwise(ends))

    def sizes(self, batch_rows: Tensor | int, workers: int = 1) -> list[Any]:
        """Returns the numbers of rows of the slices of all workers' towers. The arguments are those of `ranges`."""
        return [end - begin for worker in range(workers) for begin, end in self.ranges(batch_rows, worker, workers)]
