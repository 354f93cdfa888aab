"""Describe a step to predict, and its prediction."""

import dataclasses
from typing import Any, NamedTuple

from keras_dp import choices
from keras_dp.gpu_model import hardware, own_gpus


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Describes a step to predict.

    Attributes:
        model: a name for `keras_dp.cli.models.workload`.
        towers: the number of GPUs.
        batch_size: the number of rows in a global batch; None for the model's own.
        batch_is_per_tower: whether each tower gets that many rows.
        parameter_device: None, "sharded", or a GPU such as "GPU:1".
        pack_copies: whether the GPUs send each other few large messages, as they do; False is for comparisons.
        batch_norm: as in `keras_dp.DataParallelModel`.
        slices_per_device: as in `keras_dp.DataParallelModel`.
        rows: as in `keras_dp.DataParallelModel`.
        gpu: a key of `keras_dp.gpu_model.hardware.GPUS`, or a file for `keras_dp.gpu_model.own_gpus.read`; or several, one for
            each GPU, with commas between them.
        link: "nvlink" or "pcie"; None for the fastest that the GPU has.
        launch_microseconds: in place of the GPU's own, if it is not None.
        latency_microseconds: in place of the link's own, if it is not None.
        gigabytes_per_second: in place of the link's own bandwidth, if it is not None.
        memory_bytes: in place of the GPU's own memory, if it is not None.
        timeline: the file that shows when the step computes and sends; None for none.
    """

    model: str
    towers: int
    batch_size: int | None = None
    batch_is_per_tower: bool = False
    parameter_device: str | None = None
    pack_copies: bool = True
    batch_norm: choices.BatchNorm = "sync"
    slices_per_device: int = 1
    rows: list[int] | None = None
    gpu: str = "A100"
    link: str | None = None
    launch_microseconds: float | None = None
    latency_microseconds: float | None = None
    gigabytes_per_second: float | None = None
    memory_bytes: float | None = None
    timeline: str | None = None

    def machines(self) -> tuple[hardware.Machine, hardware.Machine]:
        """Returns the machine at its best and at its worst; see `keras_dp.gpu_model.hardware`.

        Raises:
            ValueError: if there is no such GPU, or it has no such link.
        """
        machines = [self._machine_of(gpu) for gpu in self.gpu.split(",")]
        machine, latency = min(machines, key=lambda one: one[0].link.bandwidth)
        machine = dataclasses.replace(machine, processors=tuple(one.processors[0] for one, _ in machines))
        latency = self.latency_microseconds or latency
        best, worst = (self._with_own_constants(one, latency) for one in hardware.best_and_worst(machine))
        return best, worst

    def _machine_of(self, gpu: str) -> tuple[hardware.Machine, float | None]:
        """Returns a machine with such GPUs, and the latency of their link in microseconds if a file says it."""
        if not own_gpus.is_file(gpu):
            return hardware.machine_of(gpu, self.link), None
        if self.link is not None:
            raise ValueError(f"{gpu} tells what connects the GPUs: leave --link out. Received: {self.link!r}")
        own = own_gpus.read(gpu)
        return own.machine(), own.link_latency_microseconds

    def _with_own_constants(self, machine: hardware.Machine, latency_microseconds: float | None) -> hardware.Machine:
        own: dict[str, Any] = {}
        link = machine.link
        if self.launch_microseconds is not None:
            own["launch_seconds"] = 1e-6 * self.launch_microseconds
        if latency_microseconds is not None:
            link = dataclasses.replace(link, latency_seconds=1e-6 * latency_microseconds)
        if self.gigabytes_per_second is not None:
            link = dataclasses.replace(link, bandwidth=1e9 * self.gigabytes_per_second)
        if self.memory_bytes is not None:
            own["memory_bytes"] = self.memory_bytes
        processors = tuple(dataclasses.replace(one, **own) for one in machine.processors)
        return dataclasses.replace(machine, processors=processors, link=link)


class Range(NamedTuple):
    """Holds a number at best and at worst."""

    best: float
    worst: float

    def __str__(self) -> str:
        """Shows two decimals, "1.25 to 1.50"."""
        shown = f"{self.best:.2f}", f"{self.worst:.2f}"
        return " to ".join(dict.fromkeys(shown))


@dataclasses.dataclass(frozen=True)
class TowersPlan:
    """Holds the prediction of a step.

    Attributes:
        batch_size: the number of rows in a global batch.
        milliseconds: the predicted time of the step without XLA, at best and at worst.
        compiled_milliseconds: the same with XLA.
        busy: the share of the time without XLA, at best, in which the busiest and the idlest GPU run operations.
        peak_megabytes: the predicted memory of the fullest GPU, without XLA.
        memory_megabytes: the memory that this GPU has.
        copies: the number of copies between devices, by kind.
        most_sent: the most copies of weights, gradients and moments that one GPU sends.
        most_received: the same, received.
        host_copies: the number of tensors between devices that stay in the host's memory.
        controls: the number of control edges between devices.
        to_host: the number of tensors that go from a GPU to the host's memory for an operation of the GPU.
        from_host: the same, the other way.
        without_kernel: the number of operations without a GPU kernel, by type.
        misplaced: the number of operations of towers on a wrong device.
        audit: the audit in words.
        largest_batch: about how many rows of a global batch fit in the GPUs' memory; None if any number does.
    """

    batch_size: int
    milliseconds: Range
    compiled_milliseconds: Range
    busy: tuple[float, float]
    peak_megabytes: float
    memory_megabytes: float
    copies: dict[str, int]
    most_sent: int
    most_received: int
    host_copies: int
    controls: int
    to_host: int
    from_host: int
    without_kernel: dict[str, int]
    misplaced: int
    audit: str
    largest_batch: int | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "TowersPlan":
        """Returns a prediction from its fields, as JSON holds them."""
        ranges = {name: Range(*fields[name]) for name in ("milliseconds", "compiled_milliseconds")}
        return cls(**fields | ranges)


@dataclasses.dataclass(frozen=True)
class MirroredPlan:
    """Holds the prediction of the same step under `tf.distribute.MirroredStrategy`.

    Attributes:
        milliseconds: the predicted time of the step, at best and at worst.
        busy: the share of the time at best in which the busiest and the idlest GPU run operations.
        peak_megabytes: the predicted memory of the fullest GPU.
        collectives: the number of collectives: all-reduces of gradients, and gatherings of the rows of sparse ones.
        collective_megabytes: what one GPU brings to them.
        collective_milliseconds: the time of all of them, without that until their ends are seen.
    """

    milliseconds: Range
    busy: tuple[float, float]
    peak_megabytes: float
    collectives: int
    collective_megabytes: float
    collective_milliseconds: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "MirroredPlan":
        """Returns a prediction from its fields, as JSON holds them."""
        return cls(**fields | {"milliseconds": Range(*fields["milliseconds"])})
