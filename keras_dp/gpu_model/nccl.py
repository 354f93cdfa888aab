"""Tell the time of NCCL's collectives, by the model with which NCCL chooses among its own algorithms.

Model and constants are those of src/graph/tuning.cc in NCCL 2.30.7, for GPUs of one machine. Its corrections for trees of
medium size, and its limits for each channel, are left out: they only make collectives slower.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A way to hand data from one GPU to the next.

    Attributes:
        name: its name, with that of the algorithm.
        base_seconds: the time of a collective, however small it is, with its launch.
        step_seconds: the time that each step adds.
        share: the part of the link's bandwidth that it reaches.
        most_bandwidth: the bytes per second that it reaches at most.
    """

    name: str
    base_seconds: float
    step_seconds: float
    share: float
    most_bandwidth: float = float("inf")

    def seconds(self, steps: int, moved_bytes: float, bandwidth: float) -> float:
        """Returns the time of some steps that move some bytes over each link of a bandwidth."""
        return self.base_seconds + steps * self.step_seconds + moved_bytes / min(self.share * bandwidth, self.most_bandwidth)


@dataclasses.dataclass(frozen=True)
class Nccl:
    """NCCL on GPUs of one machine.

    Attributes:
        rings: the protocols of rings.
        trees: the protocols of trees, which are chains within a machine.
        switches: the protocols in which the switch between the GPUs computes sums.
    """

    rings: tuple[Protocol, ...]
    trees: tuple[Protocol, ...]
    switches: tuple[Protocol, ...] = ()

    def all_reduce_seconds(self, size: float, gpus: int, bandwidth: float) -> float:
        """Returns the time in which GPUs sum tensors, with the fastest algorithm and protocol; 0 for a single GPU.

        Args:
            size: the bytes of the tensor of each GPU.
            gpus: N, the number of GPUs.
            bandwidth: bytes per second of a GPU's link, in each direction.
        """
        steps = 2 * (gpus - 1)
        ways = [(self.rings, size * steps / gpus), (self.trees, 2 * size), (self.switches, size)]
        return min(time for protocols, moved in ways for time in _times(protocols, steps, moved, bandwidth)) if steps else 0.0

    def all_gather_seconds(self, size: float, gpus: int, bandwidth: float) -> float:
        """Returns the time in which each GPU gets the tensors of all, with the fastest protocol of rings; 0 for a single GPU.

        Args:
            size: the bytes of the tensor of each GPU.
            gpus: N, the number of GPUs.
            bandwidth: bytes per second of a GPU's link, in each direction.
        """
        steps = gpus - 1
        return min(_times(self.rings, steps, size * steps, bandwidth)) if steps else 0.0


def _times(protocols: Iterable[Protocol], steps: int, moved_bytes: float, bandwidth: float) -> list[float]:
    return [protocol.seconds(steps, moved_bytes, bandwidth) for protocol in protocols]


def _over_nvlink(most_of_ll: float, *switches: Protocol) -> Nccl:
    """Returns NCCL between GPUs that NVLink connects; tuning.cc: baseLatencies, hwLatencies and ncclTopoTuneModel.

    Args:
        most_of_ll: llMaxBws, the GB/s that the protocol LL reaches at most.
        *switches: the protocols of the switch.
    """
    return Nccl(
        rings=(
            Protocol("ring, LL", 6.6e-6, 0.6e-6, 0.5, 1e9 * most_of_ll),
            Protocol("ring, LL128", 14e-6, 1.9e-6, 0.92),
            Protocol("ring, Simple", 8.4e-6, 3.4e-6, 1.0),
        ),
        trees=(
            Protocol("tree, LL", 6.8e-6, 0.6e-6, 0.92 / 3.8, 1e9 * most_of_ll),
            Protocol("tree, LL128", 14e-6, 1.25e-6, 0.92 * 7 / 9),
            Protocol("tree, Simple", 8.4e-6, 4.0e-6, 0.92),
        ),
        switches=switches,
    )


# hwLatencies: 25 µs for the whole collective. On 8 H100s it sums 275 GB/s where a ring has 370 GB/s of the link: NCCL's
# maintainer in https://github.com/NVIDIA/nccl-tests/issues/212. Here it does so with any number of GPUs.
_NVLINK_SHARP = Protocol("NVLink SHARP", 25e-6, 0.0, 275 / 370)

OVER_NVLINK_2 = _over_nvlink(39.0)
OVER_NVLINK_3 = _over_nvlink(87.7)
OVER_NVLINK_4 = _over_nvlink(141.0, _NVLINK_SHARP)
# Over PCIe, LL has half the bandwidth of the link, which is less than llMaxBws, and LL128 is off.
OVER_PCIE = Nccl(
    rings=(Protocol("ring, LL", 6.6e-6, 1.0e-6, 0.5), Protocol("ring, Simple", 8.4e-6, 5.7e-6, 1.0)),
    trees=(Protocol("tree, LL", 6.8e-6, 1.0e-6, 0.92 / 3.8), Protocol("tree, Simple", 8.4e-6, 4.0e-6, 0.92)),
)
