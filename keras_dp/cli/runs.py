"""Run the measurements of a benchmark, each in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from keras_dp import choices

ENGINES = ("keras_dp", "ceiling", "workers", "single", "mirrored")


@dataclasses.dataclass(frozen=True)
class Run:
    """Describes a run of steps on batches of random numbers.

    Attributes:
        engine: one of `ENGINES`: keras_dp, its towers without exchange, keras_dp on several workers, plain Keras on one device,
            or MirroredStrategy.
        towers: the number of devices that share each batch, those of all workers together.
        batch_size: the number of rows in a global batch.
        model: a name for `keras_dp.cli.models.workload`.
        workers: the number of processes that share the towers.
        parameter_device: as in `keras_dp.DataParallelModel`.
        batch_norm: as in `keras_dp.DataParallelModel`; "sync" also makes MirroredStrategy synchronize.
        gradient_dtype: as in `keras_dp.DataParallelModel`.
        jit_compile: whether XLA compiles a model that is not compiled already; if not, Keras chooses.
        steps: the number of timed steps.
        warm_up: the number of untimed steps before them.
        count_bytes: whether to count the bytes that keras_dp sends between devices.
        profile_directory: the directory for a profile of keras_dp's steps after the timed ones; None for no profile.
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
    steps: int = 50
    warm_up: int = 10
    count_bytes: bool = False
    profile_directory: str | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Holds the measurements of a run.

    Attributes:
        step_milliseconds: the time of each step after the warm-up.
        first_step_seconds: the time from the call of `fit` to the end of the first step, with building and tracing.
        peak_memory_megabytes: the peak size of the process in the host's memory; of several workers, the chief's.
        loss: the mean loss of all steps.
        communication_bytes: the bytes between devices, or between workers, in a step; None if they were not counted or are not
            known.
    """

    step_milliseconds: list[float]
    first_step_seconds: float
    peak_memory_megabytes: float
    loss: float
    communication_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Survey:
    """Describes a model and this machine, for a benchmark.

    Attributes:
        environment: the processor, its cores, the GPUs and the versions, by name.
        gpus: the number of GPUs.
        batch_size: the model's default number of rows in a batch.
        problem: the reason why the model cannot be measured, and what to do; None if it can.
    """

    environment: dict[str, Any]
    gpus: int
    batch_size: int
    problem: str | None = None


class RunFailedError(Exception):
    """Reports that a process of the benchmark ended with an error; the message is the end of its stderr."""


def measure_in_new_process(run: Run) -> Measurement:
    """Measures a run in a process of its own, or one for each worker, of which the chief answers.

    Raises:
        RunFailedError: if a process fails.
    """
    program, chief = ["-m", "keras_dp.cli.bench.measurement"], ""
    if run.workers > 1:
        counts = ["--workers", str(run.workers), "--towers-per-worker", str(run.towers // run.workers)]
        program, chief = ["-m", "keras_dp", "launch", *counts, *program], "[0] "
    printed = _output_of(program, dataclasses.asdict(run), {})
    lines = [line.removeprefix(chief) for line in printed if line.startswith(chief)]
    return Measurement(**json.loads(lines[-1]))


def survey_in_new_process(model: str) -> Survey:
    """Surveys a model and the machine in a process of its own.

    Raises:
        RunFailedError: if the process fails.
    """
    return Survey(**answer_of("bench.survey", model))


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


def _output_of(program: Sequence[str], question: Any, variables: Mapping[str, str]) -> list[str]:
    """Returns the lines that a program of Python prints when it is asked a question."""
    command = [sys.executable, *program, json.dumps(question)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **variables}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode or not process.stdout.strip():
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        raise RunFailedError("\n".join(lines[-5:]) or f"The process ended with exit code {process.returncode}.")
    return process.stdout.splitlines()
