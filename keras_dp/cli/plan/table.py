"""Show predictions as lines of a table, and name the best of several placements."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType

from keras_dp import tables
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, Range, TowersPlan
from keras_dp.tables import Column


class Line(NamedTuple):
    """Holds a step of the table, its prediction, that of the first line, and that of the step under MirroredStrategy."""

    planned: PlannedRun
    plan: TowersPlan
    first: TowersPlan
    mirrored: MirroredPlan | None = None

    @property
    def speed_up(self) -> Range:
        """The rows in a second, divided by those of the first line, both at best and both at worst."""
        more_rows = self.plan.batch_size / self.first.batch_size
        times = zip(self.first.milliseconds, self.plan.milliseconds, strict=True)
        return Range(*(more_rows * first / own for first, own in times))


def _busy(line: Line) -> str:
    return " to ".join(f"{100 * share:.0f}" for share in sorted(line.plan.busy, reverse=True))


def _fits(line: Line) -> str:
    return "any" if line.plan.largest_batch is None else str(line.plan.largest_batch)


COLUMNS = (
    Column("", "towers", lambda line: str(line.planned.towers)),
    Column("", "batch", lambda line: str(line.plan.batch_size)),
    Column("step", "ms", lambda line: str(line.plan.milliseconds)),
    Column("with XLA", "ms", lambda line: str(line.plan.compiled_milliseconds)),
    Column("speed-up", "without", lambda line: str(line.speed_up)),
    Column("busy", "%", _busy, 1),
    Column("peak", "MB", lambda line: f"{line.plan.peak_megabytes:.0f}"),
    Column("fits", "rows", _fits),
    Column("", "copies", lambda line: str(sum(line.plan.copies.values())), 2),
    Column("one GPU", "sends", lambda line: str(line.plan.most_sent), 3),
    Column("one GPU", "receives", lambda line: str(line.plan.most_received), 4),
    Column("control", "edges", lambda line: str(line.plan.controls), 5),
    Column("to and", "from host", lambda line: f"{line.plan.to_host} + {line.plan.from_host}", 6),
)

# Beside the other columns, with --mirrored.
MIRRORED = Column("Mirrored", "ms", lambda line: str(line.mirrored.milliseconds) if line.mirrored else "-")

LEGEND = (
    "step: at best, to at worst: if copies and programs wait longer, and XLA fuses nothing; docs/gpu_audit.md.",
    "speed-up: the rows in a second without XLA, divided by those of the first line.",
    "busy: the share of the step in which the busiest and the idlest GPU run operations.",
    "peak: what the fullest GPU needs. fits: about the largest batch for which the memory of all GPUs is enough.",
    "one GPU sends, receives: the most copies of weights, gradients and moments in a step.",
    "to and from host: the tensors that an operation of a GPU takes from the other memory than they are made in.",
)
MIRRORED_LEGEND = "Mirrored: the step under MirroredStrategy, with batch normalization over each GPU's rows alone."


class Alternative(NamedTuple):
    """Holds a step with other arguments, its prediction, and whether it needs more memory than there is."""

    planned: PlannedRun
    plan: TowersPlan
    exceeds: bool


ALTERNATIVES = (
    Column("arguments", "", lambda line: _arguments(line.planned), justify="left"),
    Column("step", "ms", lambda line: str(line.plan.milliseconds)),
    Column("with XLA", "ms", lambda line: str(line.plan.compiled_milliseconds)),
    Column("peak", "MB", lambda line: f"{line.plan.peak_megabytes:,.0f}"),
    Column("fits", "", lambda line: "no" if line.exceeds else "yes"),
)


def advice(planned: Sequence[PlannedRun], plans: Sequence[TowersPlan]) -> RenderableType:
    """Lists alternatives by their times, those that fit first, and names the arguments of the first one."""
    alternatives = [
        Alternative(one, plan, exceeds=plan.peak_megabytes > plan.memory_megabytes)
        for one, plan in zip(planned, plans, strict=True)
    ]
    alternatives.sort(key=lambda one: (one.exceeds, sum(one.plan.milliseconds)))
    best = alternatives[0]
    verdict = "No placement fits." if best.exceeds else f"Predicted to be the fastest: {_call(best.planned)}"
    return Group(tables.table(ALTERNATIVES, alternatives), "", verdict)


def _call(planned: PlannedRun) -> str:
    return f"DataParallelModel(model, {_arguments(planned)})"


def _arguments(planned: PlannedRun) -> str:
    return f"parameter_device={planned.parameter_device!r}"
