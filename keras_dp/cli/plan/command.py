"""Run `keras-dp plan`: predict the training steps of a model on GPUs, on a machine that has none.

Logical CPUs stand for the GPUs. TensorFlow makes the graph of a step for them, and the command counts what would cost time on
GPUs: copies, control edges, visits to the host, operations without a GPU kernel. Then it simulates the step on the GPUs that
--gpu and --link name. The times are predictions, not measurements; docs/gpu_audit.md says how far to trust them.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.live import Live
from rich.table import Table

from keras_dp import choices, tables
from keras_dp.batches.speeds import shares_by_speed
from keras_dp.cli import runs
from keras_dp.cli.arguments import add_model_arguments, argument, positive
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, TowersPlan
from keras_dp.cli.plan.table import COLUMNS, LEGEND, MIRRORED, MIRRORED_LEGEND, Line, advice
from keras_dp.cli.runs import RunFailedError
from keras_dp.gpu_model import hardware, own_gpus
from keras_dp.tables import Column

_MOST_MEMORY = 1e9  # gigabytes, or megabytes
_STILL_FALLS = 0.95  # of the memory: with twice as many slices, it falls further


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--parameter-device",
        type=argument(_parameter_device),
        metavar="DEVICE",
        help='GPU where the variables live, such as GPU:0, or "sharded" over the GPUs',
    )
    parser.add_argument(
        "--batch-norm",
        choices=get_args(choices.BatchNorm),
        default="sync",
        help="rows that batch normalization computes its moments of, as in DataParallelModel (default: %(default)s)",
    )
    parser.add_argument(
        "--slices-per-device",
        type=argument(positive),
        default=1,
        metavar="K",
        help="slices of its rows that each GPU computes one after the other, as in DataParallelModel (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=argument(_shares),
        metavar="3,1",
        help="shares of the rows of as many GPUs, as in DataParallelModel (default: all GPUs have as many rows)",
    )
    parser.add_argument(
        "--gpu",
        type=argument(_gpus),
        default=["A100"],
        metavar="GPU",
        help=f"{', '.join(hardware.GPUS)}, or a JSON file with the numbers of another GPU, such as my_gpu.json; "
        "docs/gpu.md lists its fields; A100,L4 for two towers on GPUs that are not alike (default: A100)",
    )
    parser.add_argument(
        "--link", choices=("nvlink", "pcie"), help="what connects the GPUs (default: NVLink, if the GPU has it)"
    )
    for name, purpose in (
        ("launch-microseconds", "time from one operation of a GPU to the next, however small they are"),
        ("latency-microseconds", "time of a copy between GPUs, however small it is"),
        ("gigabytes-per-second", "bandwidth of the link, in each direction"),
    ):
        parser.add_argument(
            f"--{name}", type=argument(_positive_number), metavar="X", help=f"{purpose} (default: the device's own)"
        )
    parser.add_argument(
        "--constants",
        type=argument(_constants),
        default={},
        metavar="check.json",
        help="latency and bandwidth of the link as keras-dp check --json has measured them",
    )
    parser.add_argument("--memory", type=argument(_memory), metavar="24GB", help="memory of a GPU (default: the GPU's own)")
    parser.add_argument(
        "--alternatives", action="store_true", help="compare placements for the most towers, and name the fastest"
    )
    parser.add_argument("--mirrored", action="store_true", help="predict the steps under MirroredStrategy, too")
    parser.add_argument(
        "--timeline",
        type=argument(_writable),
        metavar="step.json",
        help="write to a file when each GPU of the most towers computes and receives; https://ui.perfetto.dev shows it",
    )
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON")


def run(options: argparse.Namespace) -> int:
    """Predicts the steps, and prints the table and the audit of the step with the most towers.

    Args:
        options: the arguments that `add_arguments` declares, and `command`, the command line.

    Returns:
        The exit code: 1 if a prediction has failed, otherwise 0.

    Raises:
        argparse.ArgumentError: if the GPU has no such link, or there are other shares than GPUs.
    """
    planned = [_planned(options, towers) for towers in _towers(options)]
    alternatives = _alternatives(planned[-1]) if options.alternatives else []
    planned[-1] = dataclasses.replace(planned[-1], timeline=options.timeline)
    try:
        machines = planned[-1].machines()
    except ValueError as error:
        raise argparse.ArgumentError(None, f"--link: {error}") from error
    file = sys.stderr if options.json else sys.stdout
    say = functools.partial(print, file=file, flush=True)
    console, width = tables.console(file), tables.terminal_width()
    say(f"{described(*machines)}\n{options.command}\n")
    plans: list[TowersPlan] = []
    mirrored: list[MirroredPlan | None] = []
    others: list[TowersPlan] = []
    columns = (*COLUMNS[:4], MIRRORED, *COLUMNS[4:]) if options.mirrored else COLUMNS
    failure = refusal = slices = shares = ""
    try:
        # On a terminal, each line is there as soon as it is known.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            for one in planned:
                plans.append(plan_in_new_process(one))
                try:
                    mirrored.append(mirrored_in_new_process(one) if options.mirrored else None)
                except RunFailedError as error:
                    mirrored.append(None)
                    refusal = f"\nthe step under MirroredStrategy on {one.towers} GPUs cannot be predicted:\n{error}"
                live.update(_table(columns, planned, plans, mirrored, width), refresh=True)
        for one in alternatives:
            others.append(plan_in_new_process(one))
        slices = _slices_that_fit(planned[-1], plans[-1])
        shares = _shares_by_speed(planned[-1], plans[-1])
    except RunFailedError as error:
        failure = f"\nthe step on {one.towers} GPUs cannot be predicted:\n{error}"
    console.print(_table(columns, planned, plans, mirrored, width))
    if failure:
        say(failure)
        return 1
    say(f"\n{tables.legend((*LEGEND, MIRRORED_LEGEND) if options.mirrored else LEGEND, width)}")
    if refusal:
        say(refusal)
    for found in filter(None, (slices, shares)):
        say(f"\n{found}")
    if others:
        say()
        console.print(advice([planned[-1], *alternatives], [plans[-1], *others]))
    say(f"\na step on {planned[-1].towers} GPUs:\n{plans[-1].audit}")
    if options.json:
        entries = zip([*planned, *alternatives], [*plans, *others], [*mirrored, *(None for _ in others)], strict=True)
        print(json.dumps([_entry(*entry) for entry in entries], indent=1))
    return 0


def _entry(planned: PlannedRun, plan: TowersPlan, mirrored: MirroredPlan | None) -> dict[str, Any]:
    """Returns what JSON tells of a step."""
    peer = None if mirrored is None else dataclasses.asdict(mirrored)
    return {"run": dataclasses.asdict(planned), "plan": dataclasses.asdict(plan), "mirrored": peer}


def _table(
    columns: Sequence[Column],
    planned: Sequence[PlannedRun],
    plans: Sequence[TowersPlan],
    mirrored: Sequence[MirroredPlan | None],
    width: int,
) -> Table:
    """Returns the table of the steps that are predicted so far."""
    lines = [Line(one, plan, plans[0], peer) for one, plan, peer in zip(planned, plans, mirrored, strict=False)]
    return tables.table(columns, lines, width)


def _alternatives(planned: PlannedRun) -> list[PlannedRun]:
    """Returns the same step with all other placements of variables."""
    placements = [device for device in (None, "sharded") if device != planned.parameter_device]
    return [dataclasses.replace(planned, parameter_device=device) for device in placements]


def _slices_that_fit(planned: PlannedRun, plan: TowersPlan) -> str:
    """Says in how many slices a step fits that does not fit as it is planned; "" if it does."""
    most = math.ceil(plan.batch_size / planned.towers)
    if plan.peak_megabytes <= plan.memory_megabytes:
        return ""
    while plan.peak_megabytes > plan.memory_megabytes and planned.slices_per_device < most:
        planned = dataclasses.replace(planned, slices_per_device=2 * planned.slices_per_device, timeline=None)
        before, plan = plan, plan_in_new_process(planned)
        if plan.peak_megabytes > _STILL_FALLS * before.peak_megabytes:
            break
    fits = "fits in" if plan.peak_megabytes <= plan.memory_megabytes else "still does not fit in"
    return (
        f"With slices_per_device={planned.slices_per_device}, the step {fits} the {plan.memory_megabytes:,.0f} MB of a GPU: "
        f"the fullest needs {plan.peak_megabytes:,.0f} MB, in {plan.milliseconds} ms without XLA."
    )


def _shares_by_speed(planned: PlannedRun, plan: TowersPlan) -> str:
    """Says which shares of the rows GPUs that are not alike would have by their speeds; "" if they are alike."""
    gpus = planned.gpu.split(",")
    if len({*gpus}) == 1 or planned.rows is not None:
        return ""
    rows = math.ceil(plan.batch_size / planned.towers)
    alone = dataclasses.replace(
        planned, towers=1, batch_size=rows, batch_is_per_tower=False, parameter_device=None, timeline=None
    )
    times = {gpu: plan_in_new_process(dataclasses.replace(alone, gpu=gpu)).compiled_milliseconds for gpu in gpus}
    shares = shares_by_speed([sum(times[gpu]) for gpu in gpus])
    divided = plan_in_new_process(dataclasses.replace(planned, rows=shares, timeline=None))
    each = " and ".join(f"{times[gpu]} ms on {gpu}" for gpu in dict.fromkeys(gpus))
    return (
        f"With XLA, {rows} rows take {each}. With rows={shares}, the step takes {divided.compiled_milliseconds} ms in place of "
        f"{plan.compiled_milliseconds}, and the fullest GPU needs {divided.peak_megabytes:,.0f} of its "
        f"{divided.memory_megabytes:,.0f} MB."
    )


# Keras and TensorFlow trace and optimize some layers otherwise where there is a GPU. oneDNN puts operations of its own in the
# place of others, which no GPU runs.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_ENABLE_ONEDNN_OPTS": "0"}


def plan_in_new_process(planned: PlannedRun) -> TowersPlan:
    """Predicts a step in a process of its own.

    Raises:
        RunFailedError: if the process fails.
    """
    return TowersPlan.of(runs.answer_of("plan.planning", dataclasses.asdict(planned), **_ENVIRONMENT))


def mirrored_in_new_process(planned: PlannedRun) -> MirroredPlan:
    """Predicts a step under MirroredStrategy in a process of its own.

    Raises:
        RunFailedError: if the process fails, as it does for models that MirroredStrategy cannot train.
    """
    return MirroredPlan.of(runs.answer_of("plan.mirrored", dataclasses.asdict(planned), **_ENVIRONMENT))


def described(machine: hardware.Machine, at_worst: hardware.Machine) -> str:
    """Describes a machine in one line."""
    processor, link = machine.processors[0], machine.link
    names = " and ".join(dict.fromkeys(one.name for one in machine.processors))
    latencies = dict.fromkeys(f"{1e6 * one.link.latency_seconds:g}" for one in (machine, at_worst))
    return (
        f"A prediction, not a measurement: {names}, {1e6 * processor.launch_seconds:g} µs a launch; {link.name}, "
        f"{' to '.join(latencies)} µs and {link.bandwidth / 1e9:g} GB/s"
    )


def _towers(options: argparse.Namespace) -> list[int]:
    """Returns the numbers of towers; of several GPUs that are named, there are no more.

    Raises:
        argparse.ArgumentError: if there are other shares of the rows than GPUs.
    """
    towers, named = options.towers, len(options.gpu)
    if named > 1:
        towers = sorted({*(count for count in towers if count < named), named})
    if options.rows is not None and len(options.rows) != towers[-1]:
        raise argparse.ArgumentError(
            None, f"--rows: give one share for each of {towers[-1]} GPUs. Received: {','.join(map(str, options.rows))}"
        )
    return list(towers)


def _planned(options: argparse.Namespace, towers: int) -> PlannedRun:
    return PlannedRun(
        model=options.model,
        towers=towers,
        batch_size=options.batch,
        batch_is_per_tower=options.scaling == "weak",
        parameter_device=options.parameter_device,
        batch_norm=options.batch_norm,
        slices_per_device=options.slices_per_device,
        rows=options.rows if options.rows is not None and len(options.rows) == towers else None,
        gpu=",".join(options.gpu[:towers]),
        link=options.link,
        launch_microseconds=options.launch_microseconds,
        latency_microseconds=options.latency_microseconds or options.constants.get("latency_microseconds"),
        gigabytes_per_second=options.gigabytes_per_second or options.constants.get("gigabytes_per_second"),
        memory_bytes=options.memory,
    )


def _constants(path: str) -> dict[str, float]:
    """Reads what `keras-dp check --json` has measured of copies: the median latency, and the least bandwidth."""
    try:
        findings = json.loads(Path(path).read_text())
        (copies,) = [finding["data"] for finding in findings if finding["name"] == "copies" and finding["verdict"] == "pass"]
        latencies, rates = ([copy[name] for copy in copies.values()] for name in ("microseconds", "gigabytes_per_second"))
        measured = {"latency_microseconds": statistics.median(latencies), "gigabytes_per_second": min(rates)}
        if not all(0 < number <= sys.float_info.max for number in measured.values()):
            raise ValueError(f"times and rates must be positive, not {measured}")
        return measured
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"must be a file that keras-dp check --json has written on GPUs. Received: {path!r} ({error})"
        ) from error


def _writable(path: str) -> str:
    """Returns the path of a file that can be written, and makes it."""
    try:
        Path(path).touch()
    except OSError as error:
        raise ValueError(f"must be a file that can be written. Received: {path!r} ({error})") from error
    return str(Path(path).resolve())


def _shares(value: str) -> list[int]:
    return [positive(share) for share in value.split(",")]


def _gpus(value: str) -> list[str]:
    return [_gpu(gpu) for gpu in value.split(",")]


def _gpu(value: str) -> str:
    """Returns the name of a GPU that is known, or the file of another one's numbers."""
    if own_gpus.is_file(value):
        own_gpus.read(value)
        return value
    names = {name.lower(): name for name in hardware.GPUS}
    if value.lower() not in names:
        raise ValueError(
            f"A GPU is one of {', '.join(hardware.GPUS)}, or a JSON file with its numbers, such as my_gpu.json."
            f"{choices.question(value, list(names))} Received: {value!r}"
        )
    return names[value.lower()]


def _memory(value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|MB)", value.strip(), re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < _MOST_MEMORY:
        raise ValueError(f"must be a size such as 24GB. Received: {value!r}")
    return float(match[1]) * {"gb": 1e9, "mb": 1e6}[match[2].lower()]


def _parameter_device(value: str) -> str:
    if value != "sharded" and not (value.startswith("GPU:") and value[4:].isdecimal()):
        raise ValueError(f'must be a GPU, such as GPU:1, or "sharded". Received: {value!r}')
    return value


def _positive_number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"must be a positive number. Received: {value!r}")
    return number
