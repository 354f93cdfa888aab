"""The output of several workers is printed together: lines unchanged, and progress bars in place or less often."""

import io
import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dp.cli.launch import output
from keras_dp.cli.launch.output import Screen, WorkerOutput

# Keras prints a bar so: it returns to the beginning of the line, and uses colours.
BAR = "Epoch 1/2\n" + "".join(f"\r\x1b[1m{step}/3\x1b[0m ━━ loss: 0.{9 - step}\b\b" for step in (1, 2, 3)) + "\ndone\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def seen(self):
        """Returns the text on the terminal, each line as it was last drawn."""
        lines = [""]
        for character in self.getvalue().replace("\x1b[K", "\x00"):
            if character == "\n":
                lines.append("")
            elif character in "\r\x00":
                lines[-1] = ""
            else:
                lines[-1] += character
        return lines


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock by seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def fed(stream, pieces, index=0, is_drawn=True):
    tail = deque(maxlen=20)
    worker = WorkerOutput(index, stream, Screen(stream), is_drawn, tail)
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
    worker = WorkerOutput(1, stream, Screen(stream), False, deque())
    for seconds, state in ((0, "1/9"), (4, "2/9"), (7, "3/9"), (8, "4/9"), (11, "4/9"), (1, "5/9")):
        clock[0] += seconds
        worker.feed(f"\r{state}")
    worker.feed("\r9/9\n")
    assert stream.getvalue() == "[1] 3/9\n[1] 4/9\n[1] 9/9\n"


def test_the_bar_of_the_first_worker_stays_one_on_a_terminal():
    """Lines of other workers appear above it, and its end becomes a line."""
    terminal = Terminal()
    screen = Screen(terminal)
    first = WorkerOutput(0, terminal, screen, True, deque())
    other = WorkerOutput(1, terminal, screen, False, deque())
    first.feed("\r1/3")
    assert terminal.seen() == ["[0] 1/3"]
    other.feed("hello\n")
    assert terminal.seen() == ["[1] hello", "[0] 1/3"]
    first.feed("\r2/3\r3/3")
    other.feed("\r1/3\r2/3")
    assert terminal.seen() == ["[1] hello", "[0] 3/3"]
    other.feed("\r3/3\n")
    first.feed("\nend\n")
    assert terminal.seen() == ["[1] hello", "[1] 3/3", "[0] 3/3", "[0] end", ""]


def test_a_bar_is_no_longer_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    WorkerOutput(0, terminal, Screen(terminal), True, deque()).feed("\r" + "━" * 100)
    assert terminal.seen() == ["[0] " + "━" * 15]


def test_the_end_of_a_line_on_windows_is_no_bar():
    stream = io.StringIO()
    assert fed(stream, ["first\r", "\nsecond\r\n", "last"]) == ["first", "second", "last"]


def test_what_has_not_ended_is_known():
    stream = io.StringIO()
    worker = WorkerOutput(0, stream, Screen(stream), True, deque())
    worker.feed("one\n\r1/2\r2/2")
    assert (worker.unfinished, stream.getvalue()) == ("2/2", "[0] one\n")
