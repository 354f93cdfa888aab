"""Print the output of several workers, line by line."""

import re
import threading
import time
from collections import deque
from typing import TextIO

SECONDS_BETWEEN_STATES = 10.0  # of a progress bar
TAIL_LINES = 20

_ENDS = re.compile(r"\r|\n")
_TERMINAL_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\b]")
_printing = threading.Lock()


def print_line(text: str, stream: TextIO) -> None:
    """Prints a whole line: threads print for their workers at the same time."""
    with _printing:
        print(text, file=stream, flush=True)


class WorkerOutput:
    """Prints one stream of a worker's output, with the worker's number before each line.

    A line that is overwritten from its beginning is a progress bar. It is printed in its last state. Until then, a changed
    state is printed at most every `SECONDS_BETWEEN_STATES`.

    Args:
        index: the worker's number.
        stream: the stream to print to.
        tail: collects the finished lines.
    """

    def __init__(self, index: int, stream: TextIO, tail: deque[str]):
        self._prefix = f"[{index}] "
        self._stream = stream
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
        if state != self._shown and time.monotonic() - self._shown_at > SECONDS_BETWEEN_STATES:
            self._shown, self._shown_at = state, time.monotonic()
            print_line(self._prefix + state, self._stream)

    def _finish(self) -> None:
        print_line(self._prefix + self.unfinished, self._stream)
        self._tail.append(self.unfinished)
        self._text, self._goes_back, self._is_bar = "", False, False
