"""Say where measured steps on GPUs contradict those that `keras-dp plan` predicts."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_dp.cli.bench.summary import Row
from keras_dp.cli.plan.command import plan_in_new_process
from keras_dp.cli.plan.prediction import PlannedRun
from keras_dp.cli.runs import RunFailedError
from keras_dp.gpu_model import hardware


def contradictions(environment: Mapping[str, Any], rows: Sequence[Row], options: argparse.Namespace) -> Iterator[str]:
    """Yields a line for each measured step of keras_dp that takes another time than is predicted at best and at worst.

    Nothing is predicted without GPUs, for unlike GPUs, and for GPUs whose numbers are not known.

    Args:
        environment: the machine, as a survey describes it.
        rows: the figures of all cells.
        options: the arguments of the command.
    """
    kinds = set(environment["gpus"])
    gpu = hardware.known_gpu(kinds.pop()) if len(kinds) == 1 else None
    if gpu is None:
        return
    for row in rows:
        if row.engine != "keras_dp" or row.median_milliseconds is None:
            continue
        step = PlannedRun(options.model, row.towers, row.batch_size, gpu=gpu, batch_norm=options.batch_norm)
        step = dataclasses.replace(step, parameter_device=options.parameter_device)
        try:
            # On GPUs, Keras lets XLA compile a model unless it was told otherwise.
            predicted = plan_in_new_process(step).compiled_milliseconds
        except RunFailedError:
            continue
        measured = row.median_milliseconds
        if not min(predicted) <= measured <= max(predicted):
            towers = f"{row.towers} tower{'s' * (row.towers > 1)}"
            yield f"{towers}: {measured:.2f} ms a step, where keras-dp plan --gpu {gpu} predicts {predicted} with XLA"
