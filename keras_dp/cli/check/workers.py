"""Connect with the other workers, and time what they exchange."""

import time

import numpy as np
import tensorflow as tf

from keras_dp.cli.check.findings import Finding
from keras_dp.workers.cluster import find_cluster
from keras_dp.workers.group import WorkerGroup, connect_workers

_SMALL, _LARGE = 1 << 10, 4 << 20  # float32 numbers
_REPEATS = 5
_UNREACHABLE = "Each worker has to reach all others: compare their TF_CONFIG, and look at firewalls between them."


def are_several() -> bool:
    """Returns whether this process seems to be one of several workers."""
    try:
        return find_cluster() is not None
    except ValueError:
        return True


def connected(start_timeout: float) -> tuple[WorkerGroup | None, Finding | None]:
    """Connects this worker with the others, if there are any.

    Args:
        start_timeout: seconds to wait for the others.

    Returns:
        The workers, None if they cannot be connected; and the finding, None for a process that trains alone.
    """
    try:
        if find_cluster() is None:
            return connect_workers(), None
        group = connect_workers(start_timeout=start_timeout)
    except (ValueError, RuntimeError, TimeoutError) as error:
        advice = _UNREACHABLE if isinstance(error, TimeoutError) else ""
        return None, Finding("workers", "fail", " ".join(str(error).split()), advice)
    try:
        (small, is_right), (large, large_is_right) = (_timed_sum(group, size) for size in (_SMALL, _LARGE))
    except tf.errors.OpError as error:
        return None, Finding("workers", "fail", f"a sum failed: {' '.join(str(error).split())[:600]}", _UNREACHABLE)
    if not (is_right and large_is_right):
        return group, Finding(
            "workers", "fail", "the workers' sum of known numbers is wrong", "Look at network cards and drivers."
        )
    rate = 2 * (group.count - 1) / group.count * 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    data = {"workers": group.count, "seconds_of_a_small_sum": small, "bytes_per_second": rate}
    seen = f"{group.count} workers with the same versions reach each other; a small sum takes {1e3 * small:.1f} ms"
    return group, Finding("workers", "pass", f"{seen}, and large ones send {rate / 1e9:.2f} GB/s", data=data)


def _timed_sum(group: WorkerGroup, size: int) -> tuple[float, bool]:
    """Sums so many known numbers over the workers.

    Returns:
        The median time of a sum, after a first one that also connects the workers; and whether the sum is right.
    """
    numbers = np.arange(size, dtype="float32") % 1024
    own = tf.constant(numbers * (group.index + 1))
    function = tf.function(group.collectives.sum, autograph=False)
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        received = function(own).numpy()
        times.append(time.perf_counter() - begin)
    expected = numbers * sum(range(1, group.count + 1))
    return float(np.median(times[1:])), bool(np.array_equal(received, expected))
