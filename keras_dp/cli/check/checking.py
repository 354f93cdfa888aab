"""Run all checks, and print a line for each."""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.cli import models, synthetic
from keras_dp.cli.check import copying, machine, training, workers
from keras_dp.cli.check.command import DONE, FINDING, Question
from keras_dp.cli.check.findings import Finding
from keras_dp.devices.available import tower_devices, use_logical_cpus
from keras_dp.model import DataParallelModel
from keras_dp.workers.group import TOWERS_VARIABLE, current_workers

_ROWS_OF_A_TOWER = 16


def main() -> None:
    """Prints the findings for the question in the first argument, each as soon as it is known."""
    question = Question(**json.loads(sys.argv[1]))
    for finding in findings(question):
        # The other workers find the same, unless something is wrong there.
        if finding.verdict == "pass" and not current_workers().is_chief:
            continue
        # The model's own output may not have ended its line.
        sys.stdout.write(f"\n{FINDING}{json.dumps(dataclasses.asdict(finding))}\n")
    sys.stdout.write(f"\n{DONE}\n")


def findings(question: Question) -> Iterator[Finding]:
    """Yields the finding of each check. An error in a check is its finding; the others go on."""
    if not tf.config.list_physical_devices("GPU") and TOWERS_VARIABLE not in os.environ:
        use_logical_cpus(question.towers or (1 if workers.are_several() else 2))
    # Before TensorFlow does anything else.
    group, connection = workers.connected(question.start_timeout)
    if connection is not None:
        yield connection
    if group is None:
        return
    yield from _of("versions", machine.versions_found)
    yield from _of("devices", machine.devices_found)
    yield from _of("memory", machine.memory_of_others)
    try:
        devices = tower_devices(question.towers)
    except ValueError as error:
        yield Finding("towers", "fail", str(error))
        return
    yield from _of("copies", functools.partial(copying.copies, devices))
    try:
        build, batches = _training(question, devices, group.count)
        batch = next(iter(batches))
        parallel = build()
    except Exception as error:
        yield _failed("model", error)
        return
    batch_rows = int(keras.tree.flatten(batch)[0].shape[0])
    yield from _of("rows", functools.partial(training.rows, parallel, batch_rows, group.count))
    yield from _of("result", functools.partial(training.result, parallel, batch))
    yield from _of("work", functools.partial(training.work, parallel, batch))
    yield from _of("repeated", functools.partial(training.repeated, build, batches))
    yield from _of("speed", functools.partial(training.speed, parallel, batches))
    if machine.gpus_differ() and group.count == 1:
        yield from _of("shares", functools.partial(training.shares, build, batches, batch_rows, devices))


def _training(question: Question, devices: list[str], count: int) -> tuple[Callable[..., Any], tf.data.Dataset]:
    """Returns a function that builds the wrapped model, for these or other devices, and its batches."""
    workload = models.workload(question.model)

    def build(on: Sequence[str] = devices) -> Any:
        model = workload.build()
        if not model.compiled:
            model.compile("sgd", **workload.objective())
        return DataParallelModel(model, devices=on)

    if question.data is None:
        rows = question.batch or _ROWS_OF_A_TOWER * len(devices) * count
        return build, synthetic.dataset(build().inner_model, rows)
    given = models.function_named(question.data)()
    batches = given if isinstance(given, tf.data.Dataset) else tf.data.Dataset.from_tensors(_first_batch(given))
    return build, batches.repeat()


def _of(name: str, check: Callable[[], Finding | None]) -> Iterator[Finding]:
    try:
        finding = check()
    except Exception as error:
        finding = _failed(name, error)
    if finding is not None:
        yield finding


def _failed(name: str, error: Exception) -> Finding:
    return Finding(name, "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")


def _first_batch(given: Any) -> Any:
    """Returns the first batch of a generator, which may be endless, or of a `PyDataset`; and any other batch itself."""
    batch = given[0] if isinstance(given, keras.utils.PyDataset) else given
    batch = next(iter(batch)) if isinstance(batch, Iterator) else batch
    return tuple(batch) if isinstance(batch, list) else batch
