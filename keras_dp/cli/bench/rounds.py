"""Run the engines of a benchmark in turns, in several rounds."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.runs import Measurement, RunFailedError


def measure_in_turns(
    cells: Sequence[Cell],
    count: int,
    measure: Callable[[Cell, int], Measurement],
    rounds: list[dict[Cell, Measurement]],
    failures: dict[Cell, str],
) -> Iterator[None]:
    """Fills in the measurements and the failures of each round, and yields after each round.

    A cell that has failed is not run again. When all have failed, no further round begins.

    Args:
        cells: the cells of a table.
        count: the number of rounds.
        measure: returns the measurement of a cell in a round, which it gets the number of, from 1.
        rounds: gets the measurements of each round.
        failures: gets the messages of cells that have failed.
    """
    measured = list(dict.fromkeys(cell.measured for cell in cells))
    begin, done = time.monotonic(), 0
    for number in range(1, count + 1):
        if len(failures) == len(measured):
            return
        rounds.append({})
        for cell in measured:
            if cell in failures:
                continue
            left = (len(measured) - len(failures)) * count - done
            remaining = f", about {_duration((time.monotonic() - begin) / done * left)} to go" if done else ""
            say(f"round {number} of {count}: {cell.engine} on {devices(cell)}{remaining}")
            try:
                rounds[-1][cell] = measure(cell, number)
            except RunFailedError as error:
                failures[cell] = str(error)
            done += 1
        yield


def say(text: str) -> None:
    """Prints a line about the progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def devices(cell: Cell) -> str:
    """Says on what a cell's model trains."""
    if cell.engine == "single":
        return f"one device, batch {cell.batch_size}"
    return f"{cell.towers} tower{'s' if cell.towers > 1 else ''}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
