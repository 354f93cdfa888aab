"""Run the measurements of a benchmark, each in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dp import choices

ENGINES = ("keras_dp", "ceiling", "workers", "single", "mirrored", "torch", "ddp")
OF_ONE_DEVICE = ("single", "torch")
OF_TORCH = ("torch", "ddp")  # these train with Keras on PyTorch
_TORCH_STEPS = Path(__file__).parent / "bench" / "torch_steps.py"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Describes a model on an engine.

    Attributes:
        engine: one of `ENGINES`: keras_dp, its towers without exchange, keras_dp on several workers, plain Keras on one device,
            MirroredStrategy, Keras on PyTorch in one process, or in several with DistributedDataParallel.
        towers: the number of devices that share each batch, those of all workers together.
        batch_size: the number of rows in a global batch.
        model: a name for `keras_dp.cli.models.workload`.
        workers: the number of processes that share the towers.
        parameter_device: as in `keras_dp.DataParallelModel`.
        batch_norm: as in `keras_dp.DataParallelModel`; "sync" also makes MirroredStrategy synchronize.
        gradient_dtype: as in `keras_dp.DataParallelModel`.
        jit_compile: whether XLA compiles a model that is not compiled already; if not, Keras chooses.
    """

    engine: str
    towers: int
    batch_size: int
    model: str
    workers: int = 1
    parameter_device: str | None = None
    batch_norm: choices.BatchNorm = "sync"
    gradient_dtype: choices.GradientType = None
    jit_compile: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """Describes a run of steps on batches of random numbers.

    Attributes:
        steps: the number of timed steps.
        warm_up: the number of untimed steps before them.
        count_bytes: whether to count the bytes that keras_dp sends between devices.
        profile_directory: the directory for a profile of keras_dp's steps after the timed ones; None for no profile.
    """

    steps: int = 50
    warm_up: int = 10
    count_bytes: bool = False
    profile_directory: str | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Holds the measurements of a run of steps.

    Attributes:
        step_milliseconds: the time of each step after the warm-up.
        first_step_seconds: the time from the call of `fit` to the end of the first step, with building and tracing.
        peak_memory_megabytes: the peak size of the process in the host's memory; of several workers, the chief's.
        loss: the mean loss of all steps; None if it was not computed.
        communication_bytes: the bytes between devices, or between workers, in a step; None if they were not counted or are not
            known.
    """

    step_milliseconds: list[float]
    first_step_seconds: float
    peak_memory_megabytes: float
    loss: float | None = None
    communication_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Setup):
    """Describes a whole training on the user's data.

    Attributes:
        data: "module:function" for a function that returns the batches to train on.
        validation: the same for the batches to evaluate after each epoch; None to evaluate nothing.
        epochs: the number of epochs.
    """

    data: str
    validation: str | None = None
    epochs: int = 1


@dataclasses.dataclass(frozen=True)
class TrainingMeasurement:
    """Holds the measurements of a whole training.

    Attributes:
        total_seconds: the time of the call of `fit`.
        first_epoch_seconds: the time from the call of `fit` to the end of the first epoch's steps, with building and tracing.
        later_epoch_seconds: the time of the steps of each further epoch.
        evaluation_seconds: the time of each evaluation.
        batches: the number of batches in an epoch.
        peak_memory_megabytes: as in `Measurement`.
        logs: the loss and the metrics after the last epoch, by name.
    """

    total_seconds: float
    first_epoch_seconds: float
    later_epoch_seconds: list[float]
    evaluation_seconds: list[float]
    batches: int
    peak_memory_megabytes: float
    logs: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Survey:
    """Describes a model and this machine, for a benchmark.

    Attributes:
        environment: the processor, its cores, the GPUs and the versions, by name.
        gpus: the number of GPUs.
        batch_size: the number of rows in a batch of the user's data, or else the model's default.
        problem: the reason why the model, or its data, cannot be measured, and what to do; None if it can.
    """

    environment: dict[str, Any]
    gpus: int
    batch_size: int
    problem: str | None = None


class RunFailedError(Exception):
    """Reports that a process of the benchmark ended with an error; the message is the end of its stderr."""


def measure_in_new_process(run: Run) -> Measurement:
    """Measures steps in a process of its own, or one for each worker.

    Raises:
        RunFailedError: if a process fails.
    """
    if run.engine in OF_TORCH:
        return Measurement(**_answer_about([str(_TORCH_STEPS)], run))
    return Measurement(**_answer_about(["-m", "keras_dp.cli.bench.measurement"], run))


def train_in_new_process(training: Training) -> TrainingMeasurement:
    """Measures a whole training in a process of its own, or one for each worker.

    Raises:
        RunFailedError: if a process fails.
    """
    return TrainingMeasurement(**_answer_about(["-m", "keras_dp.cli.bench.training"], training))


def survey_in_new_process(model: str, *data: str) -> Survey:
    """Surveys a model, the user's data and the machine in a process of its own.

    Raises:
        RunFailedError: if the process fails.
    """
    return Survey(**answer_of("bench.survey", [model, *data]))


def answer_of(module: str, question: Any, **variables: str) -> dict[str, Any]:
    """Runs `main` of a module of this package in a process of its own.

    Args:
        module: the module, such as "plan.planning".
        question: what it is asked, as JSON can hold it.
        **variables: environment variables of the process.

    Returns:
        The answer.

    Raises:
        RunFailedError: if the process fails.
    """
    answer: dict[str, Any] = json.loads(
        _output_of(["-c", f"from keras_dp.cli.{module} import main; main()"], question, variables)[-1]
    )
    return answer


def _answer_about(program: Sequence[str], setup: Setup) -> dict[str, Any]:
    """Returns what a program of Python answers about a setup; of several workers, the chief."""
    question, chief = dataclasses.asdict(setup), ""
    if setup.workers > 1:
        counts = ["--workers", str(setup.workers), "--towers-per-worker", str(setup.towers // setup.workers)]
        program, chief = ["-m", "keras_dp", "launch", *counts, *program], "[0] "
    lines = [line.removeprefix(chief) for line in _output_of(program, question, {}) if line.startswith(chief)]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _output_of(program: Sequence[str], question: Any, variables: Mapping[str, str]) -> list[str]:
    """Returns the lines that a program of Python prints when it is asked a question."""
    command = [sys.executable, *program, json.dumps(question)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **variables}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode or not process.stdout.strip():
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise RunFailedError("\n".join(lines[-5:]) or f"The process ended with exit code {process.returncode}.")
    return process.stdout.splitlines()
