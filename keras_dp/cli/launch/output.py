"""Print the output of several workers, line by line."""

import re
import shutil
import threading
import time
from collections import deque
from typing import TextIO

SECONDS_BETWEEN_STATES = 10.0  # for a bar whose states are printed as lines
TAIL_LINES = 20

_ERASE = "\r\x1b[K"
_ENDS = re.compile(r"\r|\n")
_TERMINAL_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\b]")


class Screen:
    """Prints lines and, on a terminal, keeps one progress bar below them.

    Args:
        out: the stream of the bar, if it is a terminal.
    """

    def __init__(self, out: TextIO):
        self._out = out
        self._bar = ""
        self._printing = threading.Lock()
        self.has_bar = out.isatty()

    def line(self, text: str, stream: TextIO) -> None:
        """Prints a whole line."""
        with self._printing:
            self._draw(_ERASE if self._bar else "")
            print(text, file=stream, flush=True)
            self._draw(self._bar)

    def bar(self, text: str) -> None:
        """Draws a new state of the bar, or removes the bar if the text is empty."""
        with self._printing:
            width = shutil.get_terminal_size().columns - 1
            self._bar = text[:width]
            self._draw(_ERASE + self._bar)

    def _draw(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()


class WorkerOutput:
    """Prints one stream of a worker's output, with the worker's number before each line.

    A line that is overwritten from its beginning is a progress bar. On a terminal, the first worker's bar is drawn in place.
    Any other bar is printed in its last state. Until then, a changed state is printed at most every `SECONDS_BETWEEN_STATES`.

    Args:
        index: the worker's number.
        stream: the stream to print to.
        screen: the screen that all workers share.
        is_drawn: whether bars are drawn in place, if there is a terminal.
        tail: collects the finished lines.
    """

    def __init__(self, index: int, stream: TextIO, screen: Screen, is_drawn: bool, tail: deque[str]):
        self._prefix = f"[{index}] "
        self._stream = stream
        self._screen = screen
        self._is_drawn = is_drawn and screen.has_bar
        self._tail = tail
        self._text = ""
        self._goes_back = False
        self._is_bar = False
        self._shown, self._shown_at = "", 0.0

    def feed(self, text: str) -> None:
        """Takes the next piece of the output, which may end anywhere."""
        begin = 0
        for end in _ENDS.finditer(text):
            self._add(text[begin : end.start()])
            begin = end.end()
            if end[0] == "\n":
                self._finish()
            else:
                self._goes_back = True
        self._add(text[begin:])
        if self._is_bar:
            self._show(self.unfinished)

    def close(self) -> None:
        """Prints the last line if it lacks a line end."""
        if self.unfinished:
            self._finish()

    @property
    def unfinished(self) -> str:
        """The text of the unfinished line, or the last state of a bar."""
        return _TERMINAL_CONTROL.sub("", self._text)

    def _add(self, text: str) -> None:
        if self._goes_back:
            if not _TERMINAL_CONTROL.sub("", text):
                return
            self._goes_back = False
            if not self._is_bar:
                self._is_bar = True
                self._shown, self._shown_at = "", time.monotonic()
            self._text = ""
        self._text += text

    def _show(self, state: str) -> None:
        if self._is_drawn:
            self._screen.bar(self._prefix + state)
        elif state != self._shown and time.monotonic() - self._shown_at > SECONDS_BETWEEN_STATES:
            self._shown, self._shown_at = state, time.monotonic()
            self._screen.line(self._prefix + state, self._stream)

    def _finish(self) -> None:
        if self._is_bar and self._is_drawn:
            self._screen.bar("")
        self._screen.line(self._prefix + self.unfinished, self._stream)
        self._tail.append(self.unfinished)
        self._text, self._goes_back, self._is_bar = "", False, False
