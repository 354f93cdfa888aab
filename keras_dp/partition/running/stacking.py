"""Stack the messages of all towers, in place of the tensors in them.

A tower that combines the parts of all towers by itself stacks the parts that it receives with its own. Where such stacks take
parts from the same messages, these are stacked, and the stack is split. For the moments of N towers, which travel as one
message of two tensors, a tower then runs two operations, in place of N - 1 that split messages and two that stack parts:

    before: split(message 1), ..., split(message N - 1); mean = stack(means); variance = stack(variances)
    after:  mean, variance = split(stack(message 1, ..., message N))
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running.crossings import local_name
from keras_dp.partition.running.functions import remove_unneeded, replace_tensors
from keras_dp.partition.running.messages import PREFIX, Layout, Message
from keras_dp.partition.tracing.names import control_inputs, data_inputs


def stack_messages(written: GraphWriter, messages: Sequence[Message], last: Mapping[str, int]) -> None:
    """Replaces stacks of tensors of messages by parts of the stacked messages.

    Args:
        written: the graph.
        messages: the messages between devices.
        last: by node, the latest round of a message that it can wait for without waiting for itself.
    """
    found = _Stacks(messages, last)
    replaced, stacks = {}, set()
    for node in [node for node in written.function.node_def if node.op == "Pack" and node.attr["axis"].i == 0]:
        part = found.part_of_messages(node)
        if part:
            nodes = [message.node for message in part.messages]
            split = partial(part.messages[0].layout.split_stack, written, nodes, node.device)
            parts = written.once(("stacked", node.device, *nodes), split)
            replaced[f"{node.name}:output:0"] = written.inside(parts[part.position])[0]
            stacks.add(node.name)
    if replaced:
        replace_tensors(written.function, replaced)
        of_messages = {node.name for node in written.function.node_def if node.name.startswith(PREFIX)}
        remove_unneeded(written.function, stacks | of_messages)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Describes a stack of the tensors at one position of several messages."""

    messages: Sequence[Message]
    position: int


class _Stacks:
    """Finds stacks of tensors of messages.

    Args:
        messages: as in `stack_messages`.
        last: as in `stack_messages`.
    """

    def __init__(self, messages: Sequence[Message], last: Mapping[str, int]):
        self._last = last
        self._places: dict[tuple[str, str], list[tuple[Message, int]]] = defaultdict(list)
        for message in messages:
            for device, tensors in ((message.source, message.joined), (message.destination, message.received)):
                for position, tensor in enumerate(tensors):
                    self._places[device, tensor].append((message, position))

    def part_of_messages(self, stack: Any) -> _Part | None:
        """Returns the messages that a stack takes its tensors from, one each, if they stand at one position of one layout."""
        device = local_name(stack.device)
        places = [self._places_of(device, tensor, self._last[stack.name]) for tensor in data_inputs(stack)]
        for layout, position in places[0]:
            messages = [of_tensor[layout, position] for of_tensor in places if (layout, position) in of_tensor]
            nodes = {message.node for message in messages}
            if len(nodes) == len(places) > 1 and nodes.issuperset(control_inputs(stack)):
                return _Part(messages, position)
        return None

    def _places_of(self, device: str, tensor: str, last: int) -> dict[tuple[Layout, int], Message]:
        """Returns the messages of rounds up to the last one that hold a tensor of a device, by layout and position."""
        places = self._places[device, tensor]
        return {(message.layout, position): message for message, position in places if message.number <= last}
