"""How the time of a training step grows: with the towers, with the parameters and with the batch.

The engines are keras_dp, tf.distribute.MirroredStrategy and, for reference, plain Keras on one device. Each run has a process
of its own; within a round the engines take turns. Batch normalization is synchronized, in MirroredStrategy too. The panels:

  towers      ResNet-20, batch 64, 1 to 16 towers
  parameters  three dense layers of 1e5 to 1e8 parameters in all, batch 64, two towers
  batch       MLP 784-512-512-10, batch 32 to 2,048, two towers

Writes scaling.json, with the time of every step, and scaling.png.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np

from keras_dp.cli import environment
from keras_dp.cli.runs import Run, RunFailedError, measure_in_new_process

ENGINES = ("keras_dp", "mirrored", "single")
MARKERS = dict(zip(ENGINES, "oDs", strict=True))
PANELS = ("towers", "parameters", "batch")
BATCH_SIZES = (32, 128, 512, 2_048)
# Models of so many parameters have one in five of the others' steps.
MANY_PARAMETERS = 50_000_000


def dense(width):
    """Three square layers, of 3 width^2 parameters."""
    return keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width, use_bias=False) for _ in range(3))])


dense_1e5, dense_1e6, dense_1e7, dense_1e8 = (functools.partial(dense, width) for width in (182, 577, 1_825, 5_773))
DENSE_MODELS = {99_372: "dense_1e5", 998_787: "dense_1e6", 9_991_875: "dense_1e7", 99_982_587: "dense_1e8"}


class Point(NamedTuple):
    """An engine at one place of a panel.

    Attributes:
        panel: one of PANELS.
        value: the number of towers, of parameters or of rows in a batch.
        engine: one of ENGINES.
    """

    panel: str
    value: int
    engine: str

    def run(self, steps):
        """What to train for it; plain Keras has all cores in its one device."""
        towers = 1 if self.engine == "single" else self.value if self.panel == "towers" else 2
        if self.panel == "towers":
            return Run(self.engine, towers, 64, "resnet20", steps=steps, warm_up=5)
        if self.panel == "batch":
            return Run(self.engine, towers, self.value, "mlp", steps=steps)
        model = f"scaling:{DENSE_MODELS[self.value]}"
        if self.value > MANY_PARAMETERS:
            return Run(self.engine, towers, 64, model, steps=max(1, steps // 5), warm_up=2)
        return Run(self.engine, towers, 64, model, steps=steps)


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of a point over all rounds: milliseconds that half, 10 % and 90 % of its steps took at most."""

    panel: str
    value: int
    engine: str
    median_milliseconds: float
    low_milliseconds: float
    high_milliseconds: float


def points(panels, towers):
    """All points, in the order of measuring; on one device, ResNet-20 is the same whatever the others' towers."""
    values = {"towers": towers, "parameters": DENSE_MODELS, "batch": BATCH_SIZES}
    everything = [Point(panel, value, engine) for panel in panels for value in values[panel] for engine in ENGINES]
    return [point for point in everything if point.panel != "towers" or point.engine != "single" or point.value == towers[0]]


def measure(everything, rounds, steps):
    """The milliseconds of each point's steps, round by round, and why runs have failed; those are not run again."""
    milliseconds, failures = {point: [] for point in everything}, {}
    for number in range(1, rounds + 1):
        for point in everything:
            if point in failures:
                continue
            start = time.perf_counter()
            try:
                milliseconds[point].append(measure_in_new_process(point.run(steps)).step_milliseconds)
            except RunFailedError as error:
                failures[point] = str(error)
            seconds = time.perf_counter() - start
            text = f"round {number} of {rounds}: {point.panel} {point.value:,}, {point.engine}, {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)
    return milliseconds, failures


def summarize(milliseconds):
    """A row for each point that was measured."""
    rows = []
    for point, by_round in milliseconds.items():
        if by_round:
            low, median, high = np.percentile(np.concatenate(by_round), [10, 50, 90])
            rows.append(Row(*point, float(median), float(low), float(high)))
    return rows


def print_table(rows, milliseconds):
    """Prints medians, and how long keras_dp takes over MirroredStrategy, with the range of that ratio by round."""
    print(f"{'panel':<12}{'value':>12}" + "".join(f"{engine + ', ms':>14}" for engine in ENGINES) + f"{'over mirrored':>24}")
    medians = {(row.panel, row.value, row.engine): row.median_milliseconds for row in rows}
    for panel, value in dict.fromkeys((row.panel, row.value) for row in rows):
        cells = [medians.get((panel, value, engine)) for engine in ENGINES]
        ratios = [
            statistics.median(ours) / statistics.median(theirs)
            for ours, theirs in zip(*(milliseconds[panel, value, engine] for engine in ("keras_dp", "mirrored")), strict=False)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"
        shown = "".join(f"{'-' if cell is None else format(cell, '.2f'):>14}" for cell in cells)
        print(f"{panel:<12}{value:>12,}{shown}{ratio:>24}")


def draw(rows, path):
    """Draws a panel for each sweep."""
    # Only here: the runs' processes import this module too, for its models.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    titles = {
        "towers": "ResNet-20, batch 64",
        "parameters": "Three dense layers, batch 64, 2 towers",
        "batch": "MLP, 2 towers",
    }
    labels = {"towers": "towers", "parameters": "parameters", "batch": "rows in a batch"}
    panels = [panel for panel in PANELS if any(row.panel == panel for row in rows)]
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Step, median and 10 % to 90 % of steps")
    shown = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        values = sorted({row.value for row in rows if row.panel == panel})
        # Towers' times stay within a small range, which is best seen from zero.
        axes.set(title=titles[panel], xlabel=labels[panel], xscale="log", yscale="linear" if panel == "towers" else "log")
        for index, engine in enumerate(ENGINES):
            line = [row for row in rows if (row.panel, row.engine) == (panel, engine)]
            if not line:
                continue
            low, median, high = (
                np.array([getattr(row, f"{name}_milliseconds") for row in line]) for name in ("low", "median", "high")
            )
            if panel == "towers" and engine == "single":
                shown[engine] = axes.axhline(median[0], color=f"C{index}", linestyle="--")
                continue
            # Beside each other, the spreads do not hide each other.
            positions = [row.value * 1.04 ** (index - 1) for row in line]
            spread = [median - low, high - median]
            shown[engine] = axes.errorbar(positions, median, spread, color=f"C{index}", marker=MARKERS[engine], capsize=3)
        if panel == "parameters":
            axes.xaxis.set_major_locator(LogLocator())
        else:
            axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        if panel == "towers":
            axes.set_ylim(0, None)
        else:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda milliseconds, _: f"{milliseconds:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("ms")
        axes.grid(alpha=0.3)
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(ENGINES))
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=PANELS, help="which to measure (default: %(default)s)")
    parser.add_argument(
        "--towers", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the first panel (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="timed steps in each run, after the warm-up (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of about nine minutes on two cores (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIRECTORY", help="where to write the files (default: %(default)s)"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Where the runs' processes look for scaling:dense_1e5 and so on.
    os.chdir(Path(__file__).parent)
    milliseconds, failures = measure(points(args.panels, args.towers), args.rounds, args.steps)
    rows = summarize(milliseconds)
    print(environment.description())
    print_table(rows, milliseconds)
    for point, message in failures.items():
        print(f"\n{point.panel} {point.value:,}, {point.engine} failed:\n{message}")
    everything = {
        "environment": environment.environment(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [{**point._asdict(), "step_milliseconds": by_round} for point, by_round in milliseconds.items()],
        "failures": [{**point._asdict(), "message": message} for point, message in failures.items()],
    }
    (out / "scaling.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    draw(rows, out / "scaling.png")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
