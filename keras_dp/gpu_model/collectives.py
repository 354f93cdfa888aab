"""Find the collectives of a step: operations in which all towers meet, each with one of its own."""

from collections.abc import Iterator
from typing import NamedTuple

from keras_dp.gpu_model.hardware import Machine
from keras_dp.gpu_model.loops import in_order
from keras_dp.gpu_model.placement import Operation, PlacedStep

_ALL_REDUCE, _ALL_GATHER = _TYPES = ("CollectiveReduceV2", "CollectiveGatherV2")


class Collective(NamedTuple):
    """Operations that run together, one on each tower.

    Attributes:
        type: their type.
        members: their names.
        bytes: the bytes of the tensor of each.
    """

    type: str
    members: tuple[str, ...]
    bytes: int

    def seconds(self, machine: Machine) -> float:
        """Returns their time, as NCCL takes it. TensorFlow then waits for the end of each, as of a copy."""
        link = machine.link
        time = link.nccl.all_reduce_seconds if self.type == _ALL_REDUCE else link.nccl.all_gather_seconds
        return time(self.bytes, len(self.members), link.bandwidth)


def collectives(step: PlacedStep) -> Iterator[Collective]:
    """Yields the collectives of a step that run. All towers have them in the same order, as NCCL wants it.

    Raises:
        ValueError: if the towers do not have the same collectives.
    """
    if all(operation.type not in _TYPES for operation in step.operations.values()):
        return
    of_tower: dict[str, list[Operation]] = {tower: [] for tower in step.towers}
    for name in in_order({name: operation.node for name, operation in step.operations.items()}):
        operation = step.operations[name]
        if operation.type in _TYPES and operation.name not in step.not_taken:
            of_tower[operation.device].append(operation)
    types = {tower: [operation.type for operation in own] for tower, own in of_tower.items()}
    if any(own != types[step.towers[0]] for own in types.values()):
        raise ValueError(f"All towers must have the same collectives. Received: {types}")
    for members in zip(*of_tower.values(), strict=True):
        size = max(step.sizes.bytes_of(member.inputs[0]) for member in members)
        yield Collective(members[0].type, tuple(member.name for member in members), size)
