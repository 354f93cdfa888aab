"""Predict one step on GPUs in a process of its own."""

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras_dp
from keras_dp.cli import models, synthetic
from keras_dp.cli.plan.prediction import PlannedRun, Range, TowersPlan
from keras_dp.devices.variable_homes import home, move
from keras_dp.gpu_model.audit import GpuAudit, audit, kinds_of_copies
from keras_dp.gpu_model.hardware import Machine
from keras_dp.gpu_model.placement import PlacedStep, logical_cpus_for_gpus, place_step
from keras_dp.gpu_model.programs import programs_of
from keras_dp.gpu_model.simulation import Simulation, simulate
from keras_dp.gpu_model.timeline import timeline
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.reports.kinds_of_copies import KINDS
from keras_dp.reports.step_graph import StepGraph, graph_of_step

EXCHANGED = ("weights", "gradients", "moments")
_FEW_ROWS, _MOST_ROWS = 2**10, 2**18


def main() -> None:
    """Predicts the step that this process's only argument describes, and prints the plan. Both are JSON."""
    print(json.dumps(dataclasses.asdict(plan(PlannedRun(**json.loads(sys.argv[1]))))))


def plan(planned: PlannedRun) -> TowersPlan:
    """Predicts a step in this process, in which TensorFlow must not have started yet.

    Raises:
        ValueError: if there is no such model, its inputs are not known, or there is no such GPU.
    """
    parallel, step = collect(planned)
    batch_size = batch_rows(planned)
    devices = parallel.tower_steps.inputs.devices
    placed = place_step(step, batch_size, devices)
    machines = planned.machines()
    machine = machines[0]
    if planned.timeline is not None:
        traced = timeline(placed, simulate(placed, machine), kinds_of_copies(parallel, step, placed))
        Path(planned.timeline).write_text(json.dumps(traced))
    made = predicted(machines, batch_size, placed, audit(parallel, step, placed))

    def filled_by_rows(rows_of_tower: int) -> float:
        rows = rows_of_tower * planned.towers
        return fullest(simulate(place_step(step, rows, devices), machine), machine).share

    most = most_rows(filled_by_rows, max(batch_size // planned.towers, 1))
    return dataclasses.replace(made, largest_batch=None if most is None else most * planned.towers)


def batch_rows(planned: PlannedRun) -> int:
    """Returns the number of rows in a global batch."""
    rows = planned.batch_size or models.workload(planned.model).batch_size
    return rows * planned.towers if planned.batch_is_per_tower else rows


class Filled(NamedTuple):
    """Holds the peak and the memory of a GPU, in bytes."""

    peak: float
    memory: float

    @property
    def share(self) -> float:
        """The share of its memory that is needed."""
        return self.peak / self.memory


def fullest(simulation: Simulation, machine: Machine) -> Filled:
    """Returns the peak and the memory of the GPU that needs the largest share of its memory."""
    filled = (
        Filled(peak, machine.processor_of(gpu).memory_bytes) for gpu, peak in simulation.peak_bytes.items() if gpu != HOST
    )
    return max(filled, key=lambda one: one.share)


def most_rows(filled_by_rows: Callable[[int], float], rows: int) -> int | None:
    """Finds how many rows of a tower fit in the memory of its GPU, to some percent; 0 if none fits, None if any number does.

    The peak grows about linearly with the rows: a line through two peaks meets the memory near the largest number.

    Args:
        filled_by_rows: predicts the share of its memory that the fullest GPU needs if each tower has so many rows.
        rows: a number of rows to begin with.
    """
    rows = min(rows, _FEW_ROWS)
    least = filled = filled_by_rows(rows)
    # The peak of few rows may be one of weights alone.
    while filled <= least and rows < _MOST_ROWS:
        rows *= 8
        filled = filled_by_rows(rows)
    slope = (filled_by_rows(2 * rows) - filled) / rows
    if slope <= 0:
        return None if filled <= 1.0 else 0
    return max(rows + int((1.0 - filled) / slope), 0)


def predicted(machines: tuple[Machine, Machine], batch_size: int, placed: PlacedStep, audited: GpuAudit) -> TowersPlan:
    """Predicts a step on a machine.

    Args:
        machines: the machine at its best and at its worst.
        batch_size: the number of rows in a global batch.
        placed: the step, for that many rows.
        audited: the audit of the step.
    """
    programs = programs_of(placed)
    simulation, slow = (simulate(placed, machine) for machine in machines)
    filled = fullest(simulation, machines[0])
    compiled = (simulate(placed, machine, programs).seconds for machine in machines)
    return TowersPlan(
        batch_size=batch_size,
        milliseconds=Range(1e3 * simulation.seconds, 1e3 * slow.seconds),
        compiled_milliseconds=Range(*(1e3 * seconds for seconds in compiled)),
        busy=(max(simulation.busy.values()), min(simulation.busy.values())),
        peak_megabytes=filled.peak / 1e6,
        memory_megabytes=filled.memory / 1e6,
        copies={kind: audited.number_of(kind) for kind in KINDS},
        most_sent=audited.most_sent(*EXCHANGED),
        most_received=audited.most_received(*EXCHANGED),
        host_copies=audited.host_copies,
        controls=audited.controls.total(),
        to_host=audited.to_host.total(),
        from_host=audited.from_host.total(),
        without_kernel=dict(audited.without_kernel),
        misplaced=len(audited.misplaced),
        audit=str(audited),
    )


def collect(planned: PlannedRun) -> tuple[keras_dp.DataParallelModel, StepGraph]:
    """Returns the model on logical CPUs that stand for GPUs, and the graph of its step."""
    parallel = wrapped(planned)
    with logical_cpus_for_gpus(planned.towers) as devices:
        parallel.tower_steps.variables_made = partial(_on_first_gpu, parallel, devices[0], parallel.tower_steps.variables_made)
        # The graph takes batches of any size. Some of its choices, such as where tables are looked up, depend on the usual one.
        parallel.tower_steps.inputs.usual_rows = batch_rows(planned)
        rows = 2 * planned.towers * planned.slices_per_device
        return parallel, graph_of_step(parallel, next(iter(synthetic.dataset(parallel.inner_model, rows))))


def _on_first_gpu(parallel: keras_dp.DataParallelModel, device: str, variables_made: Callable[[], None]) -> None:
    """Moves the variables that a trace has made on the host to the first GPU, where a machine with GPUs makes them.

    Args:
        parallel: the wrapped model.
        device: the device that stands for the first GPU.
        variables_made: places variables otherwise; it is called before.
    """
    variables_made()
    model = parallel.inner_model
    of_optimizer = model.optimizer.variables if model.optimizer is not None else []
    variables = [*model.variables, *model.metrics_variables, *of_optimizer]
    # A GPU has no variables of 32-bit integers.
    move([(one, device) for one in variables if home(one) == HOST and one.dtype != "int32"])


def wrapped(planned: PlannedRun) -> keras_dp.DataParallelModel:
    """Returns the model, wrapped and compiled, on logical CPUs that stand for GPUs."""
    workload = models.workload(planned.model)
    with logical_cpus_for_gpus(planned.towers) as devices:
        model = workload.build()
        synthetic.refuse_unknown_inputs(model)
        place = planned.parameter_device
        if place is not None and place.startswith("GPU"):
            place = f"CPU:{int(place.removeprefix('GPU:')) + 1}"
        parallel = keras_dp.DataParallelModel(
            model,
            devices,
            place,
            batch_norm=planned.batch_norm,
            slices_per_device=planned.slices_per_device,
            rows=planned.rows,
        )
        parallel.tower_steps.pack_copies = planned.pack_copies
        if not model.compiled:
            parallel.compile(models.optimizer(), **workload.objective())
    return parallel
