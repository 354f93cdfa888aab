"""Let threads wake from short sleeps in time, so that the end of a copy between GPUs is seen soon.

TensorFlow finds out that a copy between GPUs has ended by asking again after sleeps of 10 µs (event_mgr.cc, PollLoop). Linux
may let each sleep of a thread last longer by the thread's timer slack, 50 µs by default (prctl(2), PR_SET_TIMERSLACK). Threads
inherit it from the thread that makes them, so it is set before TensorFlow makes its threads.
"""

import ctypes
import os
import sys
from pathlib import Path

_VARIABLE = "KERAS_DP_TIMER_SLACK"
_SHORTEST = "1"
_PR_SET_TIMERSLACK = 29  # linux/prctl.h
# Of the drivers of NVIDIA, and of NVIDIA within Windows.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


def shorten_timer_slack() -> None:
    """Shortens the timer slack of this thread, and of all that it makes, on a machine with GPUs and Linux.

    The environment variable KERAS_DP_TIMER_SLACK has another slack, in nanoseconds, or 0 to leave it as it is.

    Raises:
        ValueError: if the variable is not such a number.
    """
    chosen = os.environ.get(_VARIABLE, _SHORTEST)
    if not chosen.isdecimal():
        raise ValueError(
            f"{_VARIABLE} is the timer slack of TensorFlow's threads in nanoseconds, or 0 to leave it. Received: {chosen!r}"
        )
    if sys.platform == "linux" and int(chosen) and any(Path(driver).exists() for driver in _DRIVERS):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(int(chosen)), 0, 0, 0)
