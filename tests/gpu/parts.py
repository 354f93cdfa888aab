"""List the parts of the test on GPUs, in the order of what they teach."""

from typing import NamedTuple

HOLDS = "holds"
SAME_GRAPH = "the same graph, other kernels"
MEANS_NOTHING = "means nothing"


class Part(NamedTuple):
    """Describes a part: what it teaches, when it is ended, what its result means without GPUs, and its module with `run`."""

    name: str
    teaches: str
    limit_seconds: float
    without_gpus: str
    module: str


def _part(name, teaches, limit_seconds, without_gpus=SAME_GRAPH):
    return Part(name, teaches, limit_seconds, without_gpus, f"gpu.{name}")


PARTS = [
    _part("machine", "devices and versions", 60, HOLDS),
    _part("parity", "whether towers give the result of one device", 600),
    _part("normalization", "whether batch norm and dropout are those of one device", 120),
    _part("reliability", "whether steps that fail change nothing, and trainings repeat themselves", 300),
    _part("placement", "where each operation of a step runs", 120),
    _part("slices", "whether slices are copied to GPUs while these compute", 90, MEANS_NOTHING),
    _part("xla", "whether towers compiled by XLA are exact, and faster", 300),
    _part("memory", "the memory of each device", 120, MEANS_NOTHING),
    _part("overhead", "the time that a step takes besides computing", 120),
    _part("copies", "the cost of a copy and of a control edge between devices", 90, MEANS_NOTHING),
    _part("bench", "step times beside one device and MirroredStrategy", 480, MEANS_NOTHING),
    _part("workers", "whether two processes give the result of one", 150),
]
