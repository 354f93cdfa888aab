"""Run `keras-dp bench`: time the training steps of keras_dp, plain Keras and MirroredStrategy.

The engines take turns, each run in a process of its own, so that other load on the machine affects all of them. All engines
train the same model from the same weights on the same batches, which are ready in memory. Without GPUs, the CPU is split into
one logical device per tower. The engines:

  keras_dp   keras_dp.DataParallelModel
  ceiling    the same towers without exchange; the extra time of other engines is the cost of data parallelism
  single     plain Keras on one device, with all cores
  mirrored   tf.distribute.MirroredStrategy

With --out, results are written after each round. Ctrl-C ends a benchmark and shows the results so far. --redraw makes the
table and the figure again from a bench.json. --compare says whether steps are faster in one bench.json than in another.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dp import choices, installation
from keras_dp.cli import runs, tables
from keras_dp.cli.arguments import add_model_arguments, argument, positive
from keras_dp.cli.bench import plot, summary
from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.runs import Measurement, Run, RunFailedError, Survey

ALWAYS = ("keras_dp", "ceiling")
OTHERS = ("single", "mirrored")
INTERRUPTED = 130  # the exit code of a process that SIGINT ends
NO_FIGURE = "bench.png is not drawn, because matplotlib is missing. Run {}, and draw it with --redraw."

_DEVICE = re.compile(r"(/?device:)?(CPU|GPU):\d+", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--against",
        type=argument(_engines),
        default=list(OTHERS),
        metavar="ENGINE,...",
        help="engines to compare with: single, mirrored or none (default: single,mirrored)",
    )
    parser.add_argument(
        "--parameter-device",
        type=argument(_parameter_device),
        metavar="DEVICE",
        help='device where the variables live, such as CPU:0, or "sharded" over the towers',
    )
    parser.add_argument(
        "--batch-norm",
        choices=choices.values_of(choices.BatchNorm),
        default="sync",
        help="mode of batch normalization (default: %(default)s)",
    )
    parser.add_argument("--gradient-dtype", choices=("bfloat16", "float16"), help="dtype of the gradients that towers send")
    parser.add_argument(
        "--jit-compile", action="store_true", help="let XLA compile as much as it can; ignored for a compiled model"
    )
    for name, default, purpose in (
        ("rounds", 3, "number of runs of each engine"),
        ("steps", 50, "timed steps in each run"),
        ("warm-up", 10, "untimed steps at the start of each run"),
    ):
        parser.add_argument(f"--{name}", type=argument(positive), default=default, help=f"{purpose} (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write bench.json, bench.csv and bench.png")
    parser.add_argument(
        "--profile", action="store_true", help="record steps of keras_dp in DIRECTORY/profile, for TensorBoard; needs --out"
    )
    parser.add_argument(
        "--redraw",
        type=argument(_results),
        metavar="bench.json",
        help="measure nothing; make the table and the figure again from this file, in --out or else beside the file",
    )
    parser.add_argument(
        "--compare",
        type=argument(_results),
        nargs=2,
        metavar=("old.json", "new.json"),
        help="measure nothing; compare the step times of two bench.json, with the noise of their rounds",
    )


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table and writes the files.

    Args:
        options: the arguments that `add_arguments` declares, and `command`, the command line.

    Returns:
        The exit code: 130 if the benchmark was interrupted, otherwise 1 if a run has failed, otherwise 0.

    Raises:
        argparse.ArgumentError: if options contradict each other, the model cannot be measured, or there are too few GPUs.
    """
    if options.redraw is not None:
        path, results = options.redraw
        _show(results)
        _write(results, options.out or path.parent)
        return 0
    if options.compare is not None:
        try:
            print(summary.compare(*(results for _, results in options.compare)))
        except (ValueError, KeyError, TypeError) as error:
            raise argparse.ArgumentError(None, f"--compare: {error}") from error
        return 0
    survey = _survey(options)
    cells = _cells(options, survey)
    rounds: list[dict[Cell, Measurement]] = []
    failures: dict[Cell, str] = {}
    results = functools.partial(_results_of, options, survey, cells, rounds, failures)
    interrupted = False
    try:
        for _ in _measure(options, cells, rounds, failures):
            if options.out is not None:
                _write(results(), options.out)
    except KeyboardInterrupt:
        interrupted = True
    if not any(rounds) and not failures:
        _say("\ninterrupted: nothing was measured")
        return INTERRUPTED
    if interrupted:
        _say("\ninterrupted: these are the results so far")
        if options.out is not None:
            _write(results(), options.out)
    _show(results())
    return INTERRUPTED if interrupted else int(bool(failures))


def _survey(options: argparse.Namespace) -> Survey:
    """Surveys the model and the machine, and refuses options that would stop the benchmark later."""
    if options.profile and options.out is None:
        raise argparse.ArgumentError(None, "--profile needs a directory to write to. Add --out DIRECTORY.")
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()
        except OSError as error:
            raise argparse.ArgumentError(None, f"--out: nothing can be written there: {error}") from error
        if importlib.util.find_spec("matplotlib") is None:
            _say(NO_FIGURE.format(installation.command("bench")))
    _say(f"inspecting the model {options.model} and this machine")
    try:
        survey = runs.survey_in_new_process(options.model)
    except RunFailedError as error:
        raise argparse.ArgumentError(None, f"--model: {options.model} cannot be built:\n{error}") from error
    if survey.problem is not None:
        raise argparse.ArgumentError(None, f"--model: {survey.problem}")
    if survey.gpus and max(options.towers) > survey.gpus:
        raise argparse.ArgumentError(
            None,
            f"--towers: there are only {survey.gpus} GPUs. Received: {max(options.towers)}. Use fewer, or hide the GPUs from "
            "TensorFlow with CUDA_VISIBLE_DEVICES=-1 to measure on the CPU.",
        )
    return survey


def _cells(options: argparse.Namespace, survey: Survey) -> list[Cell]:
    """Lists the cells to measure, in the order of the table."""
    batch_size = options.batch or survey.batch_size
    return [
        Cell(engine, towers, batch_size * towers if options.scaling == "weak" else batch_size)
        for towers in options.towers
        for engine in (*ALWAYS, *options.against)
    ]


def _measure(
    options: argparse.Namespace,
    cells: Sequence[Cell],
    rounds: list[dict[Cell, Measurement]],
    failures: dict[Cell, str],
) -> Any:
    """Fills in the measurements and the failures of each round, and yields after each round.

    A cell that has failed is not run again.
    """
    measured = list(dict.fromkeys(cell.measured for cell in cells))
    begin, done = time.monotonic(), 0
    for number in range(1, options.rounds + 1):
        rounds.append({})
        for cell in measured:
            if cell in failures:
                continue
            left = (len(measured) - len(failures)) * options.rounds - done
            remaining = f", about {_duration((time.monotonic() - begin) / done * left)} to go" if done else ""
            _say(f"round {number} of {options.rounds}: {cell.engine} on {_devices(cell)}{remaining}")
            try:
                rounds[-1][cell] = runs.measure_in_new_process(_run(options, cell, number))
            except RunFailedError as error:
                failures[cell] = str(error)
            done += 1
        yield


def _say(text: str) -> None:
    """Prints a line about the progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _run(options: argparse.Namespace, cell: Cell, number: int) -> Run:
    """Returns the run of a cell in a round. Only the first round counts bytes and records a profile."""
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


def _results_of(
    options: argparse.Namespace,
    survey: Survey,
    cells: Sequence[Cell],
    rounds: Sequence[Mapping[Cell, Measurement]],
    failures: Mapping[Cell, str],
) -> dict[str, Any]:
    """Returns all results, as bench.json holds them."""
    known = {*failures, *(cell for measurements in rounds for cell in measurements)}
    return {
        "command": options.command,
        "title": f"{options.model}, {options.scaling} scaling",
        "environment": survey.environment,
        "rows": [dataclasses.asdict(summary.summarize(cell, rounds)) for cell in cells if cell.measured in known],
        "runs": [
            {"round": number, **cell._asdict(), **dataclasses.asdict(measurement)}
            for number, measurements in enumerate(rounds, 1)
            for cell, measurement in measurements.items()
        ],
        "failures": [{**cell._asdict(), "message": message} for cell, message in failures.items()],
    }


def _show(results: Mapping[str, Any]) -> None:
    """Prints the table and the failures."""
    rows = [summary.Row(**row) for row in results["rows"]]
    rounds = max((run["round"] for run in results["runs"]), default=0)
    width = tables.terminal_width()
    print(f"{summary.machine(results['environment'])}\n{results['command']}\n\n{summary.table(rows, width)}\n")
    print(tables.legend(summary.LEGEND, width))
    print(f"measured in {rounds} round{'' if rounds == 1 else 's'}")
    for failure in results["failures"]:
        cell = Cell(*(failure[name] for name in Cell._fields))
        print(f"\n{cell.engine} on {_devices(cell)} failed:\n{failure['message']}")


def _write(results: Mapping[str, Any], directory: Path) -> None:
    """Writes bench.json, bench.csv and, if matplotlib is installed, bench.png."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [summary.Row(**row) for row in results["rows"]]
    (directory / "bench.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    summary.write_csv(rows, directory / "bench.csv")
    try:
        plot.write_figure(rows, results["title"], directory / "bench.png")
    except ImportError:
        _say(NO_FIGURE.format(installation.command("bench")))


def _engines(value: str) -> list[str]:
    engines = [] if value == "none" else list(dict.fromkeys(value.split(",")))
    unknown = [engine for engine in engines if engine not in OTHERS]
    if unknown:
        question = choices.question(unknown[0], [*OTHERS, "none"])
        raise ValueError(f"The engines to compare with are {', '.join(OTHERS)}, or none.{question} Received: {unknown[0]!r}")
    return engines


def _parameter_device(value: str) -> str:
    if value != "sharded" and not _DEVICE.fullmatch(value):
        question = choices.question(value, ["sharded"])
        raise ValueError(f'must be a device, such as CPU:0 or GPU:1, or "sharded".{question} Received: {value!r}')
    return value


def _results(value: str) -> tuple[Path, dict[str, Any]]:
    path = Path(value)
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in ("command", "rows", "runs") if name not in results]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return path, {"title": results["command"], **results}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"must be a bench.json that keras-dp bench has written. Received: {value!r}, {error!r}") from error
