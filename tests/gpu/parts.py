"""List the parts of the test on GPUs, in the order of what they teach."""

from typing import NamedTuple

HOLDS = "holds"
SAME_GRAPH = "the same graph, other kernels"
MEANS_NOTHING = "means nothing"


class Part(NamedTuple):
    """Describes a part: what it teaches, when it is ended, and the module whose `run` takes the part's `Record`.

    `without_gpus` says what its result means on logical CPUs.
    """

    name: str
    teaches: str
    limit_seconds: float
    without_gpus: str
    module: str


PARTS = [
    Part("machine", "devices and versions", 60, HOLDS, "gpu.machine"),
    Part("parity", "whether towers give the result of one device", 600, SAME_GRAPH, "gpu.parity"),
    Part("normalization", "whether batch norm and dropout are those of one device", 120, SAME_GRAPH, "gpu.normalization"),
    Part(
        "reliability",
        "whether steps that fail change nothing, and trainings repeat themselves",
        300,
        SAME_GRAPH,
        "gpu.reliability",
    ),
    Part("placement", "where each operation of a step runs", 120, SAME_GRAPH, "gpu.placement"),
    Part("slices", "whether slices are copied to GPUs while these compute", 90, MEANS_NOTHING, "gpu.slices"),
    Part("xla", "whether towers compiled by XLA are exact, and faster", 300, SAME_GRAPH, "gpu.xla"),
    Part("memory", "the memory of each device", 120, MEANS_NOTHING, "gpu.memory"),
    Part("overhead", "the time that a step takes besides computing", 120, SAME_GRAPH, "gpu.overhead"),
    Part("copies", "the cost of a copy and of a control edge between devices", 90, MEANS_NOTHING, "gpu.copies"),
    Part("bench", "step times beside one device and MirroredStrategy", 480, MEANS_NOTHING, "gpu.bench"),
    Part("workers", "whether two processes give the result of one", 150, SAME_GRAPH, "gpu.workers"),
]
