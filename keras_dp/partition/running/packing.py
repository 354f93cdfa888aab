"""Pack the tensors that one device sends another into few messages.

On GPUs a copy from one device to another costs its launch, whatever its size, so that a large copy takes less time than many
small ones. Copies may share a message if none of them leads to another. So each copy gets a round, and only copies of the same
round share messages.

For two towers, with the weights w and v at home on GPU 0, of which v is needed after batch normalization:

    round 0: GPU 0 [w v] -> GPU 1           weights: no copy leads to them, so that they leave first, together
    round 1: GPU 1 [moments] -> GPU 0       of batch normalization; the weights lead to them
    round 2: GPU 0 [sums of moments] -> GPU 1
    ...                                     and back again, for the gradients of the moments
    last:    GPU 1 [dw dv] -> GPU 0         gradients, which only the updates wait for

No message waits for itself, whatever the rounds. Packing makes two kinds of nodes wait for a message: those that take its
tensors, and those that begin after it. Either waits only if all copies that it leads to have later rounds. So a path from a
message meets messages of later rounds alone, and never returns. The packed function is checked all the same.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running.collectives import exchange_together
from keras_dp.partition.running.crossings import Copy, Crossings, local_name
from keras_dp.partition.running.functions import bytes_of, conditional_nodes, names_of
from keras_dp.partition.running.messages import Layout, Message, sent_as
from keras_dp.partition.running.stacking import stack_messages
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import data_inputs, source_of

# A full message leaves before the tensors of the next one are there. DistributedDataParallel of PyTorch fills buckets of 25 MB
# (Li et al. 2020, "PyTorch Distributed", section 3.2.3), about a quarter of the gradients of ResNet-50.
_FULL_MESSAGES = 4
_LEAST_BYTES = 4 << 20

# On CPUs, oneDNN fuses these operations with others. TensorFlow ends the process if they wait for anything but their inputs.
FUSED_ON_CPUS = ("Conv2D", "Conv2DBackpropFilter", "Conv3D", "DepthwiseConv2dNative", "Pad")


def pack_copies(
    written: GraphWriter,
    types: Mapping[str, tf.TensorSpec],
    variable_devices: Mapping[str, str],
    together: Sequence[str] = (),
) -> None:
    """Packs the tensors that devices send each other, and joins control dependencies between devices.

    A message holds tensors one after the other. Tensors of unknown size are sent by themselves. The packed function is checked:
    if nodes waited for each other, it would be given up for the unpacked one.

    Args:
        written: the graph, with the signature of its function.
        types: the types of its tensors, as `types_of` returns them.
        variable_devices: the devices of variables, by the names that nodes use, as far as they are known.
        together: the devices that exchange messages by collectives, where each of them sends all others one.
    """
    apart = function_pb2.FunctionDef()
    apart.CopyFrom(written.function)
    devices = {argument: variable_devices[name] for name, argument in written.given.items() if name in variable_devices}
    _pack(written, types, devices, list(map(local_name, together)))
    cycle = written.graph.cycle
    if cycle:
        written.function.CopyFrom(apart)
        written.met.clear()
        warnings.warn(
            "The tensors that devices send each other in this step travel one by one: in messages, they would wait for each "
            "other. The results are the same. Please report this as an error of keras_dp. "
            f"Received: a cycle of the nodes {', '.join(cycle)}",
            stacklevel=2,
        )


def _pack(
    written: GraphWriter,
    types: Mapping[str, tf.TensorSpec],
    variable_devices: Mapping[str, str],
    together: Sequence[str],
) -> None:
    graph = Graph(written.function.node_def)
    nodes, order = graph.nodes, graph.order
    # A node that a tower computes in place of home is one of the tower's.
    towers = written.towers | written.replicated
    crossings = Crossings(written.function, variable_devices)
    conditional = conditional_nodes(graph)
    names = names_of(written.function)
    types = {name: spec for name, spec in types.items() if sent_as(spec.dtype)}
    copies = [copy for copy in crossings.copies if copy.tensor in types and copy.maker not in conditional]
    before, latest = _steps(copies, nodes, order, towers)
    rounds = _rounds(copies, before, latest)
    last = _last_rounds(copies, rounds, latest, nodes, order)
    users: dict[str, list[Any]] = defaultdict(list)
    for node in (nodes[name] for name in towers):
        for name in data_inputs(node):
            if crossings.device(source_of(name)) == crossings.device(node.name):
                users[name].append(node)
    messages = []
    for number, sent in _messages(copies, rounds, last, types, together):
        message = _send(written, number, sent, names, types)
        if len(sent) > 1:
            # A tensor that is not joined leaves as it is made.
            _begin_after(message.node, (user for copy in sent for user in users[copy.tensor] if number <= last[user.name]))
        for copy, tensor in zip(sent, message.received, strict=True):
            for taker in copy.takers:
                set_inputs(nodes[taker], [tensor if name == copy.tensor else name for name in nodes[taker].input])
        messages.append(message)
    stack_messages(written, messages, last)
    if together:
        exchange_together(written, messages, together)
    _join_controls(written, crossings)


def _steps(
    copies: Sequence[Copy], nodes: Mapping[str, Any], order: Sequence[str], towers: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns how many steps lead to each node, and the latest round of a message that it can wait for without a delay.

    A step goes to a tower, or home from one. The longest chain of steps has one round for each of them.

    A tower on the device where a sum is made needs no copy of it, but its steps count like those of all others. Otherwise, the
    sum would wait, in a message to another tower, for what this tower computes from it. So does the step of a tower's own part
    to a sum that each tower makes by itself. Otherwise, a tower that begins a round later would share a message among two
    sums, one after the other, and the towers would compute in turns.
    """
    crossing = {(copy.maker, taker) for copy in copies for taker in copy.takers}
    parts = {copy.maker for copy in copies if copy.maker in towers}
    sums = {taker for maker, taker in crossing if maker in parts and taker in towers}
    before: dict[str, int] = defaultdict(int)
    after: dict[str, int] = defaultdict(int)

    def is_step(source: str, name: str) -> bool:
        if (source, name) in crossing or (source in parts and name in sums):
            return True
        return source in nodes and towers.get(source) != towers.get(name)

    edges = [(source, name) for name in order for source in map(source_of, nodes[name].input)]
    for source, name in edges:
        before[name] = max(before[name], before[source] + is_step(source, name))
    for source, name in reversed(edges):
        after[source] = max(after[source], after[name] + is_step(source, name))
    last = max(before.values(), default=0) - 1
    return before, {name: last - after[name] for name in nodes}


def _rounds(copies: Sequence[Copy], before: Mapping[str, int], latest: Mapping[str, int]) -> list[int]:
    """Returns the round of each copy.

    A copy that no other one leads to leaves in round 0, as early as it can. Examples are the weights. Any other copy has the
    latest round that delays nothing: gradients, which only updates wait for, share the last one.

    A copy never shares a round with those that it leads to. They come at least a step after it, so that their latest rounds are
    later than its own. None of them leaves earlier than that, since the copy leads to it.
    """
    return [min(latest[taker] for taker in copy.takers) if before[copy.maker] else 0 for copy in copies]


def _last_rounds(
    copies: Sequence[Copy], rounds: Sequence[int], latest: Mapping[str, int], nodes: Mapping[str, Any], order: Sequence[str]
) -> dict[str, int]:
    """Returns the last round of a message that each node may wait for.

    The round comes before those of all copies that the node leads to. Otherwise, a message could wait for itself.
    """
    last = dict(latest)
    for copy, number in zip(copies, rounds, strict=True):
        last[copy.maker] = min(last[copy.maker], number - 1)
    for name in reversed(order):
        for source in map(source_of, nodes[name].input):
            if source in last:
                last[source] = min(last[source], last[name])
    return last


def _messages(
    copies: Sequence[Copy],
    rounds: Sequence[int],
    last: Mapping[str, int],
    types: Mapping[str, tf.TensorSpec],
    together: Sequence[str],
) -> Iterator[tuple[int, list[Copy]]]:
    """Yields the copies that share a message, with their round: two or more at a time, or one for a collective.

    Where each device of a collective has tensors for all others, these have messages of their own.
    """
    for_all = _for_all(copies, rounds, types, together)
    groups: dict[Any, list[Copy]] = defaultdict(list)
    loads: dict[Any, int] = defaultdict(int)
    for copy, number in zip(copies, rounds, strict=True):
        is_for_all = (number, copy.tensor) in for_all
        groups[number, copy.source, copy.destination, sent_as(types[copy.tensor].dtype), is_for_all].append(copy)
        for end in (("from", copy.source), ("to", copy.destination)):
            loads[number, end] += bytes_of(types[copy.tensor])
    full = max(_LEAST_BYTES, max(loads.values(), default=0) / _FULL_MESSAGES)
    for (number, *_), group in groups.items():
        message: list[Copy] = []
        size = 0
        for copy in group:
            # These leave by themselves: packing would make takers wait for what they lead to, or copy large tensors once more.
            if any(number > last[taker] for taker in copy.takers):
                continue
            if bytes_of(types[copy.tensor]) >= full:
                if together:
                    yield number, [copy]
                continue
            message.append(copy)
            size += bytes_of(types[copy.tensor])
            if size >= full:
                yield number, message
                message, size = [], 0
        if len(message) > 1 or (message and together):
            yield number, message


def _for_all(
    copies: Sequence[Copy], rounds: Sequence[int], types: Mapping[str, tf.TensorSpec], together: Sequence[str]
) -> set[tuple[int, str]]:
    """Returns the tensors that all other devices of a collective get in one round, where each of these has one, by round."""
    receivers = Counter((number, copy.tensor) for copy, number in zip(copies, rounds, strict=True))
    found: dict[Any, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for copy, number in zip(copies, rounds, strict=True):
        if receivers[number, copy.tensor] == len(together) - 1:
            found[number, sent_as(types[copy.tensor].dtype)][copy.source].append((number, copy.tensor))
    return {
        one for of_sources in found.values() if of_sources.keys() == {*together} for ones in of_sources.values() for one in ones
    }


def _send(
    written: GraphWriter, number: int, copies: Sequence[Copy], names: Mapping[str, str], types: Mapping[str, tf.TensorSpec]
) -> Message:
    """Sends tensors in one message. The same tensors for several devices are joined once."""
    source, destination = copies[0].source, copies[0].destination
    tensors = [copy.tensor for copy in copies]
    layout = Layout(tuple(types[tensor] for tensor in tensors))
    join = partial(layout.join, written, [names[tensor] for tensor in tensors], source)
    node = written.once(("message", source, *tensors), join)
    received = [written.inside(tensor)[0] for tensor in layout.split(written, node, destination)]
    return Message(node, number, layout, source, tensors, destination, received)


def _join_controls(written: GraphWriter, crossings: Crossings) -> None:
    """Makes a node wait for at most one node of each other device.

    The one node waits for what its takers have waited for before, so that no node waits for more than before.
    """
    for node in list(written.function.node_def):
        here, elsewhere = crossings.device(node.name), defaultdict(list)
        for name in node.input:
            there = crossings.device(source_of(name))
            if name.startswith("^") and there and here and there != here:
                elsewhere[there].append(name)
        for there, names in elsewhere.items():
            if len(names) > 1:
                joined = written.once(("joined", *names), partial(written.add, "NoOp", names, there, "packed/joined"))
                set_inputs(node, [*(name for name in node.input if name not in names), f"^{joined}"])


def _begin_after(sent: str, users: Iterable[Any]) -> None:
    """Makes the tower on the device of a message begin after the message is sent, since all other towers wait for it.

    A GPU runs its operations in the order in which it is given them, and sends a message after those before it.

    Args:
        sent: the node of the message.
        users: the nodes of the tower that take tensors of the message on the device that makes them.
    """
    for user in {user.name: user for user in users}.values():
        if f"^{sent}" not in user.input and not (user.op in FUSED_ON_CPUS and "CPU" in user.device):
            user.input.append(f"^{sent}")
