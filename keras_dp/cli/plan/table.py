"""Show predictions as lines of a table, and name the best of several placements."""

from collections.abc import Sequence
from typing import NamedTuple

from keras_dp.cli.plan.prediction import Plan, PlannedRun
from keras_dp.cli.tables import Column


class Line(NamedTuple):
    """Holds a step of the table, its prediction, and the prediction of the first line."""

    planned: PlannedRun
    plan: Plan
    first: Plan

    @property
    def speed_up(self) -> float:
        """The rows in a second, divided by those of the first line."""
        return self.plan.batch_size / self.plan.milliseconds / (self.first.batch_size / self.first.milliseconds)


def _busy(line: Line) -> str:
    return " to ".join(f"{100 * share:.0f}" for share in sorted(line.plan.busy, reverse=True))


def _fits(line: Line) -> str:
    return "any" if line.plan.largest_batch is None else str(line.plan.largest_batch)


COLUMNS = (
    Column("", "towers", 6, lambda line: str(line.planned.towers)),
    Column("", "batch", 8, lambda line: str(line.plan.batch_size)),
    Column("step", "ms", 10, lambda line: f"{line.plan.milliseconds:.2f}"),
    Column("speed-", "up", 9, lambda line: f"{line.speed_up:.2f}"),
    Column("busy", "%", 12, _busy, 1),
    Column("peak", "MB", 10, lambda line: f"{line.plan.peak_megabytes:.0f}"),
    Column("fits", "rows", 9, _fits),
    Column("copies", "", 9, lambda line: str(sum(line.plan.copies.values())), 2),
    Column("one GPU", "sends", 9, lambda line: str(line.plan.most_sent), 3),
    Column("one GPU", "receives", 10, lambda line: str(line.plan.most_received), 4),
    Column("control", "edges", 9, lambda line: str(line.plan.controls), 5),
    Column("to and", "from host", 11, lambda line: f"{line.plan.to_host} + {line.plan.from_host}", 6),
)

LEGEND = (
    "speed-up: the rows in a second, divided by those of the first line.",
    "busy: the share of the step in which the busiest and the idlest GPU run operations.",
    "peak: the memory of the fullest GPU. fits: about the largest batch for which it is enough.",
    "one GPU sends, receives: the most copies of weights, gradients and moments in a step.",
    "to and from host: the tensors that an operation of a GPU takes from the other memory than they are made in.",
)


def advice(planned: Sequence[PlannedRun], plans: Sequence[Plan]) -> str:
    """Lists alternatives by their times, those that fit first, and names the arguments of the first one."""
    memory = planned[0].machine().processor.memory_bytes
    exceeds = [1e6 * plan.peak_megabytes > memory for plan in plans]
    order = sorted(range(len(plans)), key=lambda i: (exceeds[i], plans[i].milliseconds))
    lines = [
        f"{_arguments(planned[i]):<50}{plans[i].milliseconds:>10.2f} ms{plans[i].peak_megabytes:>9,.0f} MB on the fullest GPU"
        + " (does not fit)" * exceeds[i]
        for i in order
    ]
    best = "No placement fits." if all(exceeds) else f"Predicted to be the fastest: {_call(planned[order[0]])}"
    return "\n".join([*lines, best])


def _call(planned: PlannedRun) -> str:
    return f"DataParallelModel(model, {_arguments(planned)})"


def _arguments(planned: PlannedRun) -> str:
    return f"parameter_device={planned.parameter_device!r}, pack_copies={planned.pack_copies}"
