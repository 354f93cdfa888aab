"""Find the GPU kernels of operations, and which of their tensors are in the host's memory.

TensorFlow registers its GPU kernels on every machine with a CUDA build, also where there is no GPU. A kernel that is registered
for all devices ("DEFAULT") may run on a GPU.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dp.keras_internals.tensorflow_runtime import definition_of, registered_kernels

# On a GPU, a function's arguments of these types are in the host's memory, and so are the tensors of a loop or a branch.
_ON_HOST = {tf.int32, tf.string, tf.resource}
# The graph optimizer fuses these on CPUs alone; the operations that they stand for have GPU kernels.
_FUSED_ON_CPUS = ("_UnaryOpsComposition",)
_ARGUMENTS = ("Placeholder", "PlaceholderWithDefault")


class Kernel(NamedTuple):
    """Says which tensors of an operation are in the host's memory while the operation stands on a GPU.

    Attributes:
        inputs: for each input, whether it is.
        outputs: for each output, whether it is.
    """

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    @property
    def is_on_host(self) -> bool:
        """Whether the operation touches the host's memory alone, so that the GPU has nothing to do."""
        return all(self.inputs) and all(self.outputs)


def gpu_kernel(node: Any) -> Kernel | None:
    """Returns the kernel that runs a node on a GPU; None if there is none.

    Args:
        node: a NodeDef with all its attributes.
    """
    if node.op in _FUSED_ON_CPUS:
        return in_device_memory(node)
    inputs, outputs = (list(_tensors(node, arguments)) for arguments in _arguments(node))
    fitting = [kernel for kernel in registered_kernels(node.op) if _fits(kernel, node)]
    if not fitting:
        return None
    if node.op in _ARGUMENTS or calls_functions(node):
        return Kernel(*(tuple(dtype in _ON_HOST for _, dtype in side) for side in (inputs, outputs)))
    # TensorFlow prefers kernels for GPUs, and then the highest priority.
    kernel = max(fitting, key=lambda kernel: (kernel.device_type == "GPU", kernel.priority))
    on_host = set(kernel.host_memory_arg)
    always = _ON_HOST - {tf.int32}
    return Kernel(*(tuple(name in on_host or dtype in always for name, dtype in side) for side in (inputs, outputs)))


def in_device_memory(node: Any, on_host: bool = False) -> Kernel:
    """Returns a kernel that has all its tensors in the memory of its device, which may be the host."""
    inputs, outputs = (tuple(on_host for _ in _tensors(node, arguments)) for arguments in _arguments(node))
    return Kernel(inputs, outputs)


def _fits(kernel: Any, node: Any) -> bool:
    """Returns whether a kernel is for GPUs, and for the types of a node."""
    return kernel.device_type in ("GPU", "DEFAULT") and all(
        set(_types(node.attr[constraint.name])) <= set(constraint.allowed_values.list.type) for constraint in kernel.constraint
    )


def _types(attribute: Any) -> Iterable[int]:
    return [attribute.type] if attribute.type else attribute.list.type


def calls_functions(node: Any) -> bool:
    """Returns whether a node is a loop, a branch or a call."""
    return any(attribute.HasField("func") for attribute in node.attr.values())


def _arguments(node: Any) -> tuple[Any, Any]:
    definition = definition_of(node.op)
    return definition.input_arg, definition.output_arg


def _tensors(node: Any, arguments: Iterable[Any]) -> Iterator[tuple[str, tf.DType]]:
    """Yields the name of the argument and the dtype for each tensor that a node takes, or for each that it makes."""
    for argument in arguments:
        if argument.type_list_attr:
            types = list(node.attr[argument.type_list_attr].list.type)
        else:
            dtype = node.attr[argument.type_attr].type if argument.type_attr else argument.type
            types = [dtype] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
        for dtype in types:
            yield argument.name, _dtype(dtype)


_dtype = functools.cache(tf.as_dtype)
