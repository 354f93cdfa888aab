"""Plot the step times of a benchmark."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keras_dp.cli.bench.summary import Row
from keras_dp.cli.runs import ENGINES

MARKERS = dict(zip(ENGINES, "o^vsD", strict=True))


def write_figure(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws the rows of a benchmark.

    Args:
        rows: the rows to draw; failed ones are skipped.
        title: the text above the panels.
        path: the path of the PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    steps, first_steps = figure.subplots(1, 2)
    towers = sorted({row.towers for row in rows})
    drawn = [row for row in rows if row.median_milliseconds is not None]
    for index, engine in enumerate(dict.fromkeys(row.engine for row in drawn)):
        marker = MARKERS[engine]
        shown = [row for row in drawn if row.engine == engine]
        # Small offsets keep the error bars from hiding each other.
        positions = [towers.index(row.towers) + 0.06 * (index - 2) for row in shown]
        low, median, high = (
            np.array([getattr(row, f"{name}_milliseconds") for row in shown]) for name in ("low", "median", "high")
        )
        steps.errorbar(positions, median, [median - low, high - median], marker=marker, capsize=3, label=engine)
        first_steps.plot(positions, [row.first_step_seconds for row in shown], marker=marker)
    steps.set(title="Step, median and 10 % to 90 % of steps", ylabel="ms")
    first_steps.set(title="First step, with building and tracing", ylabel="s")
    for panel in (steps, first_steps):
        panel.set(
            xlabel="towers", xticks=range(len(towers)), xticklabels=towers, xlim=(-0.5, len(towers) - 0.5), ylim=(0, None)
        )
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(MARKERS))
    figure.savefig(path, dpi=150)
