"""Run `keras-dp bench`: time the training steps of keras_dp, plain Keras and MirroredStrategy.

The engines take turns, each run in a process of its own, so that other load on the machine affects all of them. All engines
train the same model from the same weights on the same batches, which are ready in memory. Without GPUs, the CPU is split into
one logical device per tower. The engines:

  keras_dp   keras_dp.DataParallelModel
  ceiling    the same towers without exchange; the extra time of other engines is the cost of data parallelism
  workers    with --workers: the same towers, shared by several processes, which keras-dp launch starts
  single     plain Keras on one device, with all cores
  mirrored   tf.distribute.MirroredStrategy

With --out, results are written after each round. Ctrl-C ends a benchmark and shows the results so far.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dp import choices, installation, tables
from keras_dp.cli import runs
from keras_dp.cli.arguments import add_model_arguments, argument, positive
from keras_dp.cli.bench import plot, summary
from keras_dp.cli.bench.beside_plan import contradictions
from keras_dp.cli.bench.rounds import devices, measure_in_turns, say
from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.runs import Measurement, Run, RunFailedError, Survey

OTHERS = ("single", "mirrored")
TOWERS = [1, 2, 4, 8]
INTERRUPTED = 130  # the exit code of a process that SIGINT ends

_DEVICE = re.compile(r"(/?device:)?(CPU|GPU):\d+", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_model_arguments(parser)
    parser.set_defaults(towers=None)
    parser.add_argument(
        "--workers",
        type=argument(positive),
        metavar="N",
        help="also measure N worker processes that share the towers (default: of --towers, then: N)",
    )
    parser.add_argument(
        "--against",
        type=argument(_engines),
        default=list(OTHERS),
        metavar="ENGINE,...",
        help=f"engines to compare with: {', '.join(OTHERS)} or none (default: {','.join(OTHERS)})",
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
    parser.add_argument("--json", action="store_true", help="print the results as JSON, as in bench.json")
    parser.add_argument(
        "--profile", action="store_true", help="record steps of keras_dp in DIRECTORY/profile, for TensorBoard; needs --out"
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
    _refuse_contradictions(options)
    survey = _survey(options)
    cells = _cells(options, survey)
    rounds: list[dict[Cell, Measurement]] = []
    failures: dict[Cell, str] = {}
    results = functools.partial(_results_of, options, survey, cells, rounds, failures)
    interrupted = False
    try:
        for _ in measure_in_turns(cells, options.rounds, functools.partial(_measure, options), rounds, failures):
            _write(results(), options)
    except KeyboardInterrupt:
        interrupted = True
    if not any(rounds) and not failures:
        say("\ninterrupted: nothing was measured")
        return INTERRUPTED
    if interrupted:
        say("\ninterrupted: these are the results so far")
        _write(results(), options)
    _show(results(), options)
    if not interrupted:
        of_machine = results()
        rows = [summary.Row(**row) for row in of_machine["rows"]]
        for contradiction in contradictions(of_machine["environment"], rows, options):
            say(contradiction)
    return INTERRUPTED if interrupted else int(bool(failures))


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Refuses arguments that contradict each other, and chooses the towers if none are named."""
    options.towers = options.towers or ([options.workers] if options.workers else TOWERS)
    if options.profile and options.out is None:
        raise argparse.ArgumentError(None, "--profile needs a directory to write to. Add --out DIRECTORY.")
    if options.workers and any(towers % options.workers for towers in options.towers):
        raise argparse.ArgumentError(
            None,
            f"--towers: {options.workers} workers share the towers evenly. Received: {', '.join(map(str, options.towers))} "
            f"towers. Use multiples of {options.workers}.",
        )


def _survey(options: argparse.Namespace) -> Survey:
    """Surveys the model and the machine, and refuses options that would stop the benchmark later."""
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()
        except (OSError, ValueError) as error:  # a path may hold no null character
            raise argparse.ArgumentError(None, f"--out: nothing can be written there: {error}") from error
        if importlib.util.find_spec("matplotlib") is None:
            say(f"bench.png is not drawn, because matplotlib is missing. Run {installation.command('bench')}.")
    say(f"inspecting {options.model} and this machine")
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
    engines = ["keras_dp", "ceiling", *(["workers"] if options.workers else []), *options.against]
    return [
        Cell(engine, towers, batch_size * towers if options.scaling == "weak" else batch_size)
        for towers in options.towers
        for engine in engines
    ]


def _measure(options: argparse.Namespace, cell: Cell, number: int) -> Measurement:
    """Measures a cell in a round. Only the first round counts bytes and records a profile."""
    once = cell.engine == "keras_dp" and number == 1
    return runs.measure_in_new_process(
        Run(
            *cell,
            model=options.model,
            workers=options.workers if cell.engine == "workers" else 1,
            parameter_device=options.parameter_device,
            batch_norm=options.batch_norm,
            gradient_dtype=options.gradient_dtype,
            jit_compile=options.jit_compile,
            steps=options.steps,
            warm_up=options.warm_up,
            count_bytes=once,
            profile_directory=str(options.out / "profile" / f"{cell.towers}_towers") if options.profile and once else None,
        )
    )


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
        "environment": survey.environment,
        "rows": [dataclasses.asdict(summary.summarize(cell, rounds)) for cell in cells if cell.measured in known],
        "runs": [
            {"round": number, **cell._asdict(), **dataclasses.asdict(measurement)}
            for number, measurements in enumerate(rounds, 1)
            for cell, measurement in measurements.items()
        ],
        "failures": [{**cell._asdict(), "message": message} for cell, message in failures.items()],
    }


def _show(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Prints the table and the failures; on stderr, if the results are printed as JSON."""
    rows = [summary.Row(**row) for row in results["rows"]]
    rounds = max((run["round"] for run in results["runs"]), default=0)
    width = tables.terminal_width()
    file = sys.stderr if options.json else sys.stdout
    out = functools.partial(print, file=file)
    out(f"{summary.machine(results['environment'])}\n{results['command']}\n")
    tables.console(file).print(tables.table(summary.COLUMNS, rows, width, group=lambda row: row.towers))
    out(f"\n{tables.legend(summary.LEGEND, width)}")
    out(f"measured in {rounds} round{'' if rounds == 1 else 's'}")
    for failure in results["failures"]:
        cell = Cell(*(failure[name] for name in Cell._fields))
        out(f"\n{cell.engine} on {devices(cell)} failed:\n{failure['message']}")
    if options.json:
        print(json.dumps(results, indent=1))


def _write(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Writes bench.json, bench.csv and, if matplotlib is installed, bench.png; nothing without --out."""
    if options.out is None:
        return
    rows = [summary.Row(**row) for row in results["rows"]]
    (options.out / "bench.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    summary.write_csv(rows, options.out / "bench.csv")
    if importlib.util.find_spec("matplotlib") is not None:
        plot.write_figure(rows, f"{options.model}, {options.scaling} scaling", options.out / "bench.png")


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
