"""Find the shares of devices in the rows of a batch by their speeds."""

import math
from collections.abc import Sequence


def shares_by_speed(seconds: Sequence[float]) -> list[int]:
    """Returns shares of at most 10 for devices that take some times for the same rows, so that all end together.

    >>> shares_by_speed([0.2, 0.2, 0.6])
    [10, 10, 3]
    """
    shares = [max(round(10 * min(seconds) / one), 1) for one in seconds]
    return [share // math.gcd(*shares) for share in shares]
