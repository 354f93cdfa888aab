"""Tell growth from noise in the samples of a long run."""

import itertools
import statistics
from collections.abc import Sequence

from endurance.work import Sample

# Of a run's samples, so many at first are its warm-up.
WARM_UP = 1 / 3


def growth(samples: Sequence[Sample], field: str) -> float:
    """Returns the relative growth of a quantity after the warm-up: from the median of its first third to that of its last."""
    kept = [getattr(sample, field) for sample in samples[int(WARM_UP * len(samples)) :]]
    third = max(len(kept) // 3, 1)
    first, last = statistics.median(kept[:third]), statistics.median(kept[-third:])
    return float(last / first - 1)


def slowdown(samples: Sequence[Sample]) -> float:
    """Returns by how much a unit of work takes longer at the end than after the warm-up."""
    seconds = [
        (later.seconds - earlier.seconds) / (later.done - earlier.done) for earlier, later in itertools.pairwise(samples)
    ]
    kept = seconds[int(WARM_UP * len(seconds)) :]
    third = max(len(kept) // 3, 1)
    return statistics.median(kept[-third:]) / statistics.median(kept[:third]) - 1
