"""Follow the nodes of a graph, forward and backward."""

import collections
import functools
import graphlib
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from keras_dp.partition.tracing.names import source_of

_Thing = TypeVar("_Thing", bound=Hashable)


class Graph:
    """Holds the nodes of a graph by name, and follows them from their sources to their takers, and back.

    Args:
        nodes: NodeDefs. Of what they take and wait for, only nodes among them count.
        met: by node, the names of others that it waits for although no edge says so, as a collective does.

    Attributes:
        nodes: the NodeDefs by name.
    """

    def __init__(self, nodes: Iterable[Any], met: Mapping[str, Sequence[str]] = MappingProxyType({})):
        self.nodes = {node.name: node for node in nodes}
        self._met = met

    @functools.cached_property
    def sources(self) -> dict[str, list[str]]:
        """For each node, the names of the nodes that it takes tensors of, or waits for, in the order of all nodes."""
        # Names may differ between workers if one has made layers that others have not: positions do not.
        places = {name: i for i, name in enumerate(self.nodes)}
        return {
            name: sorted({*map(source_of, node.input), *self._met.get(name, ())} & places.keys(), key=places.__getitem__)
            for name, node in self.nodes.items()
        }

    @functools.cached_property
    def takers(self) -> Mapping[str, list[str]]:
        """For each node, the names of the nodes that take its tensors, or wait for it."""
        return takers_of(self.sources)

    @functools.cached_property
    def order(self) -> list[str]:
        """The names of the nodes, each after its sources."""
        order: list[str] = []
        seen: set[str] = set()
        for root in self.nodes:
            path = [] if root in seen else [(root, iter(self.sources[root]))]
            seen.add(root)
            while path:
                source = next((source for source in path[-1][1] if source not in seen), None)
                if source is None:
                    order.append(path.pop()[0])
                else:
                    seen.add(source)
                    path.append((source, iter(self.sources[source])))
        return order

    @property
    def cycle(self) -> list[str]:
        """The names of nodes that wait for each other in a cycle; empty if there are none."""
        try:
            graphlib.TopologicalSorter(self.sources).prepare()
        except graphlib.CycleError as error:
            return list(error.args[1])
        return []

    def before(self, names: Iterable[str]) -> KeysView[str]:
        """Returns some nodes and all nodes that they depend on."""
        return reached(filter(self.nodes.__contains__, names), self.sources.__getitem__)

    def in_order(self) -> list[Any]:
        """Returns the NodeDefs, each after its sources."""
        return [self.nodes[name] for name in self.order]

    def within(self, names: Iterable[str]) -> "Graph":
        """Returns the graph of some nodes and all nodes that they depend on."""
        needed = self.before(names)
        return Graph(node for name, node in self.nodes.items() if name in needed)

    def after(self, names: Iterable[str], where: Callable[[str], bool] = lambda name: True) -> KeysView[str]:
        """Returns some nodes and all nodes that depend on them, on paths of nodes for which a condition holds."""
        return reached(names, lambda name: filter(where, self.takers[name]))


def reached(begins: Iterable[_Thing], following: Callable[[_Thing], Iterable[_Thing]]) -> KeysView[_Thing]:
    """Returns some things and all that follow from them, directly or indirectly, in an order that is always the same.

    Args:
        begins: the things.
        following: returns those that follow from a thing directly.
    """
    found: dict[_Thing, None] = {}
    waiting = list(begins)
    while waiting:
        thing = waiting.pop()
        if thing not in found:
            found[thing] = None
            waiting += following(thing)
    return found.keys()


def takers_of(sources: Mapping[str, Iterable[_Thing]]) -> Mapping[_Thing, list[str]]:
    """Returns for each source the names of the nodes that take it, from the sources of each node."""
    takers: dict[_Thing, list[str]] = collections.defaultdict(list)
    for name, taken in sources.items():
        for source in dict.fromkeys(taken):
            takers[source].append(name)
    return takers


def set_inputs(node: Any, names: Iterable[str]) -> None:
    """Gives a NodeDef other inputs."""
    names = list(names)
    del node.input[:]
    node.input.extend(names)
