"""Connect with the other workers, and time what they exchange."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dp import tables
from keras_dp.cli.check.findings import Finding
from keras_dp.workers.cluster import find_cluster
from keras_dp.workers.group import WorkerGroup, connect_workers

_SMALL, _LARGE = 1 << 10, 4 << 20  # float32 numbers
_REPEATS = 5
_LATE, _LATE_SECONDS = 5, 1e-3  # times and seconds above the median
_WIDEST = 8  # workers in a table
_SLOW = "The slowest pair delays each sum of all workers: look at the cables, switches and hosts between these workers."
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
        answer_times = group.answer_times()
    except tf.errors.OpError as error:
        return None, Finding("workers", "fail", f"a sum failed: {' '.join(str(error).split())[:600]}", _UNREACHABLE)
    if not (is_right and large_is_right):
        return group, Finding(
            "workers", "fail", "the workers' sum of known numbers is wrong", "Look at network cards and drivers."
        )
    rate = 2 * (group.count - 1) / group.count * 4 * (_LARGE - _SMALL) / max(large - small, 1e-9)
    seen = f"{group.count} workers with the same versions reach each other; a small sum takes {1e3 * small:.1f} ms"
    found = of_pairs(answer_times)
    data = {"workers": group.count, "seconds_of_a_small_sum": small, "bytes_per_second": rate, **found.data}
    seen = f"{seen}, and large ones send {rate / 1e9:.2f} GB/s; {found.seen}"
    return group, dataclasses.replace(found, seen=seen, data=data)


def of_pairs(answer_times: Sequence[Mapping[int, float]]) -> Finding:
    """Looks for pairs of workers that answer each other late, or not at all.

    Args:
        answer_times: for each worker, the seconds until each other one answers it.
    """
    seconds = {(i, j): time for i, others in enumerate(answer_times) for j, time in others.items()}
    finite = list(filter(math.isfinite, seconds.values()))
    middle = float(np.median(finite)) if finite else 0.0
    late = {pair: time for pair, time in seconds.items() if time > max(_LATE * middle, middle + _LATE_SECONDS)}
    between = {f"{i} to {j}": 1e3 * time if math.isfinite(time) else None for (i, j), time in seconds.items()}
    cells = {(str(i), str(j)): _milliseconds(time) for (i, j), time in seconds.items()}
    numbers = list(map(str, range(len(answer_times))))
    drawn = tables.text(tables.pairs("ms to worker", numbers, cells))
    table = tuple(drawn.splitlines()) if 2 < len(numbers) <= _WIDEST else ()
    data = {"milliseconds_of_an_answer": between}
    if not late:
        return Finding("workers", "pass", f"a worker answers in {_milliseconds(max(seconds.values()))} ms", "", table, data)
    named = ", ".join(
        f"worker {j} answers {i} in {_milliseconds(time)} ms" if math.isfinite(time) else f"worker {j} does not answer {i}"
        for (i, j), time in sorted(late.items())
    )
    seen = f"most workers answer in {_milliseconds(middle)} ms, but {named}" if finite else named
    if all(map(math.isfinite, late.values())):
        return Finding("workers", "warn", seen, _SLOW, table, data)
    return Finding("workers", "fail", seen, _UNREACHABLE, table, data)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if math.isfinite(seconds) else "none"


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
