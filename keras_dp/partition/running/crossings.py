"""Find the tensors and control dependencies of a function that cross from one device to another."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.operations import BRANCHES
from keras_dp.partition.tracing.names import control_inputs, source_of


@dataclasses.dataclass
class Copy:
    """A tensor that one device sends another.

    Attributes:
        tensor: the tensor's name inside the function.
        source: the device that sends.
        destination: the device that receives.
        takers: the names of the nodes that take the tensor there.
    """

    tensor: str
    source: str
    destination: str
    takers: list[str] = dataclasses.field(default_factory=list)

    @property
    def maker(self) -> str:
        """The name of the node that makes the tensor."""
        return source_of(self.tensor)


class Crossings:
    """Finds the copies and control dependencies between devices, as TensorFlow sends them when it divides a function.

    Args:
        function: a FunctionDef. Its nodes have devices, except for operations on variables.
        variable_devices: the devices of the arguments that refer to variables, by argument, as far as they are known.

    Attributes:
        copies: the copies, in the order in which their tensors are written. A tensor is sent once to each device.
        controls: the pairs of devices of the control dependencies. A node is waited for once on each device.
    """

    def __init__(self, function: Any, variable_devices: Mapping[str, str]):
        devices = {name: local_name(device) for name, device in variable_devices.items()}
        self._devices = {node.name: local_name(node.device) or _of_variable(node, devices) for node in function.node_def}
        copies: dict[tuple[str, str], Copy] = {}
        controls: dict[tuple[str, str], tuple[str, str]] = {}
        for node in function.node_def:
            here = self.device(node.name)
            for name in _taken(node):
                there = self.device(source_of(name))
                if here == there or not (here and there):
                    continue
                if name.startswith("^"):
                    controls[name, here] = (there, here)
                else:
                    copies.setdefault((name, here), Copy(name, there, here)).takers.append(node.name)
        order = {node.name: position for position, node in enumerate(function.node_def)}
        self.copies = sorted(copies.values(), key=lambda copy: order[copy.maker])
        self.controls = list(controls.values())

    def device(self, name: str) -> str:
        """Returns the device of a node; empty if it is not known."""
        return self._devices.get(name, "")


def _taken(node: Any) -> Sequence[str]:
    """Returns the inputs of a node that its device receives.

    TensorFlow replaces a condition by its branches. A tensor stays on the device that makes it, up to the operation in a branch
    that takes it: lower_if_op.cc, CondBuilder::AddInput.
    """
    return [node.input[0], *(f"^{name}" for name in control_inputs(node))] if node.op in BRANCHES else node.input


@functools.cache
def local_name(device: str) -> str:
    """Returns the name of a device within this process, such as "/device:GPU:0"; empty if it is not known."""
    spec = tf.DeviceSpec.from_string(device)
    return f"/device:{spec.device_type}:{spec.device_index or 0}" if spec.device_type else ""


def _of_variable(node: Any, devices: Mapping[str, str]) -> str:
    return next((devices[name] for name in node.input if name in devices), "")
