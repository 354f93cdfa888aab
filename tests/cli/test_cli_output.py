"""The output of several workers is printed together: lines unchanged, and progress bars less often."""

import io
import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dp.cli.launch import output
from keras_dp.cli.launch.output import WorkerOutput

# Keras prints a bar so: it returns to the beginning of the line, and uses colours.
BAR = "Epoch 1/2\n" + "".join(f"\r\x1b[1m{step}/3\x1b[0m ━━ loss: 0.{9 - step}\b\b" for step in (1, 2, 3)) + "\ndone\n"


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock by seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def fed(stream, pieces):
    tail = deque(maxlen=20)
    worker = WorkerOutput(0, stream, tail)
    for piece in pieces:
        worker.feed(piece)
    worker.close()
    return list(tail)


@settings(derandomize=True, database=None)
@given(st.lists(st.integers(0, len(BAR)), max_size=8))
def test_lines_do_not_depend_on_the_pieces_that_they_come_in(cuts):
    edges = [0, *sorted(cuts), len(BAR)]
    stream = io.StringIO()
    tail = fed(stream, [BAR[begin:end] for begin, end in itertools.pairwise(edges)])
    assert tail == ["Epoch 1/2", "3/3 ━━ loss: 0.6", "done"]
    assert stream.getvalue() == "".join(f"[0] {line}\n" for line in tail)


def test_a_bar_that_takes_long_is_shown_on_the_way_if_it_changes(clock):
    stream = io.StringIO()
    worker = WorkerOutput(1, stream, deque())
    for seconds, state in ((0, "1/9"), (4, "2/9"), (7, "3/9"), (8, "4/9"), (11, "4/9"), (1, "5/9")):
        clock[0] += seconds
        worker.feed(f"\r{state}")
    worker.feed("\r9/9\n")
    assert stream.getvalue() == "[1] 3/9\n[1] 4/9\n[1] 9/9\n"


def test_the_end_of_a_line_on_windows_is_no_bar():
    stream = io.StringIO()
    assert fed(stream, ["first\r", "\nsecond\r\n", "last"]) == ["first", "second", "last"]


def test_what_has_not_ended_is_known():
    stream = io.StringIO()
    worker = WorkerOutput(0, stream, deque())
    worker.feed("one\n\r1/2\r2/2")
    assert (worker.unfinished, stream.getvalue()) == ("2/2", "[0] one\n")
