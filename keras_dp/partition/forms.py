"""The forms in which towers, and home, take a tensor; where theirs is another one, they meet."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.across import Across
from keras_dp.partition.graph import Output, data_inputs, name_of, output_of
from keras_dp.partition.homes import Homes
from keras_dp.partition.placements import LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Replicate, Shard
from keras_dp.partition.propagation import CannotGatherError, Propagation, axes_to_sum
from keras_dp.partition.writing import Given, GraphWriter


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
        kind: "sum" and other reductions of parts, "gather" of rows, "cut" of a whole tensor into slices, or "first" for the
            first tower's own value.
        output: the tensor.
    """

    kind: str
    output: Output


@dataclasses.dataclass
class Instances:
    """What traced nodes are called in the partitioned graph.

    Attributes:
        home: by traced node, the one at home.
        towers: by traced node, the N on the towers.
        shapes: by traced node, the N on the towers that count the tower's own rows.
    """

    home: dict[str, str] = dataclasses.field(default_factory=dict)
    towers: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    shapes: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def _neutral_element(reduction: str, dtype: tf.DType) -> Any:
    """What changes nothing in a maximum and the like."""
    if reduction in ("all", "any"):
        return reduction == "all"
    if dtype.is_floating:
        return -math.inf if reduction == "max" else math.inf
    return dtype.min if reduction == "max" else dtype.max


class Forms:
    """Makes the forms of tensors, of instances that there are.

    Args:
        graph: is written.
        propagation: how each node is computed.
        devices: of the N towers.
        feeds: names of the tensors that are given.
        instances: of the nodes so far.
        homes: says where a whole tensor is put together.
        across: what the workers tell each other, of which each has N towers; None for one worker alone.

    Attributes:
        exchanges: the meetings of towers so far.
        meetings: the nodes of those that need something of all towers.
        early: tensors of which towers need the whole, or something that is made of it. Sums of others over workers are taken
            together.
    """

    def __init__(
        self,
        graph: GraphWriter,
        propagation: Propagation,
        devices: Sequence[str],
        feeds: Feeds,
        instances: Instances,
        homes: Homes,
        across: Across | None = None,
    ):
        self.exchanges: list[Exchange] = []
        self.meetings: list[str] = []
        self.early: set[Output] = set()
        self._graph = graph
        self._propagation = propagation
        self._devices = devices
        self._feeds = feeds
        self._instances = instances
        self._homes = homes
        self._across = across
        self._late: dict[str, Given] = {}

    def form(self, output: Output, need: Need, tower: int) -> str:
        """A tensor in the form in which a tower needs it."""
        if need == LOCAL_SHAPE:
            return self._local(output, tower)
        if isinstance(need, Shard):
            return self._slice(output, need, tower)
        if isinstance(need, Partial):
            return self._part_of_sum(output, tower)
        if isinstance(need, ListOf | Own):
            return self.part(output, tower)
        if self._propagation.nodes[output[0]].op == "Const":
            return self._constant_on(output, tower)
        return self.whole(output)

    def whole(self, output: Output) -> str:
        """The tensor of the whole batch, at home."""
        name, port = output
        if name in self._feeds.whole:
            return self._feeds.whole[name]
        facts = self._propagation.facts[output]
        axes = axes_to_sum(facts)
        if axes is not None:
            # Known beforehand; a tower with one row would take its axis for one that was broadcast.
            return self._graph.constant(axes, self._propagation.static(output).dtype)
        if name in self._instances.home:
            return name_of(self._instances.home[name], port)
        return str(self._graph.once(("whole", output), lambda: self._met(output, facts.placement)))

    def _met(self, output: Output, placement: Any) -> str:
        whole = self._combined(output, placement)
        self.meetings.append(whole)
        return whole

    def _combined(self, output: Output, placement: Any) -> str:
        dtype = self._propagation.static(output).dtype
        if isinstance(placement, Shard):
            self.exchanges.append(Exchange("gather", output))
            return self._gathered(output, placement, dtype)
        if isinstance(placement, Partial):
            self.exchanges.append(Exchange(placement.reduction, output))
            return self._reduced(output, placement.reduction, dtype)
        if isinstance(placement, Own):
            self.exchanges.append(Exchange("first", output))
            return self._of_first(output, dtype)
        if isinstance(placement, Replicate) and not self._propagation.facts[output].counts_rows():
            # The same on all towers, as the results of loops are.
            return self.part(output, len(self._devices) - 1)
        raise CannotGatherError(output[0])

    def _of_first(self, output: Output, dtype: tf.DType) -> str:
        """The own value of the first tower that has rows, which is the one whose rows begin the batch."""
        kept = []
        for tower, device in enumerate(self._devices):
            part = self.part(output, tower)
            zeros = self._graph.add("ZerosLike", [part], device, "zeros", T=dtype)
            kept.append(self._graph.add("SelectV2", [self._has_first(tower), part, zeros], device, "of_first", T=dtype))
        home, name = self._homes.of_whole(output), f"first/{output[0]}"
        own, across = self._graph.add("AddN", kept, home, name, N=len(kept), T=dtype), self._across
        if across is None:
            return own
        given = Given(own, self._propagation.static(output).spec(), home)
        return self._over_workers(lambda part: across.reduced(part, "sum"), [given], name)

    def _reduced(self, output: Output, reduction: str, dtype: tf.DType) -> str:
        own = self._reduced_by_towers(output, reduction, dtype)
        if self._across is None:
            return own
        across, name = self._across, f"{reduction}/{output[0]}"
        given = Given(own, self._propagation.static(output).spec(), self._homes.of_whole(output))
        if reduction == "sum" and output not in self.early:
            total = self._graph.reserve(f"workers/{name}", dtype)
            self._late[total] = given
            return total
        return self._over_workers(lambda part: across.reduced(part, reduction), [given], name)

    def _reduced_by_towers(self, output: Output, reduction: str, dtype: tf.DType) -> str:
        home, name, count = self._homes.of_whole(output), f"{reduction}/{output[0]}", len(self._devices)
        if reduction == "sum":
            sent = self._narrowest(output)
            narrow = self._propagation.static(sent).dtype
            parts = self._alive_parts(sent, reduction, narrow)
            if narrow != dtype:
                parts = [self._graph.add("Cast", [part], home, "received", SrcT=narrow, DstT=dtype) for part in parts]
            return self._graph.add("AddN", parts, home, name, N=count, T=dtype)
        parts = self._alive_parts(output, reduction, dtype)
        stacked = self._graph.add("Pack", parts, home, f"stack/{output[0]}", N=count, T=dtype, axis=0)
        operation = {"max": "Max", "min": "Min", "prod": "Prod", "all": "All", "any": "Any"}[reduction]
        types = {} if reduction in ("all", "any") else {"T": dtype}
        first = self._graph.constant(0, device=home)
        return self._graph.add(operation, [stacked, first], home, name, Tidx=tf.int32, keep_dims=False, **types)

    def _narrowest(self, output: Output) -> Output:
        """What towers send of their parts: what these were cast from, if that takes fewer bytes."""
        narrowest = output
        while True:
            name = output[0]
            definition = self._propagation.nodes[name]
            is_cast = definition.op == "Cast" and self._propagation.static(output).dtype.is_floating
            if not (is_cast or definition.op in ("Identity", "Snapshot")) or self._propagation.plans[name].is_at_home:
                return narrowest
            output = output_of(data_inputs(definition)[0])
            dtype, least = self._propagation.static(output).dtype, self._propagation.static(narrowest).dtype
            if not dtype.is_floating or output[0] not in self._instances.towers:
                return narrowest
            if dtype.size > least.size:
                # It was rounded on the way.
                return narrowest
            narrowest = output if dtype.size < least.size else narrowest

    def _alive_parts(self, output: Output, reduction: str, dtype: tf.DType) -> list[str]:
        """The towers' parts, of those that have rows; of the others, what changes nothing."""
        parts = [self.part(output, tower) for tower in range(len(self._devices))]
        neutral = {"sum": "ZerosLike", "prod": "OnesLike"}.get(reduction)
        shape = self._propagation.static(output).shape

        def nothing(dead: str, tower: int) -> str:
            if neutral is None and self._across is None:
                # In a maximum, whatever another tower has, too, changes nothing.
                return dead
            if neutral is None:
                # But a whole worker may have no rows.
                return self._filled(dead, _neutral_element(reduction, dtype), dtype, tower)
            if reduction == "sum" and shape is not None and all(isinstance(size, int) for size in shape):
                return str(self._graph.once(("nothing", dtype, *shape, tower), lambda: self._zeros(shape, tower, dtype)))
            return self._graph.add(neutral, [dead], self._devices[tower], "nothing", T=dtype)

        instead = None if neutral or self._across else parts[-1]
        return [self._if_alive(part, tower, dtype, nothing, instead) for tower, part in enumerate(parts)]

    def finish(self) -> None:
        """Writes what was put off: the sums over workers that no tower waits for, all together."""
        if self._across is not None and self._late:
            across = self._across
            self._graph.inline(lambda *parts: across.sums(parts), list(self._late.values()), list(self._late))

    def _gathered_over_workers(self, own: Given, axis: int, entries: Any, name: str) -> str:
        """The rows of all workers, each with so many entries along an axis."""
        across = self._across
        assert across is not None
        sizes = [size for i, size in enumerate(own.spec.shape) if i != axis]
        if not isinstance(entries, int) or None in sizes:
            return self._over_workers(lambda rows: across.gathered(rows, axis), [own], name)
        home = self._graph.home
        rows = self._graph.once(
            "rows of this worker",
            lambda: self._graph.add("AddN", self._feeds.own_rows, home, "rows", N=len(self._devices), T=tf.int32),
        )
        one = Given(rows, tf.TensorSpec([], tf.int32), home)
        counts = self._graph.once("rows of workers", lambda: self._over_workers(across.counts, [one], "rows"))
        of_workers = Given(counts, tf.TensorSpec([None], tf.int32), home)
        return self._over_workers(lambda rows, counts: across.gathered(rows, axis, counts * entries), [own, of_workers], name)

    def _over_workers(self, exchange: Callable[..., Any], given: Sequence[Given], name: str) -> str:
        result = self._graph.reserve(f"workers/{name}", given[0].spec.dtype)
        self._graph.inline(lambda *tensors: [exchange(*tensors)], given, [result])
        return result

    def _filled(self, like: str, value: Any, dtype: tf.DType, tower: int) -> str:
        device = self._devices[tower]
        shape = self._graph.add("Shape", [like], device, "shape", T=dtype, out_type=tf.int32)
        value = self._graph.constant(value, dtype, device)
        return self._graph.add("Fill", [shape, value], device, "nothing", T=dtype, index_type=tf.int32)

    def _zeros(self, shape: list[int], tower: int, dtype: tf.DType) -> str:
        """Zeros on a tower that has no rows of its own."""
        device = self._devices[tower]
        zero = self._graph.constant(0, dtype, device)
        dead = self._graph.once(
            ("switch", zero, tower),
            lambda: self._graph.add("Switch", [zero, self._feeds.is_alive[tower]], device, "alive", T=dtype),
        )
        sizes = self._graph.constant(shape, tf.int32, device)
        return self._graph.add("Fill", [sizes, dead], device, "nothing", T=dtype, index_type=tf.int32)

    def _if_alive(
        self, part: str, tower: int, dtype: tf.DType, otherwise: Callable[[str, int], str], other: str | None = None
    ) -> str:
        """The part of a tower that has rows of its own; of one that has borrowed a row, something else.

        Switch and Merge pass a tensor on without a copy. The last tower of one worker always has rows: B(N-1)//N < B.
        """
        if tower == len(self._devices) - 1 and self._across is None:
            return part
        device = self._devices[tower]

        def switch(tensor: str) -> str:
            alive = self._feeds.is_alive[tower]
            return self._graph.once(
                ("switch", tensor, tower), lambda: self._graph.add("Switch", [tensor, alive], device, "alive", T=dtype)
            )

        dead = otherwise(switch(other or part), tower)
        return self._graph.add("Merge", [dead, name_of(switch(part), 1)], device, "own", N=2, T=dtype)

    def _gathered(self, output: Output, placement: Shard, dtype: tf.DType) -> str:
        rank = self._propagation.static(output).rank
        if rank is None:
            raise CannotGatherError(output[0])
        axis, segments = placement.axis, len(placement.blocks)

        def no_rows(dead: str, tower: int) -> str:
            device = self._devices[tower]
            sizes = self._graph.constant([0 if i == axis else -1 for i in range(rank)], device=device)
            return self._graph.add(
                "Slice",
                [dead, self._graph.constant([0] * rank, device=device), sizes],
                device,
                "nothing",
                T=dtype,
                Index=tf.int32,
            )

        parts = [self._if_alive(self.part(output, tower), tower, dtype, no_rows) for tower in range(len(self._devices))]
        if segments > 1:
            split = [self._segments(output, part, placement, tower, dtype) for tower, part in enumerate(parts)]
            parts = [pieces[segment] for segment in range(segments) for pieces in split]
        if self._across is not None:
            # Segment by segment: the workers' rows of each follow each other.
            count, home = len(self._devices), self._homes.of_whole(output)
            sizes = [None if i == axis else size for i, size in enumerate(self._propagation.static(output).spec().shape)]
            spec = tf.TensorSpec(sizes, dtype)
            each = [self._concatenated(output, parts[i : i + count], axis) for i in range(0, len(parts), count)]
            parts = [
                self._gathered_over_workers(Given(own, spec, home), axis, block, f"gather/{output[0]}")
                for own, block in zip(each, placement.blocks, strict=True)
            ]
        return self._concatenated(output, parts, axis)

    def _concatenated(self, output: Output, parts: list[str], axis: int) -> str:
        if len(parts) == 1:
            return parts[0]
        home, dtype = self._homes.of_whole(output), self._propagation.static(output).dtype
        inputs = [*parts, self._graph.constant(axis, device=home)]
        return self._graph.add("ConcatV2", inputs, home, f"gather/{output[0]}", N=len(parts), T=dtype, Tidx=tf.int32)

    def _segments(self, output: Output, part: str, placement: Shard, tower: int, dtype: tf.DType) -> list[str]:
        """The segments of a tower's rows."""
        device, count = self._devices[tower], len(placement.blocks)
        axis = self._graph.constant(placement.axis, device=device)
        if len(set(placement.blocks)) == 1:
            split = self._graph.add("Split", [axis, part], device, "segments", T=dtype, num_split=count)
        elif all(isinstance(block, int) for block in placement.blocks):
            own = self._feeds.own_rows[tower]
            sizes = self._graph.binary(
                "Mul", own, self._graph.constant(list(placement.blocks), device=device), tf.int32, device
            )
            split = self._graph.add("SplitV", [part, sizes, axis], device, "segments", T=dtype, Tlen=tf.int32, num_split=count)
        else:
            raise CannotGatherError(output[0])
        return [name_of(split, segment) for segment in range(count)]

    def part(self, output: Output, tower: int) -> str:
        """What a tower has of a tensor."""
        name, port = output
        if name in self._feeds.slices:
            return self._feeds.slices[name][tower]
        return name_of(self._instances.towers[name][tower], port)

    def _part_of_sum(self, output: Output, tower: int) -> str:
        """A tower's part of a sum, which a tensor that is the same everywhere may be, too: one tower has all of it."""
        if self._propagation.facts[output].placement == Partial():
            return self.part(output, tower)
        whole = self.whole(output)
        if tower == len(self._devices) - 1 and self._across is None:
            return whole
        dtype = self._propagation.static(output).dtype
        zeros = self._graph.once(
            ("zeros", output), lambda: self._graph.add("ZerosLike", [whole], self._graph.home, "zeros", T=dtype)
        )
        if self._across is None:
            return zeros
        has_first = self._has_first(tower)
        return self._graph.once(
            ("part", output, tower),
            lambda: self._graph.add("SelectV2", [has_first, whole, zeros], self._graph.home, "part", T=dtype),
        )

    def _has_first(self, tower: int) -> str:
        """Whether a tower has the first row of the batch: one of the towers of all workers has."""
        begins = self._graph.binary("Equal", self._feeds.begins[tower], self._graph.constant(0))
        return str(
            self._graph.once(
                ("has_first", tower),
                lambda: self._graph.add("LogicalAnd", [begins, self._feeds.is_alive[tower]], self._graph.home, "has_first"),
            )
        )

    def _constant_on(self, output: Output, tower: int) -> str:
        definition = self._propagation.nodes[output[0]]
        device = self._devices[tower]
        return self._graph.once(
            ("constant", output[0], device),
            lambda: self._graph.copy(definition, f"tower_{tower}/{definition.name}", device, []),
        )

    def _slice(self, output: Output, need: Shard, tower: int) -> str:
        name = output[0]
        is_there = self._propagation.facts[output].placement == need and (
            name in self._feeds.slices or not self._propagation.plans[name].is_at_home
        )
        if is_there:
            return self.part(output, tower)
        return self._graph.once(("cut", output, need), lambda: self._cut(output, need))[tower]

    def _cut(self, output: Output, need: Shard) -> list[str]:
        """Each tower's rows of a tensor that is whole; of one entry for all rows, all towers have it."""
        self.exchanges.append(Exchange("cut", output))
        static, whole = self._propagation.static(output), self.whole(output)
        if static.shape is None:
            raise CannotGatherError(output[0])
        is_made_for_rows = isinstance(self._propagation.facts[output].placement, Shard)
        count, rank = len(need.blocks), len(static.shape)
        size = self._graph.size(whole, need.axis, static.dtype)
        blocks: list[str]
        if all(isinstance(block, int) for block in need.blocks):
            blocks = [self._graph.constant(block) for block in need.blocks]
        elif len(set(need.blocks)) == 1:
            all_rows = self._graph.binary("Mul", self._feeds.batch_rows, self._graph.constant(count))
            blocks = [self._graph.binary("FloorDiv", size, all_rows)] * count
        else:
            raise CannotGatherError(output[0])
        ends = [self._graph.binary("Mul", self._feeds.batch_rows, block) for block in blocks]
        firsts = [self._graph.constant(0), *itertools.accumulate(ends, lambda a, b: self._graph.binary("AddV2", a, b))]
        if not is_made_for_rows:
            size = self._one_or(firsts[-1], size, output[0])
        slices = []
        for tower in range(len(self._devices)):
            pieces = []
            for i, block in enumerate(blocks):
                begin = self._graph.binary("Mul", self._feeds.begins[tower], block)
                begin = begin if i == 0 else self._graph.binary("AddV2", firsts[i], begin)
                length = self._graph.binary("Mul", self._feeds.rows[tower], block)
                if not is_made_for_rows:
                    is_one = self._graph.binary("Equal", size, self._graph.constant(1))
                    begin = self._graph.select(is_one, self._graph.constant(0), begin)
                    length = self._graph.select(is_one, self._graph.constant(int(i == 0)), length)
                pieces.append(self._graph.range_along(whole, need.axis, rank, begin, length, static.dtype))
            if count > 1:
                inputs = [*pieces, self._graph.constant(need.axis)]
                pieces = [self._graph.add("ConcatV2", inputs, self._graph.home, "cut", N=count, T=static.dtype, Tidx=tf.int32)]
            slices += pieces
        return slices

    def _one_or(self, rows: str, size: str, name: str) -> str:
        """A size that is not known while tracing: it must be 1, or that of the tensors with rows that it meets."""
        is_one = self._graph.binary("Equal", size, self._graph.constant(1))
        is_rows = self._graph.binary("Equal", size, rows)
        either = self._graph.add("LogicalOr", [is_one, is_rows], self._graph.home, "one_or_rows")
        message = tf.make_tensor_proto(
            f"keras_dp: the tensor {name!r} meets rows of the batch, and must have as many, or one. How many is not known "
            "while tracing; give it a fixed shape. Received, in this order, the entries that it has, and those of the rows:"
        )
        said = self._graph.add("Const", [], "CPU:0", "message", dtype=tf.string, value=message)
        types = [tf.string, tf.int32, tf.int32]
        check = self._graph.add("Assert", [either, said, size, rows], "CPU:0", "check", T=types)
        return self._graph.add("Identity", [size, f"^{check}"], self._graph.home, "size", T=tf.int32)

    def _local(self, output: Output, tower: int) -> str:
        """A shape as it is on a tower."""
        name, port = output
        facts = self._propagation.facts[output]
        if self._propagation.nodes[name].op == "Const":
            return self._constant_on(output, tower)
        if facts.placement != REPLICATE:
            return self.part(output, tower)
        if not facts.counts_rows() or name in self._feeds.whole:
            return self.whole(output)
        made = self._instances.shapes[name] if self._propagation.plans[name].is_at_home else self._instances.towers[name]
        return name_of(made[tower], port)
