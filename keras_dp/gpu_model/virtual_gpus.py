"""Ask TensorFlow's virtual cluster for the time and the memory of a step on GPUs.

The virtual cluster knows no latency of links and no cost of launches: its times are lower bounds.
"""

from typing import NamedTuple

from keras_dp.arithmetic.work import costed_nodes, ends
from keras_dp.gpu_model.hardware import Processor
from keras_dp.gpu_model.placement import PlacedStep
from keras_dp.keras_internals.tensorflow_runtime import VirtualCluster
from keras_dp.partition.tensorflow_internals import HOST

_PREFIX = "/job:localhost/replica:0/task:0/device:"
# How TensorFlow's cost model computes the FLOP/s of a GPU since Pascal: cores * MHz * 64 multiplications and additions.
_FLOPS_OF_CORE_AND_MEGAHERTZ = 1e6 * 64 * 2
_MEGAHERTZ = 1_000


class VirtualCost(NamedTuple):
    """What the virtual cluster says of a step.

    Attributes:
        seconds: the time of the step.
        peak_bytes: the most bytes of tensors on each device at one time, without variables, by device.
    """

    seconds: float
    peak_bytes: dict[str, int]


def on_virtual_gpus(step: PlacedStep, processor: Processor) -> VirtualCost:
    """Returns what a step costs on virtual GPUs that compute everything in float32, without matrix units.

    Args:
        step: the step, placed on GPUs.
        processor: the GPU.
    """
    nodes = costed_nodes(step.graph)
    for node in nodes.node:
        operation = step.operations.get(node.name)
        node.device = _PREFIX + (HOST if operation is None else operation.device)
    gpu = {
        "type": "GPU",
        "num_cores": round(processor.vector_flops / _FLOPS_OF_CORE_AND_MEGAHERTZ / _MEGAHERTZ),
        "frequency": _MEGAHERTZ,
        "bandwidth": round(processor.bandwidth / 1e3),
        "memory_size": round(processor.memory_bytes),
        "environment": {"architecture": "8.0"},
    }
    host = {"type": "CPU", "num_cores": 16, "frequency": 2_400, "bandwidth": 32_000_000}
    cluster = VirtualCluster(nodes, ends(nodes), {_PREFIX + name: gpu for name in step.towers} | {_PREFIX + HOST: host})
    _, seconds = cluster.run()
    peaks = {name.removeprefix(_PREFIX): peak for name, peak in cluster.peak_bytes().items()}
    return VirtualCost(seconds, {name: peaks.get(name, 0) for name in step.towers})
