"""Describe GPUs, links and hosts for the simulation of a step, by named constants with their sources.

Rates of arithmetic and memory are those of the manufacturers' data sheets. Kernels reach a part of them, which is a constant of
its own. Latencies and launch costs are assumptions: they depend on the driver and the machine. Change any of them with
`dataclasses.replace`.
"""

import dataclasses


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
        latency_seconds: the time of a copy, however small it is.
        bandwidth: bytes per second, in each direction.
        source: where the numbers are from.
    """

    name: str
    latency_seconds: float
    bandwidth: float
    source: str = ""

    def seconds(self, copied_bytes: float) -> float:
        """Returns the time of a copy: latency and bytes / bandwidth (Thakur, Rabenseifner and Gropp 2005)."""
        return self.latency_seconds + copied_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Machine:
    """Several equal devices, their links, and a host.

    Attributes:
        processor: each of the devices.
        link: what connects the devices with each other.
        host_link: what connects each device with the host's memory.
        host_seconds: the time of a small operation on the host, such as one on shapes.
        control_seconds: the time from an operation on one device to an operation on another that waits for it.
        is_shared: whether the devices are parts of one processor, and share its memory, as logical CPUs do.
    """

    processor: Processor
    link: Link
    host_link: Link
    host_seconds: float = 1e-6
    control_seconds: float = 15e-6
    is_shared: bool = False


# TensorFlow waits for the sender's stream and for the end of each copy: 10 to 30 µs, depending on the driver and the machine.
_COPY_SECONDS = 15e-6

PCIE = Link("PCIe 4.0 x16", _COPY_SECONDS, 25e9, source="of 32 GB/s by its standard; the latency is an assumption")
NVLINK_3 = Link("NVLink 3", _COPY_SECONDS, 250e9, source="of 300 GB/s, NVIDIA A100 data sheet; the latency is an assumption")
NVLINK_4 = Link("NVLink 4", _COPY_SECONDS, 375e9, source="of 450 GB/s, NVIDIA H100 data sheet; the latency is an assumption")

GPUS = {
    "A100": Processor(
        "A100 40 GB", 156e12, 312e12, 19.5e12, 1.555e12, 40e9, source="NVIDIA A100 data sheet, 2020, without sparsity"
    ),
    "H100": Processor(
        "H100 SXM 80 GB", 494e12, 989e12, 67e12, 3.35e12, 80e9, source="NVIDIA H100 data sheet, 2023, without sparsity"
    ),
    "RTX4090": Processor(
        "RTX 4090", 82.6e12, 165.2e12, 82.6e12, 1.008e12, 24e9, source="NVIDIA Ada GPU architecture, 2022, without sparsity"
    ),
}
LINKS = {
    "A100": {"nvlink": NVLINK_3, "pcie": PCIE},
    "H100": {"nvlink": NVLINK_4, "pcie": PCIE},
    "RTX4090": {"pcie": PCIE},
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
    return Machine(GPUS[gpu], links[link or next(iter(links))], PCIE)
