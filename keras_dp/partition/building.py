"""Build the partitioned graph: instances of the traced nodes at home and on towers, and the exchanges between them."""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_dp.partition.graph import Output, control_inputs, data_inputs, name_of, output_of
from keras_dp.partition.node import Node
from keras_dp.partition.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, ListOf, Need, Partial, Replicate, Shard
from keras_dp.partition.propagation import CannotGatherError, Propagation, axes_to_sum
from keras_dp.partition.tensorflow_internals import is_stateful

_SHAPES = ("Shape", "ShapeN", "Size")


@dataclasses.dataclass(frozen=True)
class Feeds:
    """Names of the tensors that the partitioned graph is given.

    Attributes:
        batch_rows: B, int32.
        begins: for each tower the number of its first row, int32.
        rows: for each tower how many rows it computes with, int32: at least one.
        own_rows: for each tower how many of these are its own, int32: none if it has borrowed one.
        is_alive: for each tower whether it has rows of its own, bool.
        whole: for each argument of the step the tensor of the whole batch.
        slices: for each argument that has rows the N slices.
    """

    batch_rows: str
    begins: Sequence[str]
    rows: Sequence[str]
    own_rows: Sequence[str]
    is_alive: Sequence[str]
    whole: Mapping[str, str]
    slices: Mapping[str, Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A meeting of towers.

    Attributes:
        kind: "sum" and other reductions of parts, "gather" of rows, or "cut" of a whole tensor into slices.
        output: the tensor.
    """

    kind: str
    output: Output


class _Kind(enum.Enum):
    """The instances that a traced node may have."""

    FED = "given"
    HOME = "one at home"
    TOWERS = "one on each tower"
    SHAPES = "one on each tower, for its own number of rows"


class Builder:
    """Makes the nodes of the partitioned graph.

    Args:
        propagation: how each node is computed.
        devices: of the N towers.
        home: the device on which whatever happens once is computed.
        feeds: names of the tensors that are given.

    Attributes:
        graph_def: the graph so far.
        exchanges: the meetings of towers in it.
    """

    def __init__(self, propagation: Propagation, devices: Sequence[str], home: str, feeds: Feeds):
        self.propagation = propagation
        self.devices = list(devices)
        self.home = home
        self.feeds = feeds
        self.graph_def = graph_pb2.GraphDef()
        self.exchanges: list[Exchange] = []
        self._made: dict[Any, Any] = {}
        self._names: dict[str, int] = {}

    def build(self, outputs: Iterable[str], effects: Iterable[str]) -> tuple[list[str], list[str]]:
        """Makes all nodes that some outputs and effects of the traced graph need, and no others.

        Args:
            outputs: names of tensors.
            effects: names of nodes.

        Returns:
            How the outputs, of the whole batch, and the effects are called in the partitioned graph.
        """
        wanted, effects = [output_of(name) for name in outputs], list(effects)
        needed = self._needed([(self._kind(output, REPLICATE), output[0]) for output in wanted] + self._kinds_after(effects))
        makers: dict[_Kind, Callable[[Any], Any]] = {
            _Kind.SHAPES: self._make_local_shapes,
            _Kind.TOWERS: self._make_on_towers,
            _Kind.HOME: self._make_at_home,
        }
        for definition in self.propagation.traced.nodes:
            for kind, make in makers.items():
                if (kind, definition.name) in needed:
                    make(definition)
        return [self.whole(output) for output in wanted], [name[1:] for effect in effects for name in self._controls(effect)]

    # Which instances there have to be.

    def _needed(self, wanted: list[tuple[_Kind, str]]) -> set[tuple[_Kind, str]]:
        """The instances that some instances depend on, and these."""
        needed: set[tuple[_Kind, str]] = set()
        waiting = list(wanted)
        while waiting:
            instance = waiting.pop()
            if instance not in needed and instance[0] is not _Kind.FED:
                needed.add(instance)
                waiting += self._sources(*instance)
        return needed

    def _sources(self, kind: _Kind, name: str) -> list[tuple[_Kind, str]]:
        definition, plan = self.propagation.nodes[name], self.propagation.plans[name]
        outputs = [output_of(source) for source in data_inputs(definition)]
        needs: Sequence[Need]
        if kind is _Kind.HOME and self._counts_all_rows(definition):
            needs = [self.propagation.facts[output].placement for output in outputs]
        elif kind is _Kind.HOME:
            needs = [REPLICATE] * len(outputs)
        elif kind is _Kind.TOWERS:
            needs = plan.needs or [REPLICATE] * len(outputs)
        else:
            needs = [self._local_need(output) for output in outputs]
        pairs = list(zip(outputs, needs, strict=True))
        if kind is not _Kind.HOME:
            pairs = [pair for pair in pairs if not self._is_own_constant(*pair)]
        sources = [(self._kind(output, need), output[0]) for output, need in pairs]
        return sources + self._kinds_after(control_inputs(definition))

    def _kinds_after(self, names: Iterable[str]) -> list[tuple[_Kind, str]]:
        """The instances after which a node runs that runs after some traced nodes."""
        kinds = []
        for name in names:
            if self._is_waited_for(name):
                kinds.append((_Kind.HOME if self._is_at_home(name) else _Kind.TOWERS, name))
        return kinds

    def _is_waited_for(self, name: str) -> bool:
        if name in self.feeds.whole:
            return False
        definition = self.propagation.nodes[name]
        return definition.op != "Const" and (
            is_stateful(definition.op) or definition.op == "NoOp" or bool(control_inputs(definition))
        )

    def _is_at_home(self, name: str) -> bool:
        return self.propagation.plans[name].is_at_home

    def _is_there(self, output: Output) -> bool:
        """Whether the whole tensor is at home already."""
        return output[0] not in self.feeds.whole and self._is_at_home(output[0])

    def _counts_all_rows(self, definition: Any) -> bool:
        """Whether a node asks for the shape of tensors of which the towers have slices or parts."""
        return definition.op in _SHAPES and any(
            self.propagation.facts[output_of(source)].placement != REPLICATE for source in data_inputs(definition)
        )

    def _kind(self, output: Output, need: Need) -> _Kind:
        """The instance from which a form of a tensor is made."""
        name = output[0]
        facts, plan = self.propagation.facts[output], self.propagation.plans[name]
        if name in self.feeds.whole or axes_to_sum(facts) is not None:
            return _Kind.FED
        if need == LOCAL_SHAPE and facts.placement == REPLICATE and facts.counts_rows() and plan.is_at_home:
            return _Kind.SHAPES
        if plan.is_at_home:
            return _Kind.HOME
        is_cut = isinstance(need, Shard) and need != facts.placement
        return _Kind.HOME if plan.also_at_home and (is_cut or need in (REPLICATE, ANY_SHAPE)) else _Kind.TOWERS

    def _is_own_constant(self, output: Output, need: Need) -> bool:
        """Whether a tower has a constant of its own."""
        return self.propagation.nodes[output[0]].op == "Const" and need in (REPLICATE, ANY_SHAPE, LOCAL_SHAPE)

    def _local_need(self, output: Output) -> Need:
        placement = self.propagation.facts[output].placement
        return LOCAL_SHAPE if placement == REPLICATE else placement

    # Forms of a tensor.

    def form(self, output: Output, need: Need, tower: int) -> str:
        """A tensor in the form in which a tower needs it."""
        if need == LOCAL_SHAPE:
            return self._local(output, tower)
        if isinstance(need, Shard):
            return self._slice(output, need, tower)
        if isinstance(need, Partial):
            return self._part_of_sum(output, tower)
        if isinstance(need, ListOf):
            return self._part(output, tower)
        if self.propagation.nodes[output[0]].op == "Const":
            return self._constant_on(output, tower)
        return self.whole(output)

    def whole(self, output: Output) -> str:
        """The tensor of the whole batch, at home."""
        name, port = output
        if name in self.feeds.whole:
            return self.feeds.whole[name]
        facts = self.propagation.facts[output]
        axes = axes_to_sum(facts)
        if axes is not None:
            # Known beforehand; a tower with one row would take its axis for one that was broadcast.
            return self.constant(axes, self.propagation.static(output).dtype)
        if ("home", name) in self._made:
            return name_of(self._made["home", name], port)
        return self.once(("whole", output), lambda: self._combined(output, facts.placement))

    def _combined(self, output: Output, placement: Any) -> str:
        dtype = self.propagation.static(output).dtype
        if isinstance(placement, Shard):
            self.exchanges.append(Exchange("gather", output))
            return self._gathered(output, placement, dtype)
        if isinstance(placement, Partial):
            self.exchanges.append(Exchange(placement.reduction, output))
            return self._reduced(output, placement.reduction, dtype)
        if isinstance(placement, Replicate) and not self.propagation.facts[output].counts_rows():
            # The same on all towers, as the results of loops are; the last one has rows of its own.
            return self._part(output, len(self.devices) - 1)
        raise CannotGatherError(output[0])

    def _reduced(self, output: Output, reduction: str, dtype: tf.DType) -> str:
        parts = [self._part(output, tower) for tower in range(len(self.devices))]
        last, count = parts[-1], len(parts)
        name = f"{reduction}/{output[0]}"
        neutral = {"sum": "ZerosLike", "prod": "OnesLike"}.get(reduction)

        def nothing(dead: str, tower: int) -> str:
            # In a maximum, whatever another tower has, too, changes nothing.
            return dead if neutral is None else self.add(neutral, [dead], self.devices[tower], "nothing", T=dtype)

        instead = None if neutral else last
        alive = [self._if_alive(part, tower, dtype, nothing, instead) for tower, part in enumerate(parts)]
        if reduction == "sum":
            return self.add("AddN", alive, self.home, name, N=count, T=dtype)
        stacked = self.add("Pack", alive, self.home, f"stack/{output[0]}", N=count, T=dtype, axis=0)
        operation = {"max": "Max", "min": "Min", "prod": "Prod", "all": "All", "any": "Any"}[reduction]
        types = {} if reduction in ("all", "any") else {"T": dtype}
        return self.add(operation, [stacked, self.constant(0)], self.home, name, Tidx=tf.int32, keep_dims=False, **types)

    def _if_alive(
        self, part: str, tower: int, dtype: tf.DType, otherwise: Callable[[str, int], str], other: str | None = None
    ) -> str:
        """The part of a tower that has rows of its own; of one that has borrowed a row, something else.

        Switch and Merge pass a tensor on without a copy. The last tower always has rows: B(N-1)//N < B.
        """
        if tower == len(self.devices) - 1:
            return part
        device = self.devices[tower]

        def switch(tensor: str) -> str:
            alive = self.feeds.is_alive[tower]
            return self.once(("switch", tensor, tower), lambda: self.add("Switch", [tensor, alive], device, "alive", T=dtype))

        dead = otherwise(switch(other or part), tower)
        return self.add("Merge", [dead, name_of(switch(part), 1)], device, "own", N=2, T=dtype)

    def _gathered(self, output: Output, placement: Shard, dtype: tf.DType) -> str:
        rank = self.propagation.static(output).rank
        if rank is None:
            raise CannotGatherError(output[0])
        axis, segments = placement.axis, len(placement.blocks)

        def no_rows(dead: str, tower: int) -> str:
            device = self.devices[tower]
            sizes = self.constant([0 if i == axis else -1 for i in range(rank)], device=device)
            return self.add(
                "Slice", [dead, self.constant([0] * rank, device=device), sizes], device, "nothing", T=dtype, Index=tf.int32
            )

        parts = [self._if_alive(self._part(output, tower), tower, dtype, no_rows) for tower in range(len(self.devices))]
        if segments > 1:
            split = [self._segments(output, part, placement, tower, dtype) for tower, part in enumerate(parts)]
            parts = [pieces[segment] for segment in range(segments) for pieces in split]
        if len(parts) == 1:
            return parts[0]
        inputs = [*parts, self.constant(axis)]
        return self.add("ConcatV2", inputs, self.home, f"gather/{output[0]}", N=len(parts), T=dtype, Tidx=tf.int32)

    def _segments(self, output: Output, part: str, placement: Shard, tower: int, dtype: tf.DType) -> list[str]:
        """The segments of a tower's rows."""
        device, count = self.devices[tower], len(placement.blocks)
        axis = self.constant(placement.axis, device=device)
        if len(set(placement.blocks)) == 1:
            split = self.add("Split", [axis, part], device, "segments", T=dtype, num_split=count)
        elif all(isinstance(block, int) for block in placement.blocks):
            own = self.feeds.own_rows[tower]
            sizes = self.binary("Mul", own, self.constant(list(placement.blocks), device=device), tf.int32, device)
            split = self.add("SplitV", [part, sizes, axis], device, "segments", T=dtype, Tlen=tf.int32, num_split=count)
        else:
            raise CannotGatherError(output[0])
        return [name_of(split, segment) for segment in range(count)]

    def _part(self, output: Output, tower: int) -> str:
        """What a tower has of a tensor."""
        name, port = output
        if name in self.feeds.slices:
            return self.feeds.slices[name][tower]
        return name_of(self._made["tower", name][tower], port)

    def _part_of_sum(self, output: Output, tower: int) -> str:
        """A tower's part of a sum, which a tensor that is the same everywhere may be, too: one tower has all of it."""
        if self.propagation.facts[output].placement == Partial():
            return self._part(output, tower)
        whole = self.whole(output)
        if tower == len(self.devices) - 1:
            return whole
        dtype = self.propagation.static(output).dtype
        return self.once(("zeros", output), lambda: self.add("ZerosLike", [whole], self.home, "zeros", T=dtype))

    def _constant_on(self, output: Output, tower: int) -> str:
        definition = self.propagation.nodes[output[0]]
        device = self.devices[tower]
        return self.once(("constant", output[0], device), lambda: self.copy(definition, f"tower_{tower}", device, []))

    def _slice(self, output: Output, need: Shard, tower: int) -> str:
        name = output[0]
        is_there = self.propagation.facts[output].placement == need and (
            name in self.feeds.slices or not self._is_at_home(name)
        )
        if is_there:
            return self._part(output, tower)
        return self.once(("cut", output, need), lambda: self._cut(output, need))[tower]

    def _cut(self, output: Output, need: Shard) -> list[str]:
        """Each tower's rows of a tensor that is whole; of one entry for all rows, all towers have it."""
        self.exchanges.append(Exchange("cut", output))
        static, whole = self.propagation.static(output), self.whole(output)
        if static.shape is None:
            raise CannotGatherError(output[0])
        is_made_for_rows = isinstance(self.propagation.facts[output].placement, Shard)
        count, rank = len(need.blocks), len(static.shape)
        size = self._size(whole, need.axis, static.dtype)
        blocks: list[str]
        if all(isinstance(block, int) for block in need.blocks):
            blocks = [self.constant(block) for block in need.blocks]
        elif len(set(need.blocks)) == 1:
            all_rows = self.binary("Mul", self.feeds.batch_rows, self.constant(count))
            blocks = [self.binary("FloorDiv", size, all_rows)] * count
        else:
            raise CannotGatherError(output[0])
        ends = [self.binary("Mul", self.feeds.batch_rows, block) for block in blocks]
        firsts = [self.constant(0), *itertools.accumulate(ends, lambda a, b: self.binary("AddV2", a, b))]
        if not is_made_for_rows:
            size = self._one_or(firsts[-1], size, output[0])
        slices = []
        for tower in range(len(self.devices)):
            pieces = []
            for i, block in enumerate(blocks):
                begin = self.binary("Mul", self.feeds.begins[tower], block)
                begin = begin if i == 0 else self.binary("AddV2", firsts[i], begin)
                length = self.binary("Mul", self.feeds.rows[tower], block)
                if not is_made_for_rows:
                    is_one = self.binary("Equal", size, self.constant(1))
                    begin = self._select(is_one, self.constant(0), begin)
                    length = self._select(is_one, self.constant(int(i == 0)), length)
                pieces.append(self._range(whole, need.axis, rank, begin, length, static.dtype))
            if count > 1:
                inputs = [*pieces, self.constant(need.axis)]
                pieces = [self.add("ConcatV2", inputs, self.home, "cut", N=count, T=static.dtype, Tidx=tf.int32)]
            slices += pieces
        return slices

    def _select(self, condition: str, yes: str, no: str) -> str:
        return self.add("SelectV2", [condition, yes, no], self.home, "select", T=tf.int32)

    def _one_or(self, rows: str, size: str, name: str) -> str:
        """A size that is not known while tracing: it must be 1, or that of the tensors with rows that it meets."""
        is_one = self.binary("Equal", size, self.constant(1))
        is_rows = self.binary("Equal", size, rows)
        either = self.add("LogicalOr", [is_one, is_rows], self.home, "one_or_rows")
        message = tf.make_tensor_proto(
            f"keras_dp: the tensor {name!r} meets rows of the batch, and must have as many, or one. How many is not known "
            "while tracing; give it a fixed shape. Received, in this order, the entries that it has, and those of the rows:"
        )
        said = self.add("Const", [], "CPU:0", "message", dtype=tf.string, value=message)
        types = [tf.string, tf.int32, tf.int32]
        check = self.add("Assert", [either, said, size, rows], "CPU:0", "check", T=types)
        return self.add("Identity", [size, f"^{check}"], self.home, "size", T=tf.int32)

    def _range(self, whole: str, axis: int, rank: int, begin: str, length: str, dtype: tf.DType) -> str:
        begins = [begin if i == axis else self.constant(0) for i in range(rank)]
        lengths = [length if i == axis else self.constant(-1) for i in range(rank)]
        inputs = [
            whole,
            self.add("Pack", begins, self.home, "begin", N=rank, T=tf.int32, axis=0),
            self.add("Pack", lengths, self.home, "length", N=rank, T=tf.int32, axis=0),
        ]
        return self.add("Slice", inputs, self.home, "cut", T=dtype, Index=tf.int32)

    def _size(self, tensor: str, axis: int, dtype: tf.DType, device: str | None = None) -> str:
        """The size of a tensor along an axis, int32."""
        device = device or self.home
        shape = self.once(
            ("shape", tensor, device),
            lambda: self.add("Shape", [tensor], device, "shape", T=dtype, out_type=tf.int32),
        )
        inputs = [shape, self.constant(axis, device=device), self.constant(0, device=device)]
        types = {"Tparams": tf.int32, "Tindices": tf.int32, "Taxis": tf.int32}
        return self.once(
            ("size", tensor, axis, device), lambda: self.add("GatherV2", inputs, device, "size", batch_dims=0, **types)
        )

    def _local(self, output: Output, tower: int) -> str:
        """A shape as it is on a tower."""
        name, port = output
        facts = self.propagation.facts[output]
        if self.propagation.nodes[name].op == "Const":
            return self._constant_on(output, tower)
        if facts.placement != REPLICATE:
            return self._part(output, tower)
        if not facts.counts_rows() or name in self.feeds.whole:
            return self.whole(output)
        made = self._made["shapes", name] if self._is_at_home(name) else self._made["tower", name]
        return name_of(made[tower], port)

    # Instances.

    def _make_at_home(self, definition: Any) -> None:
        if definition.op == "Const":
            self._made["home", definition.name] = self.copy(definition, "home", self.home, [])
        elif self._counts_all_rows(definition):
            self._made["home", definition.name] = self._shape_of_whole(definition)
        else:
            inputs = [self.whole(output_of(source)) for source in data_inputs(definition)]
            # Where a variable lives is up to the variable.
            has_variable = any(
                self.propagation.static(output_of(source)).dtype == tf.resource for source in data_inputs(definition)
            )
            device = definition.device or ("" if has_variable else self.home)
            self._made["home", definition.name] = self.copy(definition, "home", device, inputs)

    def _make_on_towers(self, definition: Any) -> None:
        plan = self.propagation.plans[definition.name]
        made = []
        for tower, device in enumerate(self.devices):
            sources = zip(data_inputs(definition), plan.needs or (), strict=True)
            inputs = [self.form(output_of(source), need, tower) for source, need in sources]
            if plan.instance:
                made.append(plan.instance(self, definition, tower, inputs))
            else:
                made.append(self.copy(definition, f"tower_{tower}", device, inputs))
        self._made["tower", definition.name] = made

    def _make_local_shapes(self, definition: Any) -> None:
        made = []
        for tower, device in enumerate(self.devices):
            outputs = [output_of(source) for source in data_inputs(definition)]
            inputs = [self.form(output, self._local_need(output), tower) for output in outputs]
            made.append(self.copy(definition, f"tower_{tower}/shapes", device, inputs))
        self._made["shapes", definition.name] = made

    def _shape_of_whole(self, definition: Any) -> str:
        """Shape, ShapeN or Size, of the whole of tensors of which the towers have slices or parts."""
        dtype = tf.as_dtype(definition.attr["out_type"].type or tf.int32.as_datatype_enum)
        outputs = [output_of(source) for source in data_inputs(definition)]
        shapes = [self._whole_shape(output, dtype) for output in outputs]
        name = f"home/{definition.name}"
        if definition.op == "Size":
            return self.add("Prod", [shapes[0], self.constant(0)], self.home, name, T=dtype, Tidx=tf.int32, keep_dims=False)
        if definition.op == "Shape":
            return self.add("Identity", shapes, self.home, name, T=dtype)
        made = self.add("IdentityN", shapes, self.home, name)
        self.graph_def.node[-1].attr["T"].list.type.extend([dtype.as_datatype_enum] * len(shapes))
        return made

    def _whole_shape(self, output: Output, dtype: tf.DType) -> str:
        static, placement = self.propagation.static(output), self.propagation.facts[output].placement
        if isinstance(placement, Replicate) or self._is_there(output):
            return self.add("Shape", [self.whole(output)], self.home, "shape", T=static.dtype, out_type=dtype)
        last = len(self.devices) - 1
        part, device = self._part(output, last), self.devices[last]
        shape = self.add("Shape", [part], device, "shape", T=static.dtype, out_type=dtype)
        if not isinstance(placement, Shard):
            return shape
        rank = static.rank
        if rank is None:
            raise CannotGatherError(output[0])
        # Along the rows, a slice has so many entries for each of its rows; the last tower has rows of its own.
        along = np.eye(rank, dtype=int)[placement.axis]
        local = self.cast(self.feeds.rows[last], tf.int32, dtype)
        total = self.cast(self.feeds.batch_rows, tf.int32, dtype)
        per_row = self.binary("FloorDiv", shape, local, dtype)
        rows = self.binary("Mul", self.binary("Mul", per_row, total, dtype), self.constant(along, dtype), dtype)
        rest = self.binary("Mul", shape, self.constant(1 - along, dtype), dtype)
        return self.binary("AddV2", rows, rest, dtype)

    # For rules that make instances of their own.

    def count(self, sizes: Sequence[Any], node: Node, axes: Sequence[int], tower: int | None = None) -> str:
        """The number of entries along axes of a node's first input, an int64 scalar at home.

        Args:
            sizes: what is known of the axes.
            node: the node.
            axes: which.
            tower: whose entries are counted; None for those of the whole batch.
        """
        rows = self.feeds.batch_rows if tower is None else self.feeds.rows[tower]
        output = output_of(data_inputs(node.definition)[0])
        last = len(self.devices) - 1
        plain = int(np.prod([size for size in sizes if isinstance(size, int)], dtype=np.int64))
        total = self.constant(plain, tf.int64)
        placement = self.propagation.facts[output].placement
        for size, axis in zip(sizes, axes, strict=True):
            if isinstance(size, int):
                continue
            blocks = placement.blocks if isinstance(placement, Shard) and axis == placement.axis else None
            if blocks is not None and all(isinstance(block, int) for block in blocks):
                factors = [rows, self.constant(sum(blocks))]
            else:
                entries = self._size(self.form(output, placement, last), axis, node.dtype(0), self.devices[last])
                factors = [entries]
                if blocks is not None:
                    factors = [self.binary("FloorDiv", entries, self.feeds.rows[last]), rows]
            for factor in factors:
                total = self.binary("Mul", total, self.cast(factor, tf.int32, tf.int64), tf.int64)
        return total

    def read(self, node: Node, resource: str) -> str:
        """The value of a variable, read once for all towers."""
        controls = [control for name in control_inputs(node.definition) for control in self._controls(name)]
        dtype = node.result_dtype()
        return self.once(
            ("read", node.name),
            lambda: self.add("ReadVariableOp", [resource, *sorted(set(controls))], "", f"home/{node.name}/read", dtype=dtype),
        )

    def copy(self, definition: Any, prefix: str, device: str, inputs: Sequence[str], operation: str | None = None) -> str:
        """A copy of a traced node, with other inputs, on a device."""
        name = self._unique(f"{prefix}/{definition.name}")
        controls = [control for source in control_inputs(definition) for control in self._controls(source)]
        node = self.graph_def.node.add()
        node.CopyFrom(definition)
        node.name, node.device, node.op = name, device, operation or definition.op
        # Colocation names an operation that there need not be.
        node.attr.pop("_class", None)
        node.attr.pop("_gradient_op_type", None)
        del node.input[:]
        node.input.extend(inputs)
        if definition.op != "Const":
            node.input.extend(sorted(set(controls)))
        return name

    def _controls(self, name: str) -> list[str]:
        """The control inputs that stand for one on a traced node."""
        if not self._is_waited_for(name):
            return []
        made = [self._made["home", name]] if self._is_at_home(name) else self._made["tower", name]
        return [f"^{instance.split(':')[0]}" for instance in made]

    def add(self, operation: str, inputs: Sequence[str], device: str, name: str, **attributes: Any) -> str:
        """A new node."""
        name = self._unique(name)
        node = self.graph_def.node.add(op=operation, name=name, device=device)
        node.input.extend(inputs)
        for attribute, value in attributes.items():
            if isinstance(value, tf.DType):
                node.attr[attribute].type = value.as_datatype_enum
            elif isinstance(value, bool):
                node.attr[attribute].b = value
            elif isinstance(value, int):
                node.attr[attribute].i = value
            elif isinstance(value, list):
                node.attr[attribute].list.type.extend(dtype.as_datatype_enum for dtype in value)
            else:
                node.attr[attribute].tensor.CopyFrom(value)
        return name

    def binary(self, operation: str, a: str, b: str, dtype: tf.DType = tf.int32, device: str | None = None) -> str:
        """A node of two operands of the same type, of which there is one."""
        device = device or self.home
        return self.once((operation, a, b, device), lambda: self.add(operation, [a, b], device, operation.lower(), T=dtype))

    def cast(self, tensor: str, source: tf.DType, target: tf.DType) -> str:
        """A tensor at home as another type."""
        if source == target:
            return tensor
        return self.once(
            ("cast", tensor, target), lambda: self.add("Cast", [tensor], self.home, "cast", SrcT=source, DstT=target)
        )

    def constant(self, value: Any, dtype: tf.DType = tf.int32, device: str | None = None) -> str:
        """A constant, of which there is one on a device."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        device = device or self.home
        return self.once(
            ("value", array.tobytes(), array.shape, dtype.name, device),
            lambda: self.add("Const", [], device, "constant", dtype=dtype, value=tf.make_tensor_proto(array)),
        )

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """Whatever `make` makes, the first time."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else self._unique(f"{name}_{count}")
