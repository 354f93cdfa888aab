"""Predict one step under MirroredStrategy on GPUs, in a process of its own."""

import dataclasses
import json
import sys

import tensorflow as tf

from keras_dp.cli import models, synthetic
from keras_dp.cli.plan.planning import batch_rows
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, Range
from keras_dp.gpu_model.collectives import collectives
from keras_dp.gpu_model.hardware import Machine
from keras_dp.gpu_model.mirrored import graph_of_mirrored_step
from keras_dp.gpu_model.placement import PlacedStep, logical_cpus_for_gpus, place_step
from keras_dp.gpu_model.simulation import simulate


def main() -> None:
    """Predicts the step that this process's only argument describes, and prints the plan. Both are JSON."""
    planned = PlannedRun(**json.loads(sys.argv[1]))
    print(json.dumps(dataclasses.asdict(predicted(planned.machines(), collect(planned)))))


def collect(planned: PlannedRun) -> PlacedStep:
    """Returns the step on logical CPUs that stand for GPUs."""
    workload = models.workload(planned.model)
    with logical_cpus_for_gpus(planned.towers) as devices:
        with tf.distribute.MirroredStrategy(devices).scope():
            model = workload.build()
            if not model.compiled:
                model.compile(models.optimizer(), **workload.objective())
        step = graph_of_mirrored_step(model, next(iter(synthetic.dataset(model, 2 * planned.towers))))
        return place_step(step, batch_rows(planned), devices)


def predicted(machines: tuple[Machine, Machine], placed: PlacedStep) -> MirroredPlan:
    """Predicts a step under MirroredStrategy on a machine, at its best and at its worst."""
    simulation, slow = (simulate(placed, machine) for machine in machines)
    met = list(collectives(placed))
    return MirroredPlan(
        milliseconds=Range(1e3 * simulation.seconds, 1e3 * slow.seconds),
        busy=(max(simulation.busy.values()), min(simulation.busy.values())),
        peak_megabytes=max(simulation.peak_bytes.values()) / 1e6,
        collectives=len(met),
        collective_megabytes=sum(collective.bytes for collective in met) / 1e6,
        collective_milliseconds=1e3 * sum(collective.seconds(machines[0]) for collective in met),
    )
