"""Outline nodes as functions that XLA must compile, each of them one program.

Nodes of one owner may share a program if no path leads from the program out and back. So each node has a level: how many
programs of other nodes have to come before it. A step from one owner to another counts, and so does one from a node without
an owner to a node with one. The nodes of one owner and level share a program:

    level 1   tower_0 [convolution, sums]   tower_1 [convolution, sums]     up to the moments of batch normalization
              the towers' sums meet
    level 2   tower_0 [normalize, ...]      tower_1 [normalize, ...]        ... and back again
    last      update [momentum, weights]

Along each edge, the level stays or rises, and it rises wherever an edge enters a program. So programs never wait for each
other in a cycle.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.operations import LOOPS, SHAPES_AND_RANK
from keras_dp.partition.running.crossings import local_name
from keras_dp.partition.running.functions import dtypes_of, replace_tensors
from keras_dp.partition.tensorflow_internals import is_stateful, on_host, unused_function_name
from keras_dp.partition.tracing.graph import Graph, reached, set_inputs
from keras_dp.partition.tracing.names import control_inputs, data_inputs, source_of

# These do nothing that is worth a program.
_FREE = ("Const", "Identity", "IdentityN", "NoOp", "StopGradient", "PreventGradient", *SHAPES_AND_RANK)
_LEAST_NODES = 2


@dataclasses.dataclass(frozen=True)
class Owner:
    """Names the nodes that may share a program.

    Attributes:
        device: their device.
        tower: the number of their tower; None for the update at a home, which no tower waits for.
    """

    device: str
    tower: int | None = None

    @property
    def is_update(self) -> bool:
        """Whether no tower waits for the nodes."""
        return self.tower is None

    @property
    def name(self) -> str:
        """The first part of the names of the programs."""
        return "update" if self.tower is None else f"tower_{self.tower}"


class Group(NamedTuple):
    """Nodes that share a program.

    Attributes:
        owner: their owner.
        names: their names, in topological order.
        sent: nodes that other devices take tensors of, and that the program waits for: see `_sent_before`.
    """

    owner: Owner
    names: list[str]
    sent: list[str]


def write_programs(written: GraphWriter, owners: Mapping[str, Owner], known: Set[str]) -> list[Any]:
    """Moves nodes into functions that XLA must compile, and calls these in their place.

    Args:
        written: the graph, with the signature of its function.
        owners: the owners of the nodes that may be moved.
        known: the nodes that each function may have copies of; see `groups_of`.

    Returns:
        The FunctionDefs.
    """
    graph = written.graph
    dtypes = dtypes_of(written.function)
    programs = [_Program(graph, known, dtypes, group) for group in groups_of(graph, owners, known, dtypes)]
    _call(written, programs)
    return [program.definition for program in programs]


def groups_of(graph: Graph, owners: Mapping[str, Owner], known: Set[str], dtypes: Mapping[str, tf.DType]) -> list[Group]:
    """Returns the nodes that share a program: those of one owner and level.

    Args:
        graph: the nodes.
        owners: the owners of the nodes that may share a program.
        known: the nodes that XLA knows the values of wherever it compiles them: constants, and integers that follow from the
            shapes of the step's arguments. They belong to no program.
        dtypes: the dtypes of the tensors that nodes take.
    """
    owners = {name: owner for name, owner in owners.items() if name not in known}
    while True:
        levels = _levels(graph, owners)
        place = {name: (owner, levels[name]) for name, owner in owners.items()}
        outside = {*_with_constants_outside(graph, place, known, dtypes), *_joining_programs(graph, owners)}
        if not outside:
            break
        owners = {name: owner for name, owner in owners.items() if name not in outside}
    groups: dict[tuple[Owner, int], list[str]] = defaultdict(list)
    for name in graph.order:
        if name in place:
            groups[place[name]].append(name)

    def is_worth_it(names: Iterable[str]) -> bool:
        return sum(graph.nodes[name].op not in _FREE for name in names) >= _LEAST_NODES

    sent = _sent_before(graph, levels, groups)
    return [Group(key[0], names, sent.get(key, [])) for key, names in groups.items() if is_worth_it(names)]


def _sent_before(
    graph: Graph, levels: Mapping[str, int], groups: Mapping[tuple[Owner, int], Sequence[str]]
) -> dict[tuple[Owner, int], list[str]]:
    """Returns, for each program of a tower, the nodes of lower levels on its device that other devices take tensors of.

    A copy waits for all that its GPU was given before it (gpu_util.cc, DeviceToDeviceCopy). Behind a program of a tower's whole
    step, the rows of a table would leave for the other towers when that step ends. So each program waits for the nodes that
    the tower's program before it did not wait for.
    """
    inside = {name for names in groups.values() for name in names}
    sent: dict[str, list[str]] = defaultdict(list)
    for name in graph.order:
        device = local_name(graph.nodes[name].device)
        if name not in inside and device and any(local_name(graph.nodes[one].device) != device for one in graph.takers[name]):
            sent[device].append(name)
    first: dict[tuple[Owner, int], list[str]] = {}
    below: dict[Owner, int] = defaultdict(int)
    for owner, level in sorted(groups, key=lambda key: key[1]):
        if not owner.is_update:
            first[owner, level] = [name for name in sent[owner.device] if below[owner] <= levels[name] < level]
            below[owner] = level
    return first


def _levels(graph: Graph, owners: Mapping[str, Owner]) -> dict[str, int]:
    """Returns the level of each node: the earliest one for towers and all that they wait for, the latest one for updates.

    A node of a tower that waits for no program, such as one that reads a variable, is in the first one that takes it.
    """

    def is_step(source: str, name: str) -> bool:
        return name in owners and owners.get(source) != owners[name]

    levels: dict[str, int] = {}
    for name in graph.order:
        before = (levels[source] + is_step(source, name) for source in graph.sources[name])
        levels[name] = max(before, default=int(name in owners))
    awaited = graph.before(name for name, owner in owners.items() if not owner.is_update)
    last = max(levels.values(), default=0)
    for name in reversed(graph.order):
        takers = graph.takers[name]
        begins_tower = levels[name] == 1 and takers and all(owners.get(taker) == owners.get(name) for taker in takers)
        if name not in awaited or begins_tower:
            levels[name] = min((levels[taker] - is_step(name, taker) for taker in takers), default=last)
    return levels


def _with_constants_outside(
    graph: Graph, place: Mapping[str, tuple[Owner, int]], known: Set[str], dtypes: Mapping[str, tf.DType]
) -> Iterable[str]:
    """Yields the nodes that need the value of a tensor from outside of their program while XLA compiles it.

    A GPU would have to send it to the host, and XLA compile the program for each value.
    """

    def behind(name: str, key: tuple[Owner, int]) -> list[str]:
        if place.get(name) != key or graph.nodes[name].op in SHAPES_AND_RANK:
            return []
        return list(map(source_of, data_inputs(graph.nodes[name])))

    def is_outside(name: str, key: tuple[Owner, int]) -> bool:
        return name not in known and (place.get(name) != key or graph.nodes[name].op in LOOPS)

    for name, key in place.items():
        needed = [source_of(tensor) for tensor in on_host(graph.nodes[name]) if dtypes[tensor] != tf.resource]
        found = reached(needed, partial(behind, key=key))
        if any(is_outside(source, key) for source in found):
            yield name


def _joining_programs(graph: Graph, owners: Mapping[str, Owner]) -> Iterable[str]:
    """Yields the nodes without results that nodes of several owners meet in: none of these would have one program."""
    for name, owner in owners.items():
        if graph.nodes[name].op == "NoOp":
            around = {owners[other] for other in (*graph.sources[name], *graph.takers[name]) if other in owners}
            if around - {owner}:
                yield name


class _Program:
    """Writes the function of some nodes.

    Args:
        graph: all nodes.
        known: the names of the nodes that each function may have copies of.
        dtypes: the dtypes of all tensors.
        group: the nodes.

    Attributes:
        definition: the FunctionDef.
        owner: the owner of the nodes.
        names: the names of the nodes.
        given: the tensors that the function is called with.
        awaited: the names of the nodes that the call waits for.
        results: the tensors that nodes outside take, in the order of the function's results.
    """

    def __init__(self, graph: Graph, known: Set[str], dtypes: Mapping[str, tf.DType], group: Group):
        self.owner, self.names = group.owner, frozenset(group.names)
        self._dtypes = dtypes
        copied = reached(
            (source for name in group.names for source in graph.sources[name] if source in known),
            lambda name: (source for source in graph.sources[name] if source in known),
        )
        inside = self.names | copied
        nodes = [graph.nodes[name] for name in (*copied, *group.names)]
        taken = dict.fromkeys(tensor for node in nodes for tensor in data_inputs(node) if source_of(tensor) not in inside)
        # XLA wants variables last.
        self.given = sorted(taken, key=lambda tensor: dtypes[tensor] == tf.resource)
        waiting = (name for node in nodes for name in control_inputs(node) if name not in inside)
        self.awaited = list(dict.fromkeys([*waiting, *group.sent]))
        self.results: list[str] = []
        self.definition = function_pb2.FunctionDef()
        signature = self.definition.signature
        signature.name = unused_function_name("program")
        arguments = {tensor: f"given_{i}" for i, tensor in enumerate(self.given)}
        for tensor, argument in arguments.items():
            signature.input_arg.add(name=argument, type=dtypes[tensor].as_datatype_enum)
        for node in nodes:
            made = self.definition.node_def.add()
            made.CopyFrom(node)
            made.device = ""
            made.attr.pop("_class", None)
            controls = [f"^{name}" for name in control_inputs(node) if name in self.names]
            set_inputs(made, [*(arguments.get(tensor, tensor) for tensor in data_inputs(node)), *controls])
            if is_stateful(node.op):
                signature.is_stateful = True
                signature.control_output.append(node.name)
                self.definition.control_ret[node.name] = node.name

    def give(self, tensor: str) -> None:
        """Makes a tensor a result of the function."""
        name = f"result_{len(self.results)}"
        self.results.append(tensor)
        self.definition.signature.output_arg.add(name=name, type=self._dtypes[tensor].as_datatype_enum)
        self.definition.ret[name] = tensor

    def call(self, written: GraphWriter) -> tuple[Any, dict[str, str]]:
        """Writes a call of the function, and returns it, and the tensors in place of the results."""
        # Of a call without effects, whose results nothing takes, the graph optimizer makes a NoOp, which XLA cannot compile.
        node = written.function.node_def.add(
            op="StatefulPartitionedCall",
            name=written.unique(f"{self.owner.name}/program"),
            device=self.owner.device,
        )
        set_inputs(node, [*self.given, *(f"^{name}" for name in self.awaited)])
        node.attr["f"].func.name = self.definition.signature.name
        for attribute, tensors in (("Tin", self.given), ("Tout", self.results)):
            node.attr[attribute].list.type.extend(self._dtypes[tensor].as_datatype_enum for tensor in tensors)
        node.attr["_XlaMustCompile"].b = True
        return node, {tensor: f"{node.name}:output:{i}" for i, tensor in enumerate(self.results)}


def _call(written: GraphWriter, programs: Sequence[_Program]) -> None:
    """Replaces the nodes of programs by calls of them."""
    function = written.function
    program_of = {name: program for program in programs for name in program.names}
    ends = [*function.ret.values()]
    for node in function.node_def:
        ends += [tensor for tensor in data_inputs(node) if program_of.get(source_of(tensor)) is not program_of.get(node.name)]
    for tensor in dict.fromkeys(ends):
        if source_of(tensor) in program_of:
            program_of[source_of(tensor)].give(tensor)
    staying = function_pb2.FunctionDef(node_def=[node for node in function.node_def if node.name not in program_of])
    del function.node_def[:]
    function.node_def.extend(staying.node_def)
    replaced: dict[str, str] = {}
    for program in programs:
        node, tensors = program.call(written)
        replaced |= tensors
        replaced |= {f"^{name}": f"^{node.name}" for name in program.names}
    replace_tensors(function, replaced)
    for result, name in list(function.control_ret.items()):
        function.control_ret[result] = replaced.get(f"^{name}", f"^{name}")[1:]
