"""Times training steps of keras_dp beside plain Keras on one device and tf.distribute.MirroredStrategy.

The engines take turns, each run in a process of its own, so that whatever else the machine does meets all of them. All train
the same model from the same weights on the same batches, which are ready in memory. Without GPUs, the CPU is split into one
logical device per tower. The engines:

  keras_dp   keras_dp.DataParallelModel
  ceiling    its towers without the sums over them: all that the others take longer is what data parallelism costs
  single     plain Keras on one device, with all cores
  mirrored   tf.distribute.MirroredStrategy
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_dp.batch_norm import MODES
from keras_dp.cli import environment, models, plot, summary
from keras_dp.cli.measurement import Measurement, Run, RunFailedError, measure_in_new_process
from keras_dp.cli.summary import Cell, Row

ALWAYS = ("keras_dp", "ceiling")
OTHERS = ("single", "mirrored")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    models_known = ", ".join(models.BUILT_IN)
    parser.add_argument(
        "--model",
        type=_argument(_model),
        default="mlp",
        help=f"{models_known}, or my_module:build_function, which returns a built keras.Model; if that is compiled, it is "
        "trained as it is, and else with SGD and the mean squared error (default: %(default)s)",
    )
    parser.add_argument(
        "--towers",
        type=_argument(_towers),
        default=[1, 2, 4, 8],
        metavar="N,N,...",
        help="numbers of devices to measure (default: 1,2,4,8)",
    )
    parser.add_argument("--batch", type=_argument(_positive), help="rows in a batch (default: the model's own)")
    parser.add_argument(
        "--scaling",
        choices=("strong", "weak"),
        default="strong",
        help="what --batch is for: all towers together, or each of them (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        type=_argument(_engines),
        default=list(OTHERS),
        metavar="ENGINE,...",
        help="what to compare with: single, mirrored, or none (default: single,mirrored)",
    )
    parser.add_argument("--parameter-device", metavar="DEVICE", help='where the variables live, or "sharded" over the towers')
    parser.add_argument("--batch-norm", choices=MODES, default="sync", help="whose moments normalize (default: %(default)s)")
    parser.add_argument("--gradient-dtype", choices=("bfloat16", "float16"), help="of gradients sent from the towers")
    parser.add_argument(
        "--jit-compile", action="store_true", help="let XLA compile what it can reach, in a model that is not compiled already"
    )
    for name, default, purpose in (
        ("rounds", 3, "how often each engine runs"),
        ("steps", 50, "timed steps in each run"),
        ("warm-up", 10, "steps before those"),
    ):
        parser.add_argument(f"--{name}", type=_argument(_positive), default=default, help=f"{purpose} (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write bench.json, bench.csv and bench.png")
    parser.add_argument(
        "--profile", action="store_true", help="record steps of keras_dp in DIRECTORY/profile, for TensorBoard; needs --out"
    )


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table and writes the files.

    Args:
        options: what `add_arguments` declares, and `command`, the command line.

    Returns:
        The exit code: 1 if one of the runs has failed, and else 0.

    Raises:
        argparse.ArgumentError: if the options do not go together, or the machine has too few GPUs.
    """
    if options.profile and options.out is None:
        raise argparse.ArgumentError(None, "--profile needs a directory to write to. Add --out DIRECTORY.")
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and max(options.towers) > gpus:
        raise argparse.ArgumentError(
            None,
            f"--towers: there are only {gpus} GPUs. Received: {max(options.towers)}. Use fewer, or hide the GPUs from "
            "TensorFlow with CUDA_VISIBLE_DEVICES=-1 to measure on the CPU.",
        )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    cells = _cells(options)
    rounds, failures = _measure(options, cells)
    rows = [summary.summarize(cell, rounds) for cell in cells]
    print(f"{environment.description()}\n{options.command}\n\n{summary.table(rows)}")
    for cell, message in failures.items():
        print(f"\n{cell.engine} on {_devices(cell)} failed:\n{message}")
    if options.out is not None:
        _write(options, rows, rounds, failures)
    return 1 if failures else 0


def _cells(options: argparse.Namespace) -> list[Cell]:
    """What to measure, in the order of the table."""
    batch_size = options.batch or models.workload(options.model).batch_size
    return [
        Cell(engine, towers, batch_size * towers if options.scaling == "weak" else batch_size)
        for towers in options.towers
        for engine in (*ALWAYS, *options.against)
    ]


def _measure(options: argparse.Namespace, cells: Sequence[Cell]) -> tuple[list[dict[Cell, Measurement]], dict[Cell, str]]:
    """The measurements of each round, and why runs have failed; what failed once is not run again."""
    rounds: list[dict[Cell, Measurement]] = []
    failures: dict[Cell, str] = {}
    for number in range(1, options.rounds + 1):
        rounds.append({})
        for cell in dict.fromkeys(cell.measured for cell in cells):
            if cell in failures:
                continue
            print(f"round {number} of {options.rounds}: {cell.engine} on {_devices(cell)}", file=sys.stderr, flush=True)
            try:
                rounds[-1][cell] = measure_in_new_process(_run(options, cell, number))
            except RunFailedError as error:
                failures[cell] = str(error)
    return rounds, failures


def _run(options: argparse.Namespace, cell: Cell, number: int) -> Run:
    """The run of a cell in a round; what does not vary from round to round is looked at in the first."""
    once = cell.engine == "keras_dp" and number == 1
    return Run(
        *cell,
        model=options.model,
        parameter_device=options.parameter_device,
        batch_norm=options.batch_norm,
        gradient_dtype=options.gradient_dtype,
        jit_compile=options.jit_compile,
        steps=options.steps,
        warm_up=options.warm_up,
        count_bytes=once,
        profile_directory=str(options.out / "profile" / f"{cell.towers}_towers") if options.profile and once else None,
    )


def _devices(cell: Cell) -> str:
    if cell.engine == "single":
        return f"one device, batch {cell.batch_size}"
    return f"{cell.towers} tower{'s' if cell.towers > 1 else ''}"


def _write(
    options: argparse.Namespace,
    rows: Sequence[Row],
    rounds: Sequence[Mapping[Cell, Measurement]],
    failures: Mapping[Cell, str],
) -> None:
    """Writes bench.json, bench.csv and, if there is matplotlib, bench.png."""
    everything = {
        "command": options.command,
        "environment": environment.environment(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [
            {"round": number, **cell._asdict(), **dataclasses.asdict(measurement)}
            for number, measurements in enumerate(rounds, 1)
            for cell, measurement in measurements.items()
        ],
        "failures": [{**cell._asdict(), "message": message} for cell, message in failures.items()],
    }
    (options.out / "bench.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    summary.write_csv(rows, options.out / "bench.csv")
    try:
        plot.write_figure(rows, f"{options.model}, {options.scaling} scaling", options.out / "bench.png")
    except ImportError as error:
        print(f"bench.png is not drawn: {error}. Install matplotlib with pip install keras_dp[bench].", file=sys.stderr)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type for argparse that shows what `parse` has to say of a wrong value."""

    def checked(value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def _positive(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"This is an integer of at least 1. Received: {value!r}")
    return int(value)


def _towers(value: str) -> list[int]:
    return sorted({_positive(towers) for towers in value.split(",")})


def _engines(value: str) -> list[str]:
    engines = [] if value == "none" else list(dict.fromkeys(value.split(",")))
    unknown = [engine for engine in engines if engine not in OTHERS]
    if unknown:
        raise ValueError(f"The engines to compare with are {', '.join(OTHERS)}, or none. Received: {unknown[0]!r}")
    return engines


def _model(value: str) -> str:
    models.workload(value)
    return value
