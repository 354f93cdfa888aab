"""Sum the towers' parts, gather their rows, and cut tensors into slices."""

import itertools
from collections.abc import Container, Sequence

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.constants import Constants
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.empty_slices import EmptySlices
from keras_dp.partition.building.lengths import Lengths
from keras_dp.partition.building.worker_exchanges import WorkerExchanges
from keras_dp.partition.building.writing import Given, full_name
from keras_dp.partition.facts.placements import Placement, Shard
from keras_dp.partition.facts.rows import Rows, counts_all
from keras_dp.partition.placing.measuring import measured_blocks
from keras_dp.partition.placing.moments import variance_of_parts
from keras_dp.partition.program.operands import Form, Operand
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import Output, name_of, source_of


class Exchanges:
    """Writes the exchanges between towers, and between workers.

    Args:
        construction: the state of the partitioned graph.
        constants: the tensors that are known while tracing.
        early: the tensors of which towers need the whole, directly or indirectly. The sums of all other tensors over the
            workers are sent together.

    Attributes:
        meetings: the nodes of exchanges that need a tensor from every tower.
    """

    def __init__(self, construction: Construction, constants: Constants, early: Container[Output]):
        self.meetings: list[str] = []
        self._early = early
        self._construction = construction
        self._graph, self._propagation, self._feeds = construction.graph, construction.propagation, construction.feeds
        self._devices, self._instances = construction.devices, construction.instances
        self._homes, self._empty_slices = construction.homes, EmptySlices(construction)
        self._lengths = Lengths(construction, constants)
        across = construction.across
        self._workers = None if across is None else WorkerExchanges(construction, across)

    @property
    def with_workers(self) -> list[str]:
        """The names of the tensors that workers exchanged."""
        return self._workers.made if self._workers else []

    def whole(self, operand: Operand, tower: int | None = None) -> str:
        """Returns what an exchange gives home, or a tower that combines it for itself."""
        home = self._homes.of_whole(operand.output) if tower is None else self._devices[tower]
        whole, nodes = self._graph.once(("whole", operand.form, operand.output, home), lambda: self._met(operand, home))
        if tower is not None:
            self._graph.replicated = dict.fromkeys(nodes, tower) | self._graph.replicated
        return str(whole)

    def _met(self, operand: Operand, home: str) -> tuple[str, list[str]]:
        """Returns the whole of a tensor on a device, and the nodes there that combine it."""
        nodes, towers = self._graph.function.node_def, self._graph.towers
        begin = len(nodes)
        whole = self._combined(operand, home)
        # All towers have met when one of them has, or home.
        self._graph.once(("met", operand.form, operand.output), lambda: self.meetings.append(whole))
        combining: list[str] = []
        for node in nodes[begin:]:
            of_towers = any(source in towers or source in combining for source in map(source_of, node.input))
            if of_towers and node.device == full_name(home) and node.name not in towers:
                combining.append(node.name)
        return whole, combining

    def _combined(self, operand: Operand, home: str) -> str:
        output, form = operand.output, operand.form
        dtype, facts = self._propagation.static(output).dtype, self._propagation.facts[output]
        match form:
            case Form.GATHER:
                return self._gathered(output, dtype, home)
            case Form.OWN_ROWS:
                return self._concatenated(output, self._empty_slices.rows(output, 0), 0, home)
            case Form.VARIANCE:
                return self._variance(output, operand.parts[1], home)
            case Form.FIRST:
                return self._of_first(output, dtype, home)
            case Form.LAST:
                own, entries = self._instances.part(output, len(self._devices) - 1), facts.entries
                if entries is None or not facts.counts_rows():
                    return own
                counts = np.vectorize(lambda number: isinstance(number, Rows), otypes=[bool])(entries)
                return self.of_all_rows(own, counts, dtype)
        return self._reduced(output, form.name.lower(), dtype, home)

    def of_all_rows(self, own: str, counts: np.ndarray, dtype: tf.DType) -> str:
        """Returns integers as the whole batch has them, from those of the last tower.

        Args:
            own: the tower's integers.
            counts: for each integer, whether it is a multiple of the number of rows; the others are the same for all rows.
            dtype: the dtype of the integers.
        """
        local = self._graph.cast(self._feeds.rows[-1], tf.int32, dtype)
        total = self._graph.cast(self._feeds.batch_rows, tf.int32, dtype)
        per_row = self._graph.binary("FloorDiv", own, local, dtype)
        rows = self._graph.binary("Mul", per_row, total, dtype)
        rows = self._graph.binary("Mul", rows, self._graph.constant(counts, dtype), dtype)
        rest = self._graph.binary("Mul", own, self._graph.constant(~counts, dtype), dtype)
        return self._graph.binary("AddV2", rows, rest, dtype)

    def _of_first(self, output: Output, dtype: tf.DType, home: str) -> str:
        """Returns the own value of the first tower that has rows: the tower with the first row of the batch."""
        kept = self._graph.once(("of first", output), lambda: self._kept_of_first(output, dtype))
        name = f"first/{output[0]}"
        own = self._graph.add("AddN", kept, home, name, N=len(kept), T=dtype)
        given = Given(own, self._spec(output), home)
        return self._workers.reduced(given, "sum", name) if self._workers else own

    def _kept_of_first(self, output: Output, dtype: tf.DType) -> list[str]:
        """Returns the towers' own values, of which all but that of the first tower are zeros."""
        kept = []
        for tower, device in enumerate(self._devices):
            part = self._instances.part(output, tower)
            zeros = self._graph.add("ZerosLike", [part], device, "zeros", tower, T=dtype)
            kept.append(self._graph.add("SelectV2", [self.has_first(tower), part, zeros], device, "of_first", tower, T=dtype))
        return kept

    def _reduced(self, output: Output, reduction: str, dtype: tf.DType, home: str) -> str:
        own = self._of_towers(output, reduction, home)
        if self._workers is None:
            return own
        name, spec = f"{reduction}/{output[0]}", self._spec(output)
        if reduction != "sum":
            return self._workers.reduced(Given(own, spec, home), reduction, name)
        sent = self._propagation.static(self._narrowest(output)).dtype
        given = Given(self._as(own, dtype, sent, home), tf.TensorSpec(spec.shape, sent), home)
        return self._as(self._workers.sum(given, name, output in self._early), sent, dtype, home)

    def _variance(self, output: Output, mean: Operand, home: str) -> str:
        """Returns the variance of all rows from the variances of the towers' rows around their own means: see `moments`."""
        spec, name = self._spec(output), f"variance/{output[0]}"
        count, rank = len(self._devices), len(spec.shape)
        part_of_mean = Given(self._of_towers(mean.output, "sum", home), spec, home)
        parts = [*self._empty_slices.parts(mean.output, "sum"), *self._empty_slices.parts(output, "sum")]
        shares = Given(self._shares(rank, spec.dtype, home), tf.TensorSpec([count, *[1] * rank], spec.dtype), HOST)

        def combined(*tensors: tf.Tensor) -> list[tf.Tensor]:
            *parts, mean, shares = tensors
            if self._workers:
                mean = tf.math.divide_no_nan(mean, tf.reduce_sum(shares))
            return [variance_of_parts(parts[:count], parts[count:], mean, shares)]

        variance = self._graph.unique(name)
        given = [*(Given(part, spec, home) for part in parts), part_of_mean, shares]
        self._graph.inline(combined, given, [variance], known_as="variance of parts")
        if self._workers is None:
            return variance
        whole_mean = self.whole(Operand(Form.SUM, mean.output, (mean,)))
        return self._workers.variance(part_of_mean, Given(variance, spec, home), whole_mean, name)

    def _shares(self, rank: int, dtype: tf.DType, home: str) -> str:
        """Returns the shares of the batch's rows that the N towers have, of shape (N, 1, ..., 1) with `rank` ones."""
        known, number = self._construction.known_rows, dtype.as_numpy_dtype
        if known is not None:
            shares = np.asarray(known.own_rows, number) / np.asarray(known.batch_rows, number)
            return self._graph.constant(shares.reshape(-1, *[1] * rank), dtype, home)

        def written() -> str:
            rows, count = self._feeds.own_rows, len(self._devices)
            packed = self._graph.add("Pack", rows, HOST, "own_rows", N=count, T=tf.int32, axis=0)
            own, all_rows = (self._graph.cast(rows, tf.int32, dtype, HOST) for rows in (packed, self._feeds.batch_rows))
            inputs = [
                self._graph.binary("RealDiv", own, all_rows, dtype, HOST),
                self._graph.constant([count, *[1] * rank], device=HOST),
            ]
            return self._graph.add("Reshape", inputs, HOST, "shares", T=dtype, Tshape=tf.int32)

        return str(self._graph.once(("shares", rank, dtype), written))

    def own_mean(self, part: str, tower: int, dtype: tf.DType) -> str:
        """Returns the mean of a tower's rows, from its part of the mean of all rows."""
        all_rows, own = (
            self._graph.cast(rows, tf.int32, dtype, HOST) for rows in (self._feeds.batch_rows, self._feeds.rows[tower])
        )
        scale = self._graph.binary("RealDiv", all_rows, own, dtype, HOST)
        return self._graph.add("Mul", [part, scale], self._devices[tower], "own_mean", tower, T=dtype)

    def _spec(self, output: Output) -> tf.TensorSpec:
        return self._propagation.static(output).spec()

    def _as(self, tensor: str, dtype: tf.DType, wanted: tf.DType, device: str) -> str:
        """Casts a tensor from a dtype to the wanted one, if they differ."""
        return tensor if dtype == wanted else self._graph.add("Cast", [tensor], device, "cast", SrcT=dtype, DstT=wanted)

    def _of_towers(self, output: Output, reduction: str, home: str) -> str:
        """Returns the sum, or another reduction, over the towers of this worker."""
        return str(self._graph.once((reduction, output, home), lambda: self._reduced_by_towers(output, reduction, home)))

    def _reduced_by_towers(self, output: Output, reduction: str, home: str) -> str:
        dtype = self._propagation.static(output).dtype
        name, count = f"{reduction}/{output[0]}", len(self._devices)
        sent = self._narrowest(output) if reduction == "sum" else output
        narrow = self._propagation.static(sent).dtype
        parts = self._empty_slices.parts(sent, reduction)
        if reduction == "sum" and len({*self._devices}) < count:
            parts, narrow = self._graph.once(("sums", output), lambda: self._sums_of_devices(parts, narrow, dtype, name)), dtype
        parts = [self._as(part, narrow, dtype, home) for part in parts]
        if reduction not in ("sum", "prod"):
            # A tower without rows gives another tower's part. TensorFlow's graph optimizer takes a tensor that is stacked with
            # itself for the first result of its node.
            parts = list(dict.fromkeys(parts))
            if len(parts) == 1:
                return parts[0]
        # AddN begins with any addend whose memory nothing else holds at that moment, so that three floats and more would be
        # rounded otherwise each time. So would a chain of additions, which the graph optimizer turns into AddN.
        if reduction == "sum" and (len(parts) <= 2 or dtype.is_integer):
            return self._graph.add("AddN", parts, home, name, N=len(parts), T=dtype)
        return self._graph.reduced(reduction.capitalize(), parts, dtype, home, name)

    def _sums_of_devices(self, parts: Sequence[str], narrow: tf.DType, dtype: tf.DType, name: str) -> list[str]:
        """Adds the parts of towers on one device, each to the sum of those before it as it comes: two are in memory at most.

        A later tower waits for each addition but the last one, which is no tower's. So none of them becomes a part of AddN.
        """
        sums: dict[str, str] = {}
        for tower, (device, part) in enumerate(zip(self._devices, parts, strict=True)):
            own = self._as(part, narrow, dtype, device)
            if device in sums:
                adder = tower if device in self._devices[tower + 1 :] else None
                own = self._graph.add("AddN", [sums[device], own], device, name, adder, N=2, T=dtype)
            sums[device] = own
        return [*sums.values()]

    def _narrowest(self, output: Output) -> Output:
        """Returns the tensor to send: the one from which the output was cast, if that has fewer bytes, else the output."""
        narrowest = output
        while True:
            name = output[0]
            definition = self._propagation.nodes[name]
            is_cast = definition.op == "Cast" and self._propagation.static(output).dtype.is_floating
            if not (is_cast or definition.op in ("Identity", "Snapshot")) or self._propagation.plans[name].is_at_home:
                return narrowest
            output = self._propagation.sources[name][0]
            dtype, least = self._propagation.static(output).dtype, self._propagation.static(narrowest).dtype
            if not dtype.is_floating or not self._instances.is_on_towers(output):
                return narrowest
            if dtype.size > least.size:
                # The cast rounded it, so the wider tensor has other values.
                return narrowest
            narrowest = output if dtype.size < least.size else narrowest

    def finish(self) -> None:
        """Writes the sums that were postponed."""
        if self._workers:
            self._workers.finish()

    def _gathered(self, output: Output, dtype: tf.DType, home: str) -> str:
        placement = self._propagation.facts[output].placement
        assert isinstance(placement, Shard)
        axis, parts = placement.axis, self._graph.once(("rows", output), lambda: self._rows(output, placement, dtype))
        if self._workers:
            # Gather segment by segment, since the rows of all workers in a segment follow each other.
            count = len(self._devices)
            sizes = [None if i == axis else size for i, size in enumerate(self._spec(output).shape)]
            spec = tf.TensorSpec(sizes, dtype)
            each = [self._concatenated(output, parts[i : i + count], axis, home) for i in range(0, len(parts), count)]
            parts = [
                self._workers.gathered(Given(own, spec, home), axis, block, f"gather/{output[0]}")
                for own, block in zip(each, placement.blocks, strict=True)
            ]
        return self._concatenated(output, parts, axis, home)

    def _rows(self, output: Output, placement: Shard, dtype: tf.DType) -> list[str]:
        """Returns the towers' rows, segment by segment."""
        parts, segments = self._empty_slices.rows(output, placement.axis), len(placement.blocks)
        if segments == 1:
            return parts
        split = [self._segments(output, part, placement, tower, dtype) for tower, part in enumerate(parts)]
        return [pieces[segment] for segment in range(segments) for pieces in split]

    def _concatenated(self, output: Output, parts: list[str], axis: int, home: str) -> str:
        if len(parts) == 1:
            return parts[0]
        dtype = self._propagation.static(output).dtype
        inputs = [*parts, self._graph.constant(axis, device=home)]
        return self._graph.add("ConcatV2", inputs, home, f"gather/{output[0]}", N=len(parts), T=dtype, Tidx=tf.int32)

    def _segments(self, output: Output, part: str, placement: Shard, tower: int, dtype: tf.DType) -> list[str]:
        """Splits a tower's rows into segments."""
        device, count = self._devices[tower], len(placement.blocks)
        axis = self._graph.constant(placement.axis, device=device)
        if len(set(placement.blocks)) == 1:
            split = self._graph.add("Split", [axis, part], device, "segments", tower, T=dtype, num_split=count)
        else:
            sizes = self._lengths.of_tower(placement.blocks, tower)
            split = self._graph.add(
                "SplitV", [part, sizes, axis], device, "segments", tower, T=dtype, Tlen=tf.int32, num_split=count
            )
        return [name_of(split, segment) for segment in range(count)]

    def share(self, output: Output, whole: str, tower: int, device: str) -> str:
        """Returns a tower's part of a sum that is already whole: one tower takes all of it, the others take zeros.

        Args:
            output: the sum.
            whole: the name of the whole sum.
            tower: the number of the tower.
            device: the device of the whole, which makes the zeros.
        """
        if self._construction.takes_sums(tower):
            return whole
        dtype = self._propagation.static(output).dtype
        zeros = str(
            self._graph.once(("zeros", output, device), lambda: self._graph.add("ZerosLike", [whole], device, "zeros", T=dtype))
        )
        if self._workers is None:
            return zeros
        has_first = self.has_first(tower)
        return str(
            self._graph.once(
                ("part", output, tower),
                lambda: self._graph.add("SelectV2", [has_first, whole, zeros], self._graph.home, "part", T=dtype),
            )
        )

    def has_first(self, tower: int) -> str:
        """Returns whether a tower has the first row of the batch. Exactly one tower of all workers has it."""
        begins = self._graph.binary("Equal", self._feeds.begins[tower], self._graph.constant(0))
        known = self._construction.known_rows
        if known is not None:
            return self._graph.constant(known.begins[tower] == 0 and known.own_rows[tower] > 0, tf.bool)
        return str(
            self._graph.once(
                ("has_first", tower),
                lambda: self._graph.add("LogicalAnd", [begins, self._feeds.is_alive[tower]], self._graph.home, "has_first"),
            )
        )

    def cut(self, output: Output, wholes: Sequence[str], need: Shard, devices: Sequence[str]) -> list[str]:
        """Returns each tower's rows of a whole tensor. A single entry for all rows is given to every tower.

        Args:
            output: the tensor.
            wholes: the N names of the whole tensor; each is on the device on which a tower's rows are cut.
            need: the rows.
            devices: the N devices on which they are cut.
        """
        static = self._propagation.static(output)
        assert static.shape is not None
        has_rows = self._has_as_many(self._propagation.facts[output].placement, need) or counts_all(
            static.shape[need.axis], need.blocks, self._propagation.batch_rows
        )
        slices = []
        for tower, (whole, device) in enumerate(zip(wholes, devices, strict=True)):
            begins, lengths = self._segments_of(output, whole, need, tower, has_rows)
            ranges = zip(begins, lengths, strict=True)
            rank, dtype = len(static.shape), static.dtype
            pieces = [self._graph.range_along(whole, need.axis, rank, begin, length, dtype, device) for begin, length in ranges]
            if len(pieces) > 1:
                inputs = [*pieces, self._graph.constant(need.axis)]
                pieces = [self._graph.add("ConcatV2", inputs, device, "cut", N=len(inputs) - 1, T=dtype, Tidx=tf.int32)]
            slices += pieces
        return slices

    def _has_as_many(self, placement: Placement, need: Shard) -> bool:
        """Returns whether a tensor is known to have as many entries along the needed rows: it has rows there, too."""
        if not isinstance(placement, Shard) or placement.axis != need.axis:
            return False
        # Where the needed length is not known, it is taken from the tensor itself.
        return Rows(placement.blocks).total == Rows(need.blocks).total or not all(isinstance(one, int) for one in need.blocks)

    def _segments_of(self, output: Output, whole: str, need: Shard, tower: int, has_rows: bool) -> tuple[list[str], list[str]]:
        """Returns where a tower's rows begin in each segment of a whole tensor, and how many entries they have there."""
        graph, count, dtype = self._graph, len(need.blocks), self._propagation.static(output).dtype
        blocks: list[str]
        if all(isinstance(block, int) for block in need.blocks) or measured_blocks(need.blocks):
            last = len(self._devices) - 1
            blocks = [self._lengths.of_row(block, last, graph.home) for block in need.blocks]
        else:
            all_rows = graph.binary("Mul", self._feeds.batch_rows, graph.constant(count))
            blocks = [graph.binary("FloorDiv", graph.size(whole, need.axis, dtype), all_rows)] * count
        ends = [graph.binary("Mul", self._feeds.batch_rows, block) for block in blocks]
        firsts = [graph.constant(0), *itertools.accumulate(ends, lambda a, b: graph.binary("AddV2", a, b))]
        is_one = graph.constant(False, tf.bool)
        if not has_rows:
            size = graph.once(
                ("one or rows", output, need),
                lambda: self._one_or(firsts[-1], graph.size(whole, need.axis, dtype), output[0]),
            )
            is_one = graph.binary("Equal", size, graph.constant(1))
        begins, lengths = [], []
        for i, (first, block) in enumerate(zip(firsts, blocks, strict=False)):
            begin = graph.binary("AddV2", first, graph.binary("Mul", self._feeds.begins[tower], block))
            length = graph.binary("Mul", self._feeds.rows[tower], block)
            begins.append(graph.select(is_one, graph.constant(0), begin))
            lengths.append(graph.select(is_one, graph.constant(int(i == 0)), length))
        return begins, lengths

    def _one_or(self, rows: str, size: str, name: str) -> str:
        """Returns a size that is not known while tracing, and checks in the step that it is 1 or the size along the rows."""
        is_one = self._graph.binary("Equal", size, self._graph.constant(1))
        is_rows = self._graph.binary("Equal", size, rows)
        either = self._graph.add("LogicalOr", [is_one, is_rows], self._graph.home, "one_or_rows")
        message = tf.make_tensor_proto(
            f"keras_dp: the tensor {name!r} meets rows of the batch, and must have one entry, or as many as the rows. Its size "
            "is not known while tracing: give it a fixed shape. Received the number of its entries, then that of the rows:"
        )
        said = self._graph.add("Const", [], HOST, "message", dtype=tf.string, value=message)
        types = [tf.string, tf.int32, tf.int32]
        check = self._graph.add("Assert", [either, said, size, rows], HOST, "check", T=types)
        return self._graph.add("Identity", [size, f"^{check}"], self._graph.home, "size", T=tf.int32)
