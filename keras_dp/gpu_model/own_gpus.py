"""Describe a GPU by the user's own numbers, in the units of data sheets, which a JSON file holds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from keras_dp.choices import question
from keras_dp.gpu_model.hardware import Link, Machine, Processor

_MOST = 1e12  # of any of the units below


@dataclasses.dataclass(frozen=True)
class OwnGpu:
    """Holds the numbers of a GPU. Numbers that are left out are those that most GPUs have, or follow from others.

    Attributes:
        name: its name.
        memory_gigabytes: the size of its memory.
        memory_gigabytes_per_second: the bandwidth of its memory.
        teraflops: TFLOP/s in float32.
        matrix_teraflops: the same of products of matrices, as in TF32; None if they are no faster.
        half_teraflops: the same in float16 or bfloat16, without sparsity; None if they are no faster than in float32.
        launch_microseconds: the time from one operation to the next, however small they are.
        link_gigabytes_per_second: the bandwidth of what connects GPUs, in each direction.
        link_latency_microseconds: the time of a copy between GPUs, however small it is; None if it is not known.
        host_gigabytes_per_second: the bandwidth between a GPU and the host, in each direction; None if it is the link's.
    """

    name: str
    memory_gigabytes: float
    memory_gigabytes_per_second: float
    teraflops: float
    matrix_teraflops: float | None = None
    half_teraflops: float | None = None
    launch_microseconds: float = 5.0
    link_gigabytes_per_second: float = 25.0
    link_latency_microseconds: float | None = None
    host_gigabytes_per_second: float | None = None

    def machine(self) -> Machine:
        """Returns a machine with such GPUs."""
        matrix = self.matrix_teraflops or self.teraflops
        processor = Processor(
            self.name,
            matrix_flops=1e12 * matrix,
            half_flops=1e12 * (self.half_teraflops or matrix),
            vector_flops=1e12 * self.teraflops,
            bandwidth=1e9 * self.memory_gigabytes_per_second,
            memory_bytes=1e9 * self.memory_gigabytes,
            launch_seconds=1e-6 * self.launch_microseconds,
            source="the user's own numbers",
        )
        host = 1e9 * (self.host_gigabytes_per_second or self.link_gigabytes_per_second)
        link = Link("its link", bandwidth=1e9 * self.link_gigabytes_per_second)
        return Machine((processor,), link, Link("its link to the host", bandwidth=host))


def is_file(gpu: str) -> bool:
    """Returns whether a GPU is named by a file of its numbers."""
    return gpu.lower().endswith(".json")


def read(path: str) -> OwnGpu:
    """Reads the numbers of a GPU from a JSON file, whose fields are the attributes of `OwnGpu`.

    Raises:
        ValueError: if there is no such file, or a field is missing, unknown or no positive number.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The numbers of a GPU must be in a JSON file. Received: {path!r} ({error})") from error
    known = [field.name for field in dataclasses.fields(OwnGpu)]
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold an object with the fields {', '.join(known)}. Received: {fields!r}")
    for name, value in fields.items():
        _refuse_wrong_field(path, name, value, known)
    missing = [
        field.name for field in dataclasses.fields(OwnGpu) if field.default is dataclasses.MISSING and field.name not in fields
    ]
    if missing:
        raise ValueError(f"{path} must tell {', '.join(missing)}. Received: {', '.join(fields) or 'no field'}")
    return OwnGpu(**fields)


def _refuse_wrong_field(path: str, name: str, value: Any, known: list[str]) -> None:
    """Raises a ValueError if a field of a file is unknown, or has a value that cannot be."""
    if name not in known:
        raise ValueError(f"{path} has an unknown field {name!r}.{question(name, known)} The fields are: {', '.join(known)}")
    if name == "name":
        if not isinstance(value, str) or not value:
            raise ValueError(f"`name` in {path} must be a string. Received: {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value <= _MOST):
        raise ValueError(f"`{name}` in {path} must be a positive number, at most {_MOST:g}. Received: {value!r}")
