"""Exchange messages that all towers send each other by collectives, in place of copies.

Where each of N devices sends each other one a message of one round, one operation on each device does what N (N - 1) copies do:

    all-gather:  each device gives its message, and gets those of all: of moments, and of weights that are spread
    all-to-all:  each device gives a message for each other one, and gets theirs: of gradients of weights that are spread

The messages are padded to the longest one, since all members of a collective give as much. They are only moved. What adds them
stays as it is, so that the results have the same bits as with copies.

A collective ends when all its members have begun. So each of them runs in each step: it is an effect of the function, and
takes no tensor that is made in some steps only. No two collectives wait for each other: members of a collective take messages
of one round, and lead to later rounds alone. That is checked with the packed function, for which `GraphWriter.met` tells what
no edge does.

Collectives of one round have no order. TensorFlow starts each one on all devices of the process at once, under one lock, when
its last member has begun (nccl_manager.cc, RunCollective). So all GPUs run them in one order, which is all that NCCL wants.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running.crossings import local_name
from keras_dp.partition.running.functions import remove_unneeded, replace_tensors
from keras_dp.partition.running.groups import by_rank, keys_of_collective
from keras_dp.partition.running.messages import Message, as_dtype
from keras_dp.partition.tracing.graph import set_inputs
from keras_dp.partition.tracing.names import data_inputs, source_of

# NCCL moves these numbers, of the dtypes in which messages hold them. It knows no bfloat16, whose bits travel as others of two
# bytes.
_MOVED_AS = {dtype: dtype for dtype in (tf.float16, tf.float32, tf.float64)} | {tf.bfloat16: tf.float16}
_MOST_PADDING = 2  # times the bytes of the messages; copies send no more than these

PREFIX = "together/"  # of the names of nodes that exchange messages

Pair: TypeAlias = tuple[str, str]  # of the device that sends, and the one that receives


def exchange_together(written: GraphWriter, messages: Sequence[Message], devices: Sequence[str]) -> None:
    """Exchanges messages by collectives, where each device sends each other one a message.

    Args:
        written: the graph, with the messages.
        messages: the messages.
        devices: the devices of the towers. Messages from and to others stay copies.
    """
    meetings = list(_meetings(messages, devices))
    if not meetings:
        return
    ranked = by_rank(tuple(devices))
    takers: dict[Pair, list[Any]] = defaultdict(list)
    for node in written.function.node_def:
        for tensor in data_inputs(node):
            takers[tensor, local_name(node.device)].append(node)
    stacks: dict[str, str] = {}
    for meeting in meetings:
        collective = _Collective(written, meeting, ranked)
        for source, device in meeting:
            sent = written.inside(meeting[source, device].node)[0]
            for taker in takers[sent, device]:
                if collective.is_stack(taker):
                    stacks[f"{taker.name}:output:0"] = written.inside(collective.stack(device))[0]
                else:
                    received = written.inside(collective.received(source, device))[0]
                    set_inputs(taker, [received if name == sent else name for name in taker.input])
    replace_tensors(written.function, stacks)
    remove_unneeded(written.function, set(map(source_of, stacks)))


def _meetings(messages: Sequence[Message], devices: Sequence[str]) -> Iterator[Mapping[Pair, Message]]:
    """Yields messages that one collective can exchange, by their source and destination.

    A message for all goes with such messages of others, and a message for one device with such of all pairs. The largest go
    together, so that little is padded.
    """
    pairs = list(itertools.permutations(devices, 2))
    messages = [message for message in messages if (message.source, message.destination) in pairs]
    receivers = Counter(message.node for message in messages)
    groups: dict[Any, dict[Pair, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for message in messages:
        is_for_all = receivers[message.node] == len(devices) - 1
        groups[message.number, message.layout.dtype, is_for_all][message.source, message.destination].append(message)
    for (_, dtype, _), of_pairs in groups.items():
        largest_first = [sorted(of_pairs[pair], key=lambda message: -message.layout.size) for pair in pairs]
        for members in zip(*largest_first, strict=False):
            sizes = [message.layout.size for message in members]
            if dtype in _MOVED_AS and 0 < max(sizes) * len(sizes) <= _MOST_PADDING * sum(sizes):
                yield dict(zip(pairs, members, strict=True))


class _Collective:
    """Writes a collective, and takes its results apart.

    Args:
        written: the graph.
        meeting: the messages that it exchanges.
        ranked: the devices in the order of their ranks.
    """

    def __init__(self, written: GraphWriter, meeting: Mapping[Pair, Message], ranked: Sequence[str]):
        self._written, self._meeting, self._ranked = written, meeting, ranked
        self._of = {source: message for (source, _), message in meeting.items()}
        self._is_gather = len({message.node for message in meeting.values()}) == len(ranked)
        self._sizes = {message.layout.size for message in meeting.values()}
        self._longest = max(self._sizes)
        self._dtype = self._of[ranked[0]].layout.dtype
        operation, moved = f"Collective{'Gather' if self._is_gather else 'AllToAll'}V2", _MOVED_AS[self._dtype]
        given = {device: as_dtype(written, self._given(device), self._dtype, moved, device) for device in ranked}
        keys, function = keys_of_collective(ranked), written.function
        self._results: dict[str, str] = {}
        for device in ranked:
            inputs = [given[device], *(written.constant(key, device=device) for key in keys)]
            node = written.add(operation, inputs, device, f"{PREFIX}{operation}", T=moved, communication_hint="nccl")
            written.met[node] = [source_of(other) for other in given.values()]
            function.control_ret[node] = node
            function.signature.control_output.append(node)
            self._results[device] = self._reshaped(as_dtype(written, node, moved, self._dtype, device), [-1], device)

    def _given(self, device: str) -> str:
        """Returns what a device gives: its message, or one for each device, by their ranks. It takes none from itself."""
        if self._is_gather:
            return self._padded(self._of[device], device)
        rows = [self._padded(self._meeting.get((device, other), self._of[device]), device) for other in self._ranked]
        return self._written.add("Pack", rows, device, f"{PREFIX}rows", N=len(rows), T=self._dtype, axis=0)

    def _padded(self, message: Message, device: str) -> str:
        """Returns a message as a vector of the length of the longest one."""
        vector, missing = self._reshaped(message.node, [-1], device), self._longest - message.layout.size
        inputs = [vector, self._written.constant([[0, missing]], device=device)]
        types = {"T": self._dtype, "Tpaddings": tf.int32}
        return self._written.add("Pad", inputs, device, f"{PREFIX}padded", **types) if missing else vector

    def received(self, source: str, device: str) -> str:
        """Returns the message that a device has from another one."""
        layout = self._meeting[source, device].layout
        begin = self._ranked.index(source) * self._longest
        inputs = [self._results[device], *(self._written.constant([number], device=device) for number in (begin, layout.size))]
        cut = partial(self._written.add, "Slice", inputs, device, f"{PREFIX}received", T=self._dtype, Index=tf.int32)
        return self._reshaped(self._written.once((self._results[device], source), cut), layout.shape, device)

    def is_stack(self, node: Any) -> bool:
        """Returns whether a node stacks the messages of all devices as the collective does."""
        in_order = [self._written.inside(self._of[device].node)[0] for device in self._ranked]
        return self._is_gather and len(self._sizes) == 1 and node.op == "Pack" and data_inputs(node) == in_order

    def stack(self, device: str) -> str:
        """Returns the stack of the messages of all devices."""
        return self._reshaped(self._results[device], [len(self._ranked), *self._of[device].layout.shape], device)

    def _reshaped(self, tensor: str, shape: Sequence[int], device: str) -> str:
        inputs = [tensor, self._written.constant(shape, device=device)]
        reshape = partial(self._written.add, "Reshape", inputs, device, f"{PREFIX}reshape", T=self._dtype, Tshape=tf.int32)
        return str(self._written.once((tensor, *shape, device), reshape))
