"""Give each worker of one machine cores of its own.

TensorFlow starts as many threads as a process may use cores. Workers that share all cores run W times as many threads as there
are cores, which wait for each other in the middle of a step.
"""

import contextlib
import itertools
import os
import sys
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def shares(workers: int) -> list[frozenset[int]]:
    """Returns the cores of each worker. They are empty if there are fewer cores than workers, or on other systems than Linux.

    The cores are divided in the order of processors, physical cores and their hardware threads.

    Args:
        workers: the number of workers, W.
    """
    available = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    if len(available) < workers:
        return [frozenset()] * workers
    ordered = sorted(available, key=_place)
    begins = [len(ordered) * i // workers for i in range(workers + 1)]
    return [frozenset(ordered[begin:end]) for begin, end in itertools.pairwise(begins)]


def confine(process: int, cores: frozenset[int]) -> None:
    """Lets a process, and the threads that it starts later, run on some cores only; on all if there are none.

    Args:
        process: the process's number.
        cores: the cores.
    """
    if sys.platform == "linux" and cores:
        # The process may have ended, or the system may forbid it.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process, cores)


def _place(core: int) -> tuple[int, int, int]:
    """Returns the processor and the physical core that a core belongs to, and its number."""
    return _number(core, "physical_package_id"), _number(core, "core_id"), core


def _number(core: int, name: str) -> int:
    try:
        return int((_TOPOLOGY / f"cpu{core}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0
