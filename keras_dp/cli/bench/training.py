"""Measure one whole training in a process of its own."""

import dataclasses
import json
import sys
import time
from typing import Any

import keras

from keras_dp.cli.bench import engines
from keras_dp.cli.bench.peak_memory import peak_memory_megabytes
from keras_dp.cli.bench.user_batches import user_batches
from keras_dp.cli.runs import Training, TrainingMeasurement


class EpochTimes(keras.callbacks.Callback):
    """Records the seconds of each epoch's steps and of each evaluation, and the number of batches in an epoch.

    The first epoch begins when the callback is made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[float] = []
        self.evaluations: list[float] = []
        self.batches = 0
        self._begin = self._evaluation_begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the number of the batch."""
        self.batches = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the epoch's steps, because Keras evaluates after the last one."""
        self._evaluation_begin = time.perf_counter()

    def on_test_end(self, logs: Any = None) -> None:
        """Records an evaluation."""
        self.evaluations.append(time.perf_counter() - self._evaluation_begin)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Records the epoch's steps."""
        now = time.perf_counter()
        evaluated = self.evaluations[-1] if len(self.evaluations) > epoch else 0.0
        self.epochs.append(now - self._begin - evaluated)
        self._begin = now


def main() -> None:
    """Measures the training that this process's only argument describes, and prints the measurement. Both are JSON."""
    print(json.dumps(dataclasses.asdict(measure(Training(**json.loads(sys.argv[1]))))))


def measure(training: Training) -> TrainingMeasurement:
    """Measures a training in this process, in which TensorFlow must not have started yet.

    Raises:
        ValueError: if the user's functions do not return batches.
    """
    devices = engines.start(training)
    # The data come first, so that each engine draws the same random numbers for them.
    batches = user_batches(training.data)
    validation = None if training.validation is None else user_batches(training.validation)
    _, trained_model = engines.build(training, devices)
    start = time.perf_counter()
    times = EpochTimes()
    history = trained_model.fit(
        batches,
        validation_data=validation,
        epochs=training.epochs,
        shuffle=isinstance(batches, keras.utils.PyDataset),  # a tf.data.Dataset has an order of its own
        callbacks=[times],
        verbose=0,
    ).history
    total = time.perf_counter() - start
    first, *later = times.epochs
    return TrainingMeasurement(
        total_seconds=total,
        first_epoch_seconds=first,
        later_epoch_seconds=later,
        evaluation_seconds=times.evaluations,
        batches=times.batches,
        peak_memory_megabytes=peak_memory_megabytes(),
        logs={name: float(values[-1]) for name, values in history.items()},
    )


if __name__ == "__main__":
    main()
