"""Measure the steps of one run of a benchmark in a process of its own."""

import contextlib
import dataclasses
import json
import resource
import sys
import time
from typing import Any

import keras
import tensorflow as tf

import keras_dp
from keras_dp.cli import models, synthetic
from keras_dp.cli.bench import engines
from keras_dp.cli.bench.loopback import LoopbackBytes
from keras_dp.cli.runs import Measurement, Run
from keras_dp.reports.step_graph import UnrepeatableStepError

PROFILED_STEPS = 10


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
    inner_model, trained_model = engines.build(run, engines.start(run))
    models.refuse_what_is_not_timed(inner_model)
    dataset = synthetic.dataset(inner_model, run.batch_size)
    step_times, sent = StepTimes(), LoopbackBytes()
    start = time.perf_counter()
    history = trained_model.fit(
        dataset,
        steps_per_epoch=run.warm_up + run.steps,
        shuffle=False,
        callbacks=[step_times, *([sent] if run.workers > 1 else [])],
        verbose=0,
    )
    measurement = Measurement(
        step_milliseconds=step_times.milliseconds()[run.warm_up :],
        first_step_seconds=step_times.ends[0] - start,
        peak_memory_megabytes=peak_memory_megabytes(),
        loss=history.history["loss"][0],
        communication_bytes=sent.in_each_step(after=run.warm_up),
    )
    if run.profile_directory is not None:
        with tf.profiler.experimental.Profile(run.profile_directory):
            trained_model.fit(dataset, steps_per_epoch=PROFILED_STEPS, shuffle=False, verbose=0)
    if run.count_bytes:
        # Without the number, if the step cannot run outside of the training.
        with contextlib.suppress(UnrepeatableStepError):
            report = keras_dp.communication_report(trained_model, next(iter(dataset)))
            if not report.unsized:
                measurement = dataclasses.replace(measurement, communication_bytes=report.total_bytes)
    return measurement


def peak_memory_megabytes() -> float:
    """Returns the peak size of this process in the host's memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is bytes on macOS, and kilobytes elsewhere.
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


if __name__ == "__main__":
    main()
