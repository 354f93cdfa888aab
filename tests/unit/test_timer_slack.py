"""The timer slack is shortened on machines with GPUs, for threads that are made later, too."""

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from forked_processes import output_of_command

from keras_dp import timer_slack

PR_GET_TIMERSLACK = 30  # linux/prctl.h

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has timer slack")


def slack():
    """Returns the timer slack of this thread, in nanoseconds."""
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)


def in_a_thread(function):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def slacks_after_shortening():
    """Returns the slack of a thread that shortens it, and of one that it makes."""
    timer_slack.shorten_timer_slack()
    return slack(), in_a_thread(slack)


@pytest.mark.parametrize(("chosen", "expected"), [(None, 1), ("7000", 7000), ("0", None)])
def test_threads_inherit_the_slack_where_there_is_a_driver(chosen, expected, monkeypatch, tmp_path):
    before = slack()
    (tmp_path / "driver").touch()
    monkeypatch.setattr(timer_slack, "_DRIVERS", (tmp_path / "driver",))
    monkeypatch.delenv("KERAS_DP_TIMER_SLACK", raising=False)
    if chosen is not None:
        monkeypatch.setenv("KERAS_DP_TIMER_SLACK", chosen)
    assert in_a_thread(slacks_after_shortening) == (expected or before, expected or before)
    assert slack() == before != expected


def test_a_machine_without_a_driver_keeps_its_slack(monkeypatch, tmp_path):
    monkeypatch.setattr(timer_slack, "_DRIVERS", (tmp_path / "driver",))
    assert in_a_thread(slacks_after_shortening) == (slack(), slack())


@pytest.mark.parametrize("chosen", ["", "-1", "fast", "1.5"])
def test_another_value_is_refused(chosen, monkeypatch):
    monkeypatch.setenv("KERAS_DP_TIMER_SLACK", chosen)
    with pytest.raises(ValueError, match=f"KERAS_DP_TIMER_SLACK.*Received: '{chosen}'"):
        timer_slack.shorten_timer_slack()


@pytest.mark.processes
def test_the_import_shortens_it_before_tensorflow_is_there(tmp_path):
    (tmp_path / "script.py").write_text(
        "import ctypes, pathlib, sys\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda path, **options: str(path) == '/dev/nvidiactl' or exists(path, **options)\n"
        "import keras_dp\n"
        f"assert ctypes.CDLL(None).prctl({PR_GET_TIMERSLACK}, 0, 0, 0, 0) == 1\n"
        "assert 'tensorflow' not in sys.modules\n"
        "print('shortened', file=sys.stderr)\n"
    )
    assert "shortened" in output_of_command(sys.executable, tmp_path / "script.py")
