"""Run `keras-dp bench`: time the training steps of keras_dp, plain Keras, MirroredStrategy and DistributedDataParallel.

The engines take turns, each run in a process of its own, so that other load on the machine affects all of them. All engines
train the same model on the same batches, which are ready in memory, and all but those of PyTorch from the same weights. Without
GPUs, the CPU is split into one logical device per tower. The engines:

  keras_dp   keras_dp.DataParallelModel
  ceiling    the same towers without exchange; the extra time of other engines is the cost of data parallelism
  workers    with --workers: the same towers, shared by several processes, which keras-dp launch starts
  single     plain Keras on one device, with all cores
  mirrored   tf.distribute.MirroredStrategy
  torch      Keras on PyTorch, in one process with all cores, from other weights and without metrics
  ddp        the same with DistributedDataParallel over gloo, in one process for each tower

With --end-to-end, whole trainings are measured in place of steps: your data, epochs and evaluation. The table shows whether the
final loss and metrics are those of plain Keras.

With --out, results are written after each round. Ctrl-C ends a benchmark and shows the results so far. --redraw makes the
table and the figure again from a bench.json. --compare says whether one bench.json is faster than another.
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
from keras_dp.cli.arguments import MODELS, add_model_arguments, argument, function_name, positive
from keras_dp.cli.bench import comparison, plot, results_file, step_summary, summary
from keras_dp.cli.bench.kinds import KINDS
from keras_dp.cli.bench.rounds import devices, measure_in_turns, say
from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.runs import OF_TORCH, Measurement, Run, RunFailedError, Setup, Survey, Training, TrainingMeasurement

OTHERS = ("single", "mirrored", "torch", "ddp")
TOWERS = [1, 2, 4, 8]
# The arguments of one kind of benchmark, with their defaults.
OF_STEPS = {"batch": None, "scaling": "strong", "steps": 50, "warm_up": 10, "profile": False}
OF_TRAININGS = {"data": None, "validation": None, "epochs": 3}
INTERRUPTED = 130  # the exit code of a process that SIGINT ends
NO_FIGURE = "bench.png is not drawn, because matplotlib is missing. Run {}, and draw it with --redraw."

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
        "--end-to-end", action="store_true", help="measure whole trainings with --data, --validation and --epochs, not steps"
    )
    for name, purpose in (("data", "the batches of an epoch, such as a tf.data.Dataset"), ("validation", "those to evaluate")):
        parser.add_argument(
            f"--{name}",
            type=argument(function_name),
            metavar="MODULE:FUNCTION",
            help=f"with --end-to-end: returns {purpose}; imported like a model",
        )
    parser.add_argument(
        "--epochs", type=argument(positive), default=OF_TRAININGS["epochs"], help="with --end-to-end (default: %(default)s)"
    )
    parser.add_argument(
        "--against",
        type=argument(_engines),
        metavar="ENGINE,...",
        help="engines to compare with: single, mirrored, torch, ddp or none (default: single,mirrored; with --workers and a "
        "built-in model also torch,ddp, if PyTorch is installed)",
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
        ("steps", OF_STEPS["steps"], "timed steps in each run"),
        ("warm-up", OF_STEPS["warm_up"], "untimed steps at the start of each run"),
    ):
        parser.add_argument(f"--{name}", type=argument(positive), default=default, help=f"{purpose} (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="where to write bench.json, bench.csv and bench.png")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, as in bench.json")
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
        help="measure nothing; compare the times of two bench.json, with the noise of their rounds",
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
        try:
            results_file.refuse_what_has_no_table(results)
        except ValueError as error:
            raise argparse.ArgumentError(None, f"--redraw: {path} has no table: {error}") from error
        _show(results, options)
        try:
            _write(results, options.out or path.parent)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentError(None, f"--redraw: the files cannot be written: {error}") from error
        return 0
    if options.compare is not None:
        try:
            tables.console().print(comparison.compare(*(results for _, results in options.compare)))
        except ValueError as error:
            raise argparse.ArgumentError(None, f"--compare: {error}") from error
        return 0
    _refuse_contradictions(options)
    survey = _survey(options)
    cells = _cells(options, survey)
    rounds: list[dict[Cell, Any]] = []
    failures: dict[Cell, str] = {}
    results = functools.partial(_results_of, options, survey, cells, rounds, failures)
    interrupted = False
    try:
        for _ in measure_in_turns(cells, options.rounds, functools.partial(_measure, options), rounds, failures):
            if options.out is not None:
                _write(results(), options.out)
    except KeyboardInterrupt:
        interrupted = True
    if not any(rounds) and not failures:
        say("\ninterrupted: nothing was measured")
        return INTERRUPTED
    if interrupted:
        say("\ninterrupted: these are the results so far")
        if options.out is not None:
            _write(results(), options.out)
    _show(results(), options)
    return INTERRUPTED if interrupted else int(bool(failures))


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Refuses arguments that contradict each other, and chooses the towers if none are named."""
    options.towers = options.towers or ([options.workers] if options.workers else TOWERS)
    others, advice = (
        (OF_STEPS, "is for steps, not for whole trainings. Leave it out")
        if options.end_to_end
        else (OF_TRAININGS, "is for whole trainings. Add --end-to-end")
    )
    misplaced = [f"--{name.replace('_', '-')}" for name, default in others.items() if getattr(options, name) != default]
    problem = f"{misplaced[0]} {advice}." if misplaced else None
    if options.end_to_end and options.data is None:
        problem = "--end-to-end needs the data to train on. Add --data my_module:batches."
    elif options.profile and options.out is None:
        problem = "--profile needs a directory to write to. Add --out DIRECTORY."
    elif options.end_to_end and (of_torch := _of_torch(options)):
        problem = f"--against: whole trainings are not measured with {of_torch[0]}. Use single or mirrored."
    elif options.workers and any(towers % options.workers for towers in options.towers):
        problem = (
            f"--towers: {options.workers} workers share the towers evenly. Received: {', '.join(map(str, options.towers))} "
            f"towers. Use multiples of {options.workers}."
        )
    if problem is not None:
        raise argparse.ArgumentError(None, problem)


def _survey(options: argparse.Namespace) -> Survey:
    """Surveys the model and the machine, and refuses options that would stop the benchmark later."""
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()
        except (OSError, ValueError) as error:  # a path may hold no null character
            raise argparse.ArgumentError(None, f"--out: nothing can be written there: {error}") from error
        if importlib.util.find_spec("matplotlib") is None and not options.end_to_end:
            say(NO_FIGURE.format(installation.command("bench")))
    of_torch = _of_torch(options)
    if of_torch and importlib.util.find_spec("torch") is None:
        raise argparse.ArgumentError(None, f"--against: {of_torch[0]} needs PyTorch. Run pip install torch.")
    names = [name for name in (options.model, options.data, options.validation) if name is not None]
    say(f"inspecting {', '.join(names)} and this machine")
    option = "--end-to-end" if options.end_to_end else "--model"
    try:
        survey = runs.survey_in_new_process(*names)
    except RunFailedError as error:
        raise argparse.ArgumentError(None, f"{option}: {' and '.join(names)} cannot be built:\n{error}") from error
    if survey.problem is not None:
        raise argparse.ArgumentError(None, f"{option}: {survey.problem}")
    if survey.gpus and max(options.towers) > survey.gpus:
        raise argparse.ArgumentError(
            None,
            f"--towers: there are only {survey.gpus} GPUs. Received: {max(options.towers)}. Use fewer, or hide the GPUs from "
            "TensorFlow with CUDA_VISIBLE_DEVICES=-1 to measure on the CPU.",
        )
    if survey.gpus and of_torch:
        raise argparse.ArgumentError(
            None,
            f"--against: {of_torch[0]} is measured on CPUs alone. Use single or mirrored, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES=-1.",
        )
    if options.against is None:
        is_of_torch = options.workers and not options.end_to_end and options.model in MODELS and not survey.gpus
        has_torch = importlib.util.find_spec("torch") is not None
        options.against = ["single", "mirrored", *(OF_TORCH if is_of_torch and has_torch else ())]
    return survey


def _of_torch(options: argparse.Namespace) -> list[str]:
    """Lists the named engines that train with PyTorch."""
    return [engine for engine in options.against or () if engine in OF_TORCH]


def _cells(options: argparse.Namespace, survey: Survey) -> list[Cell]:
    """Lists the cells to measure, in the order of the table. The ceiling's training is useless: it only counts for steps."""
    batch_size = options.batch or survey.batch_size
    engines = ["keras_dp"]
    engines += [] if options.end_to_end else ["ceiling"]
    engines += ["workers"] if options.workers else []
    return [
        Cell(engine, towers, batch_size * towers if options.scaling == "weak" else batch_size)
        for towers in options.towers
        for engine in (*engines, *options.against)
    ]


def _measure(options: argparse.Namespace, cell: Cell, number: int) -> Measurement | TrainingMeasurement:
    """Measures a cell in a round. Only the first round counts bytes and records a profile."""
    setup = Setup(
        *cell,
        model=options.model,
        workers={"workers": options.workers, "ddp": cell.towers}.get(cell.engine, 1),
        parameter_device=options.parameter_device,
        batch_norm=options.batch_norm,
        gradient_dtype=options.gradient_dtype,
        jit_compile=options.jit_compile,
    )
    common = dataclasses.asdict(setup)
    if options.end_to_end:
        return runs.train_in_new_process(
            Training(**common, data=options.data, validation=options.validation, epochs=options.epochs)
        )
    once = cell.engine == "keras_dp" and number == 1
    profile = str(options.out / "profile" / f"{cell.towers}_towers") if options.profile and once else None
    return runs.measure_in_new_process(
        Run(**common, steps=options.steps, warm_up=options.warm_up, count_bytes=once, profile_directory=profile)
    )


def _results_of(
    options: argparse.Namespace,
    survey: Survey,
    cells: Sequence[Cell],
    rounds: Sequence[Mapping[Cell, Any]],
    failures: Mapping[Cell, str],
) -> dict[str, Any]:
    """Returns all results, as bench.json holds them."""
    known = {*failures, *(cell for measurements in rounds for cell in measurements)}
    measures = "trainings" if options.end_to_end else "steps"
    summarize = KINDS[measures].summarize
    return {
        "command": options.command,
        "measures": measures,
        "title": f"{options.model}, {options.scaling} scaling",
        "environment": survey.environment,
        "rows": [dataclasses.asdict(summarize(cell, rounds)) for cell in cells if cell.measured in known],
        "runs": [
            {"round": number, **cell._asdict(), **dataclasses.asdict(measurement)}
            for number, measurements in enumerate(rounds, 1)
            for cell, measurement in measurements.items()
        ],
        "failures": [{**cell._asdict(), "message": message} for cell, message in failures.items()],
    }


def _show(results: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Prints the table and the failures; on stderr, if the results are printed as JSON."""
    kind = KINDS[results["measures"]]
    rows = [kind.row(**row) for row in results["rows"]]
    rounds = max((run["round"] for run in results["runs"]), default=0)
    width = tables.terminal_width()
    file = sys.stderr if options.json else sys.stdout
    out = functools.partial(print, file=file)
    out(f"{summary.machine(results['environment'])}\n{results['command']}\n")
    tables.console(file).print(tables.table(kind.columns(rows), rows, width, group=lambda row: row.towers))
    out(f"\n{tables.legend(kind.legend, width)}")
    out(f"measured in {rounds} round{'' if rounds == 1 else 's'}")
    for failure in results["failures"]:
        cell = Cell(*(failure[name] for name in Cell._fields))
        out(f"\n{cell.engine} on {devices(cell)} failed:\n{failure['message']}")
    if options.json:
        print(json.dumps(results, indent=1))


def _write(results: Mapping[str, Any], directory: Path) -> None:
    """Writes bench.json, bench.csv and, for steps and if matplotlib is installed, bench.png."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    summary.write_csv(results["rows"], directory / "bench.csv")
    if results["measures"] != "steps":
        return
    try:
        plot.write_figure([step_summary.Row(**row) for row in results["rows"]], results["title"], directory / "bench.png")
    except ImportError:
        say(NO_FIGURE.format(installation.command("bench")))


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
        return path, results_file.read(path)
    except ValueError as error:
        raise ValueError(f"must be a bench.json that keras-dp bench has written. Received: {value!r}, {error}") from error
