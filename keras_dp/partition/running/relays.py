"""Let each tower combine small parts of sums by itself, in place of waiting for home to do so.

A sum of the towers' parts takes two hops: the parts go home, and the sum goes to the towers. On GPUs, each hop waits for a copy
to be launched and to end, however small it is. Where the parts are small, they go from each tower to all others, and each tower
does what home would do with them: one hop.

For the moments of a batch normalization on two towers, with home on GPU 0:

    two hops: GPU 1 [parts] -> GPU 0, which combines them; GPU 0 [scale, offset] -> GPU 1
    one hop:  GPU 1 [parts] -> GPU 0 and GPU 0 [parts] -> GPU 1, each of which combines them

A *relay* is a tensor that home computes from parts by few operations, and that a tower takes. These operations are copied to
the tower. All towers add in the same order, with the kernels of TensorFlow, also where XLA compiles what follows, so that all
of them have the same bits. Home keeps those of the operations whose results it needs, such as moving averages.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.operations import READS
from keras_dp.partition.placing.rules.elementwise import BINARY, UNARY
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.running.crossings import Crossings
from keras_dp.partition.running.functions import bytes_of, conditional_nodes, remove_unneeded, replace_tensors
from keras_dp.partition.tensorflow_internals import is_stateful, results_of
from keras_dp.partition.tracing.graph import Graph, set_inputs
from keras_dp.partition.tracing.names import control_inputs, data_inputs, source_of

# A tower takes at most so many bytes for a relay: a link of 25 GB/s (PCIe 4.0 x16) sends them in the 15 µs that a hop takes.
# See `gpu_model.hardware` for both. With eight towers, a part may have 47 kB.
_MOST_BYTES = 375_000
# Forward, the scale and the offset of a batch normalization take 16 operations; backward, its gradients take 13.
_MOST_OPERATIONS = 32

# Their results depend on their inputs alone, on each device in the same way: kernels of GPUs for sums by index, say, add in
# any order.
_COPIED = frozenset(
    [
        *UNARY,
        *BINARY,
        *types(
            """
            AddN All Any Betainc BroadcastTo ClipByValue ConcatV2 Const ExpandDims Fill IdentityN L2Loss Max Mean Min Pack Prod
            Range Reshape Select SelectV2 Slice Snapshot Split SplitV Squeeze StridedSlice Sum Tile Transpose Unpack
            """
        ),
    ]
)
_NO_NUMBERS = (tf.string, tf.resource, tf.variant)


def combine_on_towers(written: GraphWriter, types: dict[str, tf.TensorSpec], variable_devices: Mapping[str, str]) -> None:
    """Copies the operations of relays to the towers that take them.

    The copies are operations of their towers. So are the originals on a tower's own device, of which that tower needs no copy.

    Args:
        written: the graph, with the signature of its function.
        types: the types of its tensors, as `types_of` returns them. Gets those of the copies.
        variable_devices: the devices of variables, by the names that nodes use, as far as they are known.
    """
    devices = {argument: variable_devices[name] for name, argument in written.given.items() if name in variable_devices}
    _Relays(written, types, devices).replace()


class _Relays:
    """Finds relays, and replaces them.

    Args:
        written: the graph.
        types: the types of its tensors.
        variable_devices: the devices of variables, by the function's arguments.
    """

    def __init__(self, written: GraphWriter, types: dict[str, tf.TensorSpec], variable_devices: Mapping[str, str]):
        self._written, self._types = written, types
        graph = Graph(written.function.node_def)
        self._nodes, self._order = graph.nodes, graph.order
        self._towers = dict(written.towers)
        self._crossings = Crossings(written.function, variable_devices)
        self._conditional = conditional_nodes(graph)
        # The nodes at home that wait for towers.
        self._waiting = graph.after(self._towers, lambda name: name not in self._towers) - self._towers.keys()
        self._relayed: set[str] = set()  # nodes at home: all that relays are computed by
        self._leaves: set[str] = set()  # the tensors that relays are computed from
        self._known: dict[str, int] = {}  # nodes that compute from constants alone, and the lengths of the chains to them
        self._near: dict[tuple[str, str], bool] = {}
        self._instances: dict[tuple[str, str, int], str] = {}

    def replace(self) -> None:
        """Gives towers what they need to compute relays, and removes the nodes at home that nothing needs any more."""
        taken = {
            name: {source for source in map(source_of, data_inputs(self._nodes[name])) if source in self._waiting}
            for name in self._order
            if name in self._towers
        }
        wanted = set().union(*taken.values())
        if not wanted:
            return
        self._find_known()
        for name in self._order:
            if name in wanted:
                self._judge(name)
        self._add_in_order()
        for taker, sources in taken.items():
            if not self._relayed.isdisjoint(sources):
                node = self._nodes[taker]
                set_inputs(node, [self._on_tower(tensor, node.device, self._towers[taker]) for tensor in node.input])
        remove_unneeded(self._written.function, self._relayed)

    def _find_known(self) -> None:
        """Finds the nodes that compute from constants alone, by few operations. Each device has its own copy of them."""
        for name in self._order:
            node = self._nodes[name]
            sources = set(map(source_of, node.input))
            if name not in self._towers and sources <= self._known.keys() and self._can_be_copied(node):
                length = 1 + max((self._known[source] for source in sources), default=0)
                if length <= _MOST_OPERATIONS:
                    self._known[name] = length

    def _judge(self, end: str) -> None:
        """Notes the nodes of a relay, if all can be copied, and if towers get it sooner from few bytes."""
        nodes, leaves = {end}, set()
        is_sent_home, to_visit = False, [end]
        while to_visit:
            name = to_visit.pop()
            node = self._nodes[name]
            if name in self._relayed:
                is_sent_home = True
                continue
            if not self._can_be_copied(node) or len(nodes) > _MOST_OPERATIONS:
                return
            for tensor in data_inputs(node):
                source = source_of(tensor)
                if source in self._waiting:
                    to_visit += {source} - nodes
                    nodes.add(source)
                elif source not in self._known:
                    leaves.add(tensor)
                    is_sent_home |= source in self._towers and self._device(source) != self._device(name)
        more = leaves - self._leaves
        if is_sent_home and all(map(self._can_be_sent, more)) and self._bytes(more) <= _MOST_BYTES:
            self._relayed |= nodes
            self._leaves |= leaves

    def _add_in_order(self) -> None:
        """Makes relays add in the order of their addends.

        AddN begins with any addend whose memory it can reuse at that moment, so that towers would round otherwise.
        """
        renamed = {}
        for name in sorted(self._relayed):
            node = self._nodes[name]
            if node.op == "AddN" and node.attr["N"].i > 2 and not tf.as_dtype(node.attr["T"].type).is_integer:
                stacked, axis = self._written.sum_of_stack(node)
                self._nodes |= {made.name: made for made in (stacked, axis)}
                self._relayed.add(stacked.name)
                self._known[axis.name] = 1
                renamed[f"{name}:sum:0"] = f"{name}:output:0"
        if renamed:
            replace_tensors(self._written.function, renamed)
            self._types |= {new: self._types[old] for old, new in renamed.items() if old in self._types}

    def _device(self, name: str) -> str:
        return self._crossings.device(name)

    def _can_be_copied(self, node: Any) -> bool:
        """Returns whether an operation gives the same small numbers wherever it runs."""
        tensors = [f"{node.name}:{result}" for result, _ in results_of(node)]
        return (
            node.op in _COPIED
            and node.name not in self._conditional
            and not any(map(self._has_effects, control_inputs(node)))
            and not any(dtype in _NO_NUMBERS for _, dtype in results_of(node))
            and self._bytes(tensors) <= _MOST_BYTES
        )

    def _bytes(self, tensors: Iterable[str]) -> int:
        return sum(bytes_of(self._types[tensor]) for tensor in tensors if tensor in self._types)

    def _has_effects(self, name: str) -> bool:
        node = self._nodes[name]
        return node.op == "NoOp" or (node.op not in READS and is_stateful(node.op))

    def _can_be_sent(self, tensor: str) -> bool:
        """Returns whether a tensor of a known size is there in each step."""
        return tensor in self._types and source_of(tensor) not in self._conditional

    def _on_tower(self, tensor: str, device: str, tower: int) -> str:
        """Returns a tensor as a node of a tower takes it: a relay is computed by the tower."""
        source = source_of(tensor)
        if source not in self._relayed and source not in self._known:
            return tensor
        return tensor if tensor.startswith("^") else self._instance(source, device, tower) + tensor.removeprefix(source)

    def _instance(self, name: str, device: str, tower: int) -> str:
        """Returns the node that computes a node's results for a tower: a copy, or the node, if it is on the tower's device."""
        key = name, device, tower
        if key not in self._instances:
            node = self._nodes[name]
            if self._is_near(name, device):
                self._instances[key] = name
                if name in self._relayed:
                    self._written.towers.setdefault(name, tower)
                for tensor in data_inputs(node):
                    self._on_tower(tensor, device, tower)
            else:
                inputs = [self._on_tower(tensor, device, tower) for tensor in data_inputs(node)]
                copy = self._instances[key] = self._written.copy_to_tower(node, device, tower, inputs)
                results = [(f"{copy}:{result}", f"{name}:{result}") for result, _ in results_of(node)]
                self._types |= {new: self._types[old] for new, old in results if old in self._types}
        return self._instances[key]

    def _is_near(self, name: str, device: str) -> bool:
        """Returns whether a node and all that it needs from home, but leaves, are on a tower's device."""
        key = name, device
        if key not in self._near:
            node = self._nodes[name]
            sources = map(source_of, data_inputs(node))
            self._near[key] = node.device == device and all(
                self._is_near(source, device) for source in sources if source in self._relayed or source in self._known
            )
        return self._near[key]
