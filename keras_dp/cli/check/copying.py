"""Copy known numbers between all pairs of devices, and time it."""

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_dp import tables
from keras_dp.cli.check.findings import Finding
from keras_dp.devices.trial_copies import BROKEN, arrives, copied, placed
from keras_dp.gpu_model import hardware

_SMALL, _LARGE = 4 << 10, 32 << 20  # bytes
_REPEATS = 5


class MeasuredCopy(NamedTuple):
    """Holds what was seen of copies from one device to another.

    Attributes:
        source: the device.
        target: the other device.
        is_right: whether all numbers arrived.
        microseconds: the time of a small copy.
        gigabytes_per_second: the rate of a large copy.
    """

    source: str
    target: str
    is_right: bool
    microseconds: float
    gigabytes_per_second: float


def copies(devices: Sequence[str]) -> Finding:
    """Copies both ways between all pairs of devices."""
    found = [copy_between(source, target) for source, target in itertools.permutations(devices, 2)]
    wrong = [f"{copy.source} to {copy.target}" for copy in found if not copy.is_right]
    constants = {f"{copy.source} to {copy.target}": copy._asdict() for copy in found}
    if wrong:
        return Finding(
            "copies",
            "fail",
            f"numbers changed on their way from {', '.join(wrong)}",
            BROKEN,
            data=constants,
        )
    if not found:
        return Finding("copies", "pass", "one device: nothing to copy")
    if all(device.startswith("CPU") for device in devices):
        return Finding("copies", "pass", f"right in all {len(found)} directions; logical CPUs share their memory")
    slowest, fastest = min(copy.gigabytes_per_second for copy in found), max(copy.gigabytes_per_second for copy in found)
    latency = float(np.median([copy.microseconds for copy in found]))
    seen = f"right in all {len(found)} directions; {latency:.0f} µs for a small one, {slowest:.1f} to {fastest:.1f} GB/s"
    return Finding("copies", "pass", seen, table=(*_matrix(devices, found), *_beside_plan(latency)), data=constants)


def _beside_plan(microseconds: float) -> list[str]:
    """Returns a line if copies take another time than `keras-dp plan` assumes."""
    least, most = (1e6 * machine.link.latency_seconds for machine in hardware.best_and_worst(hardware.machine_of("A100")))
    if least <= microseconds <= most:
        return []
    return [
        f"keras-dp plan assumes {least:.0f} to {most:.0f} µs for a small copy, not {microseconds:.0f}: give it these numbers, "
        "with keras-dp check --json > check.json, and keras-dp plan --constants check.json"
    ]


def copy_between(source: str, target: str) -> MeasuredCopy:
    """Copies numbers of several kinds, compares them, and times a small and a large copy."""
    random = np.random.default_rng(0)
    patterns = [random.integers(0, 256, _LARGE, dtype=np.uint8), np.zeros(_LARGE, np.uint8), np.full(_LARGE, 255, np.uint8)]
    patterns += [random.integers(0, 256, size, dtype=np.uint8) for size in (1, 255, 4097, 65537)]
    is_right = all(arrives(pattern, source, target) for pattern in patterns)
    small, large = (_seconds(placed(patterns[0][:size], source), target) for size in (_SMALL, _LARGE))
    # The same without a copy: starting the operations, and reading a number on the host.
    latency = small - _seconds(placed(patterns[0][:_SMALL], source), source)
    return MeasuredCopy(source, target, is_right, 1e6 * max(latency, 1e-7), _LARGE / max(large - small, 1e-9) / 1e9)


def _seconds(tensor: Any, device: str) -> float:
    """Returns the least time of a copy, until a number of it is known on the host."""
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        copied(tensor, device)[:1].numpy()
        times.append(time.perf_counter() - begin)
    return min(times)


def _matrix(devices: Sequence[str], found: Sequence[MeasuredCopy]) -> tuple[str, ...]:
    """Returns a table of GB/s, from the device of the row to that of the column."""
    rates = {(copy.source, copy.target): f"{copy.gigabytes_per_second:.1f}" for copy in found}
    return tuple(tables.text(tables.pairs("GB/s to", devices, rates)).splitlines())
