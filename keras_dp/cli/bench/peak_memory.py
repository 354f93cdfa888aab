"""Measure the peak size of this process."""

import resource
import sys


def peak_memory_megabytes() -> float:
    """Returns the peak size of this process in the host's memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is bytes on macOS, and kilobytes elsewhere.
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
