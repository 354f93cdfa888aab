"""Describe GPUs, links and hosts for the simulation of a step, by named constants with their sources.

Rates of arithmetic and memory are those of the manufacturers' data sheets. Kernels reach a part of them, which is a constant of
its own. How long copies and programs wait depends on the driver and the machine: a machine waits as briefly as is likely, and
`best_and_worst` tells the same machine at its worst. Change any constant with `dataclasses.replace`.
"""

import dataclasses
import re

from keras_dp.gpu_model.nccl import OVER_NVLINK_2, OVER_NVLINK_3, OVER_NVLINK_4, OVER_PCIE, Nccl


@dataclasses.dataclass(frozen=True)
class Processor:
    """A device that runs one operation at a time.

    Attributes:
        name: its name.
        matrix_flops: FLOP/s of products of matrices and convolutions in float32, as TensorFlow computes them by default: in
            TF32 on GPUs that have it.
        half_flops: FLOP/s of the same in float16 or bfloat16, with sums in float32.
        vector_flops: FLOP/s of all other operations.
        bandwidth: bytes per second of its memory.
        memory_bytes: the size of its memory.
        launch_seconds: the time from one operation to the next, however small they are.
        matrix_efficiency: the part of `matrix_flops` and `half_flops` that kernels reach.
        bandwidth_efficiency: the part of `bandwidth` that kernels reach.
        launches_ahead: whether an operation is launched while the one before it runs, as on GPUs.
        program_seconds: the time in which the host launches a program of XLA.
        fused: the share of the bytes between the operations of a kernel that XLA saves, from 0 to 1.
        source: where the rates are from.
    """

    name: str
    matrix_flops: float
    half_flops: float
    vector_flops: float
    bandwidth: float
    memory_bytes: float
    launch_seconds: float = 5e-6
    matrix_efficiency: float = 0.4
    bandwidth_efficiency: float = 0.75
    launches_ahead: bool = True
    program_seconds: float = 10e-6
    fused: float = 1.0
    source: str = ""

    def seconds(self, flops: float, moved_bytes: float, is_matrix: bool = False, is_half: bool = False) -> float:
        """Returns the time of an operation, which either the arithmetic or the memory limits (Williams et al. 2009)."""
        matrix = self.matrix_efficiency * (self.half_flops if is_half else self.matrix_flops)
        arithmetic = flops / (matrix if is_matrix else self.vector_flops)
        work = max(arithmetic, moved_bytes / (self.bandwidth_efficiency * self.bandwidth))
        return max(work, self.launch_seconds) if self.launches_ahead else work + self.launch_seconds


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects a device with others, in both directions at once.

    Attributes:
        name: its name.
        bandwidth: bytes per second, in each direction.
        source: where the bandwidth is from.
        nccl: how NCCL uses it.
        latency_seconds: the time until the end of a copy is seen, however small it is.
        wire_seconds: the part of the latency for which a copy occupies the link, and the next one of the same device waits.
    """

    name: str
    bandwidth: float
    source: str = ""
    nccl: Nccl = OVER_PCIE
    latency_seconds: float = 15e-6
    wire_seconds: float = 5e-6

    def seconds(self, copied_bytes: float) -> float:
        """Returns the time of a copy: latency and bytes / bandwidth (Thakur, Rabenseifner and Gropp 2005)."""
        return self.latency_seconds + copied_bytes / self.bandwidth

    def seconds_on_wire(self, copied_bytes: float) -> float:
        """Returns the time for which a copy occupies the link.

        TensorFlow starts the copies of one GPU one after the other on a stream for copies, and a thread looks every 10 µs which
        of them have ended (gpu_util.cc, DeviceToDeviceCopy; event_mgr.cc). So copies wait for each other's bytes, and only once
        for their end to be seen.
        """
        return min(self.wire_seconds, self.latency_seconds) + copied_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Machine:
    """Several devices, their links, and a host.

    Attributes:
        processors: each of the devices. Those after the last one are like it.
        link: what connects the devices with each other.
        host_link: what connects each device with the host's memory.
        host_seconds: the time of a small operation on the host, such as one on shapes.
        control_seconds: the time from an operation on one device to an operation on another that waits for it.
        is_shared: whether the devices are parts of one processor, and share its memory, as logical CPUs do.
    """

    processors: tuple[Processor, ...]
    link: Link
    host_link: Link
    host_seconds: float = 1e-6
    control_seconds: float = 15e-6
    is_shared: bool = False

    def processor_of(self, device: str) -> Processor:
        """Returns the processor of a device, such as "GPU:1"."""
        return self.processors[min(int(device.rpartition(":")[2]), len(self.processors) - 1)]


# A copy on one H100, in a virtual machine, waited 40 µs, and a control edge 30 µs: docs/gpu.md.
_LONG_COPY_SECONDS, _LONG_WIRE_SECONDS = 40e-6, 10e-6
_LONG_CONTROL_SECONDS = 30e-6
_LONG_PROGRAM_SECONDS = 50e-6

PCIE_3 = Link("PCIe 3.0 x16", 12.5e9, "of 16 GB/s by its standard")
PCIE = Link("PCIe 4.0 x16", 25e9, "of 32 GB/s by its standard")
PCIE_5 = Link("PCIe 5.0 x16", 50e9, "of 64 GB/s by its standard")
NVLINK_2 = Link("NVLink 2", 125e9, "of 150 GB/s, NVIDIA V100 data sheet", OVER_NVLINK_2)
NVLINK_3 = Link("NVLink 3", 250e9, "of 300 GB/s, NVIDIA A100 data sheet", OVER_NVLINK_3)
NVLINK_4 = Link("NVLink 4", 375e9, "of 450 GB/s, NVIDIA H100 data sheet", OVER_NVLINK_4)


def _gpu(name: str, matrix: float, half: float, vector: float, bandwidth: float, gigabytes: float, source: str) -> Processor:
    """Returns a GPU from its data sheet, in TFLOP/s without sparsity, TB/s and GB."""
    return Processor(name, 1e12 * matrix, 1e12 * half, 1e12 * vector, 1e12 * bandwidth, 1e9 * gigabytes, source=source)


GPUS = {
    # Without TF32, products of matrices in float32 run at the rate of other operations.
    "T4": _gpu("T4", 8.1, 65, 8.1, 0.320, 16, "NVIDIA T4 data sheet, 2019"),
    "V100": _gpu("V100 SXM2 32 GB", 15.7, 125, 15.7, 0.900, 32, "NVIDIA V100 data sheet, 2020"),
    "L4": _gpu("L4", 60, 121, 30.3, 0.300, 24, "NVIDIA L4 data sheet, 2023"),
    "A10": _gpu("A10", 62.5, 125, 31.2, 0.600, 24, "NVIDIA A10 data sheet, 2021"),
    "A100": _gpu("A100 40 GB", 156, 312, 19.5, 1.555, 40, "NVIDIA A100 data sheet, 2020"),
    "A100-80GB": _gpu("A100 SXM 80 GB", 156, 312, 19.5, 2.039, 80, "NVIDIA A100 data sheet, 2021"),
    "H100": _gpu("H100 SXM 80 GB", 494, 989, 67, 3.35, 80, "NVIDIA H100 data sheet, 2023"),
    "H200": _gpu("H200 SXM 141 GB", 494, 989, 67, 4.8, 141, "NVIDIA H200 data sheet, 2024"),
    "RTX3090": _gpu("RTX 3090", 35.6, 71, 35.6, 0.936, 24, "NVIDIA Ampere GA102 GPU architecture, 2021"),
    "RTX4090": _gpu("RTX 4090", 82.6, 165.2, 82.6, 1.008, 24, "NVIDIA Ada GPU architecture, 2022"),
    "RTX5090": _gpu("RTX 5090", 104.8, 209.5, 104.8, 1.792, 32, "NVIDIA RTX Blackwell GPU architecture, 2025"),
}
LINKS = {
    "T4": {"pcie": PCIE_3},
    "V100": {"nvlink": NVLINK_2, "pcie": PCIE_3},
    "L4": {"pcie": PCIE},
    "A10": {"pcie": PCIE},
    "A100": {"nvlink": NVLINK_3, "pcie": PCIE},
    "A100-80GB": {"nvlink": NVLINK_3, "pcie": PCIE},
    # An H100 has PCIe 5.0; the tables of docs/gpu_audit.md were simulated for hosts with 4.0.
    "H100": {"nvlink": NVLINK_4, "pcie": PCIE},
    "H200": {"nvlink": NVLINK_4, "pcie": PCIE_5},
    "RTX3090": {"pcie": PCIE},
    "RTX4090": {"pcie": PCIE},
    "RTX5090": {"pcie": PCIE_5},
}


def machine_of(gpu: str, link: str | None = None) -> Machine:
    """Returns a machine with GPUs.

    Args:
        gpu: a key of `GPUS`.
        link: "nvlink" or "pcie"; None for the fastest that the GPU has.

    Raises:
        ValueError: if there is no such GPU, or it has no such link.
    """
    if gpu not in GPUS:
        raise ValueError(f"A GPU is one of {', '.join(GPUS)}. Received: {gpu!r}")
    links = LINKS[gpu]
    if link is not None and link not in links:
        raise ValueError(f"The links of {GPUS[gpu].name} are: {', '.join(links)}. Received: {link!r}")
    return Machine((GPUS[gpu],), links[link or next(iter(links))], links["pcie"])


def known_gpu(device_name: str) -> str | None:
    """Returns the key in `GPUS` of a GPU by the name that its driver gives it; None if its numbers are not known.

    >>> known_gpu("NVIDIA A100-SXM4-80GB"), known_gpu("NVIDIA GeForce RTX 4090"), known_gpu("NVIDIA GeForce RTX 3090 Ti")
    ('A100-80GB', 'RTX4090', None)
    """
    words = re.split(r"[ -]", device_name.replace("RTX ", "RTX"))
    found = [gpu for gpu in GPUS if set(gpu.split("-")) <= set(words)]
    return max(found, key=len) if found and "Ti" not in words else None


def best_and_worst(machine: Machine) -> tuple[Machine, Machine]:
    """Returns a machine, and the same if copies, control edges and programs wait as long as is likely and XLA fuses nothing."""

    def slow(link: Link) -> Link:
        return dataclasses.replace(link, latency_seconds=_LONG_COPY_SECONDS, wire_seconds=_LONG_WIRE_SECONDS)

    return machine, dataclasses.replace(
        machine,
        processors=tuple(
            dataclasses.replace(one, program_seconds=_LONG_PROGRAM_SECONDS, fused=0.0) for one in machine.processors
        ),
        link=slow(machine.link),
        host_link=slow(machine.host_link),
        control_seconds=_LONG_CONTROL_SECONDS,
    )
