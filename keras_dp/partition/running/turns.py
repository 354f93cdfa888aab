"""Let the towers of one device compute in turns, so that the activations of one tower at a time are in memory.

Towers meet where one needs what others have computed, such as the moments of a global batch. So each node has a stage, which
rises wherever an edge enters a tower. At each stage, a tower begins when the tower before it on its device has ended:

    stage 1   tower 0 [forward, backward, gradients]   tower 1 [forward, backward, gradients added to those of tower 0]

    stage 1   tower 0 [up to the moments of batch normalization]   tower 1 [the same]
    stage 2   tower 0 [normalize, ...]                             tower 1 [normalize, ...]

In the first case, tower 0 has freed its activations when tower 1 begins. In the second case, they wait for its stage 2.

All nodes have their earliest stages, or all have their latest: those of which a tower keeps less. Statistics that only home
takes can wait for the others, as in the first case. A loss that divides by the number of all masked rows needs little of other
towers before the whole step begins.

No node waits for itself. Order all nodes by their stage; then those of towers before those of none; then by the tower. Along
each edge, this order stays or rises: an edge into a tower raises the stage, unless it comes from an earlier tower of the same
device. It stays only within one tower and stage, and among nodes without a tower. So a cycle would lie within these. Turns add
no edge there: they lead from one tower to a later one of the same device and stage.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running.compilation import known_from_shapes
from keras_dp.partition.running.functions import conditional_nodes, dtypes_of
from keras_dp.partition.running.packing import FUSED_ON_CPUS
from keras_dp.partition.tracing.graph import Graph, set_inputs


def take_turns(written: GraphWriter, devices: Sequence[str], bytes_of: Callable[[str], float]) -> None:
    """Makes each tower wait for the tower before it on its device, at each stage.

    Constants, what follows from shapes, and what all towers share, such as values of variables, wait for nothing.

    Args:
        written: the graph, with the signature of its function.
        devices: the devices of the N towers.
        bytes_of: returns the bytes of the rows that a node of a tower makes.
    """
    graph = Graph(written.function.node_def)
    towers = _with_what_one_takes(graph, written.towers)
    stages, _ = _stages_with_kept_bytes(graph, towers, devices, bytes_of)
    # Each program of XLA has copies of these, which wait for nothing.
    known = known_from_shapes(graph, lambda node: True)
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name in graph.order:
        if name in towers and name not in known:
            groups[towers[name], stages[name]].append(name)
    # A node that does not run in this step would keep those from running that wait for it.
    skipped = {name for name in conditional_nodes(graph) if graph.nodes[name].op != "Switch"}
    dtypes = dtypes_of(written.function)
    ends: dict[tuple[str, int], list[str]] = {}
    for (tower, stage), names in sorted(groups.items()):
        before, own, surely = ends.get((devices[tower], stage)), {*names}, {*names} - skipped
        if before:
            turn = written.add("NoOp", [f"^{name}" for name in before], devices[tower], "turn", tower)
            for name in names:
                if own.isdisjoint(graph.sources[name]):
                    _begin_after(turn, graph.nodes[name], tower, written, dtypes)
        last = [name for name in names if name in surely and surely.isdisjoint(graph.takers[name])]
        if last:
            ends[devices[tower], stage] = last


def kept_bytes(written: GraphWriter, devices: Sequence[str], bytes_of: Callable[[str], float]) -> float:
    """Returns the bytes of rows that a tower keeps from one stage for later ones. The arguments are those of `take_turns`."""
    graph = Graph(written.function.node_def)
    return _stages_with_kept_bytes(graph, _with_what_one_takes(graph, written.towers), devices, bytes_of)[1]


def _stages_with_kept_bytes(
    graph: Graph, towers: Mapping[str, int], devices: Sequence[str], bytes_of: Callable[[str], float]
) -> tuple[dict[str, int], float]:
    """Returns the stage of each node, and the bytes of rows that the first tower keeps from one stage for later ones."""

    def enters(source: str, name: str) -> bool:
        tower, other = towers.get(name), towers.get(source)
        if tower is None or other == tower:
            return False
        return other is None or other > tower or devices[other] != devices[tower]

    earliest: dict[str, int] = {}
    for name in graph.order:
        before = (earliest[source] + enters(source, name) for source in graph.sources[name])
        earliest[name] = max(before, default=int(name in towers))
    last = max(earliest.values(), default=0)
    latest: dict[str, int] = {}
    for name in reversed(graph.order):
        latest[name] = min((latest[taker] - enters(name, taker) for taker in graph.takers[name]), default=last)

    def kept(stages: Mapping[str, int]) -> float:
        of_first = dict.fromkeys(name for name, tower in towers.items() if tower == 0)
        return sum(
            bytes_of(name)
            for name in of_first
            if any(taker in of_first and stages[taker] > stages[name] for taker in graph.takers[name])
        )

    return min(((stages, kept(stages)) for stages in (earliest, latest)), key=lambda found: found[1])


def _with_what_one_takes(graph: Graph, towers: Mapping[str, int]) -> dict[str, int]:
    """Returns the towers of nodes, with that of each node without a tower which one tower alone takes.

    Such nodes are its lookups in a table elsewhere, or count its rows on the host.
    """
    found = dict(towers)
    for name in reversed(graph.order):
        takers = {found.get(taker) for taker in graph.takers[name]}
        if name not in found and len(takers) == 1 and graph.nodes[name].op != "Const":
            (tower,) = takers
            if tower is not None:
                found[name] = tower
    return found


def _begin_after(turn: str, node: Any, tower: int, written: GraphWriter, dtypes: Mapping[str, tf.DType]) -> None:
    """Makes a node wait for a turn, or its input where it cannot wait itself."""
    if not (node.op in FUSED_ON_CPUS and "CPU" in node.device):
        node.input.append(f"^{turn}")
        return
    tensor = node.input[0]

    def written_gate() -> str:
        # The graph optimizer takes an Identity out, and makes its takers wait in its place.
        name = written.unique(f"tower_{tower}/begins")
        gate = written.function.node_def.add(op="StopGradient", name=name, device=node.device, input=[tensor, f"^{turn}"])
        gate.attr["T"].type = dtypes[tensor].as_datatype_enum
        written.towers[name] = tower
        return f"{name}:output:0"

    gate = written.once(("begins", tensor, turn), written_gate)
    set_inputs(node, [gate, *node.input[1:]])
