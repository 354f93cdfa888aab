"""Measure one run of a benchmark in a process of its own."""

import contextlib
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import keras_dp
from keras_dp.cli import models, synthetic
from keras_dp.cli.bench.independent_towers import independent_towers
from keras_dp.cli.runs import Measurement, Run
from keras_dp.keras_internals import keras_models

PROFILED_STEPS = 10
SEED = 0
WRAPPERS: dict[str, Callable[..., keras.Model]] = {
    "keras_dp": keras_dp.DataParallelModel,
    "ceiling": independent_towers,
}


class StepTimes(keras.callbacks.Callback):
    """Records the clock times, in seconds, at which training steps begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[float] = []
        self.ends: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Reads the clock."""
        self.begins.append(time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads the clock, after Keras has waited for the step's loss."""
        self.ends.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Returns the time of each step."""
        return [1000 * (end - begin) for begin, end in zip(self.begins, self.ends, strict=True)]


def main() -> None:
    """Measures the run that this process's only argument describes, and prints the measurement. Both are JSON."""
    print(json.dumps(dataclasses.asdict(measure(Run(**json.loads(sys.argv[1]))))))


def measure(run: Run) -> Measurement:
    """Measures a run in this process, in which TensorFlow must not have started yet.

    Raises:
        ValueError: if the model's steps cannot be timed one by one, or its inputs are not known.
    """
    workload = models.workload(run.model)
    devices = _devices(run.towers)
    keras.utils.set_random_seed(SEED)
    mirrored = run.engine == "mirrored"
    with tf.distribute.MirroredStrategy(devices).scope() if mirrored else contextlib.nullcontext():
        inner_model = workload.build()
        trained_model = _on_engine(run, inner_model, devices)
        if not inner_model.compiled:
            optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            trained_model.compile(optimizer, jit_compile=run.jit_compile, **workload.objective())
    models.refuse_what_is_not_timed(inner_model)
    dataset = synthetic.dataset(inner_model, run.batch_size)
    step_times = StepTimes()
    start = time.perf_counter()
    history = trained_model.fit(
        dataset, steps_per_epoch=run.warm_up + run.steps, shuffle=False, callbacks=[step_times], verbose=0
    )
    measurement = Measurement(
        step_milliseconds=step_times.milliseconds()[run.warm_up :],
        first_step_seconds=step_times.ends[0] - start,
        peak_memory_megabytes=_peak_memory_megabytes(),
        loss=history.history["loss"][0],
    )
    if run.profile_directory is not None:
        with tf.profiler.experimental.Profile(run.profile_directory):
            trained_model.fit(dataset, steps_per_epoch=PROFILED_STEPS, shuffle=False, verbose=0)
    if run.count_bytes:
        report = keras_dp.communication_report(trained_model, next(iter(dataset)))
        if not report.unsized:
            measurement = dataclasses.replace(measurement, communication_bytes=report.total_bytes)
    return measurement


def _devices(count: int) -> list[str]:
    """Returns the first GPUs, or logical CPUs that share the cores if there are no GPUs."""
    if tf.config.list_physical_devices("GPU"):
        return [f"GPU:{index}" for index in range(count)]
    keras_dp.use_logical_cpus(count)
    return [f"CPU:{index}" for index in range(count)]


def _on_engine(run: Run, model: keras.Model, devices: list[str]) -> keras.Model:
    """Returns the model that an engine trains: `model` itself, or a wrapper."""
    if run.engine in WRAPPERS:
        return WRAPPERS[run.engine](
            model,
            devices=devices,
            parameter_device=run.parameter_device,
            batch_norm=run.batch_norm,
            gradient_dtype=run.gradient_dtype,
        )
    if run.engine == "mirrored":
        for layer in keras_models.flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = run.batch_norm == "sync"
    return model


def _peak_memory_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is bytes on macOS, and kilobytes elsewhere.
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
