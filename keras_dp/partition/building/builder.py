"""Build the partitioned graph, with each node at home or on towers."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.bodies import TowerBodies
from keras_dp.partition.building.branches import with_merged_reads
from keras_dp.partition.building.constants import Constants
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.exchanges import Exchange, Exchanges
from keras_dp.partition.building.forms import Forms
from keras_dp.partition.building.homes import Homes
from keras_dp.partition.building.instances import Feeds, Instances
from keras_dp.partition.building.lookups import Lookups
from keras_dp.partition.building.needed import Kind, NeededInstances, local_need
from keras_dp.partition.building.target import Target
from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.operations import LOOPS
from keras_dp.partition.facts.placements import REPLICATE, Replicate, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import Output, output_of, source_of


@dataclasses.dataclass(frozen=True)
class Built:
    """Describes a partitioned graph.

    Attributes:
        target: the devices.
        graph: the nodes, in topological order.
        outputs: the names of the wanted tensors: of the whole batch, or of this worker's rows.
        own_rows: the names of the outputs that are this worker's rows alone.
        effects: the names of further nodes that must run.
        propagation: the plan of each traced node.
        instances: the nodes that compute each traced node.
        exchanges: the exchanges between towers.
        meetings: the names of the nodes where towers meet.
        variables: the names of the tensors that refer to variables.
        variable_devices: the devices of variables by name, as far as they are known.
    """

    target: Target
    graph: GraphWriter
    outputs: list[str]
    own_rows: Collection[str]
    effects: list[str]
    propagation: Propagation
    instances: Instances
    exchanges: list[Exchange]
    meetings: list[str]
    variables: list[str]
    variable_devices: dict[str, str]


class Builder:
    """Makes the nodes of the partitioned graph.

    Args:
        propagation: the plan of each node.
        target: the devices.
        feeds: the names of the tensors that the graph is given.
        known_rows: the numbers of rows, if they are known while the step is traced; else None.

    Attributes:
        graph: the graph so far.
        exchanges: the exchanges between towers so far.
        forms: the converter of tensors to the form that a node needs.
    """

    def __init__(self, propagation: Propagation, target: Target, feeds: Feeds, known_rows: RowCounts | None = None):
        self.propagation = propagation
        self._target = target
        self.devices = list(target.devices)
        self.graph = GraphWriter(target.home)
        self.feeds = feeds if known_rows is None else self._with_constants(feeds, known_rows)
        self._instances = Instances(feeds.slices)
        self._homes = Homes(propagation, target.home)
        construction = Construction(
            self.graph, propagation, self.devices, self.feeds, known_rows, self._instances, self._homes, target.across
        )
        constants = Constants(self.graph, propagation)
        self._needed = NeededInstances(propagation, feeds.whole, constants)
        self.exchanges = Exchanges(construction, constants)
        self.forms = Forms(construction, self.exchanges, constants)
        self._bodies = None if known_rows is None else TowerBodies(propagation.traced.graph, known_rows)

    def _with_constants(self, feeds: Feeds, known: RowCounts) -> Feeds:
        """Returns the names that the graph is given, with constants in the place of the numbers of rows."""

        def written(numbers: Sequence[int]) -> list[str]:
            return [self.graph.constant(number, device=HOST) for number in numbers]

        return dataclasses.replace(
            feeds,
            batch_rows=self.graph.constant(known.batch_rows, device=HOST),
            begins=written(known.begins),
            rows=written([max(rows, 1) for rows in known.own_rows]),
            own_rows=written(known.own_rows),
            worker_rows="" if known.worker_rows is None else self.graph.constant(known.worker_rows, device=HOST),
            is_alive=[self.graph.constant(rows > 0, tf.bool, HOST) for rows in known.own_rows],
        )

    def build(self, outputs: Iterable[str], effects: Iterable[str]) -> Built:
        """Makes the nodes that some outputs and effects of the traced graph need, and no others.

        Args:
            outputs: the names of tensors.
            effects: the names of nodes.
        """
        wanted, effects = [output_of(name) for name in outputs], list(effects)
        needed = self._needed.of([(output, Shard(0) if self._keeps(output) else REPLICATE) for output in wanted], effects)
        self._lookups = Lookups(self.propagation, needed)
        self.exchanges.early = self._needed.early(needed)
        makers: dict[Kind, Callable[[Any], Any]] = {
            Kind.SHAPES: self._make_local_shapes,
            Kind.TOWERS: self._make_on_towers,
            Kind.HOME: self._make_at_home,
        }
        for definition in self.propagation.traced.nodes:
            for kind, make in makers.items():
                if (kind, definition.name) in needed:
                    make(definition)
        own = {output: self.exchanges.own_rows(output) for output in wanted if self._keeps(output)}
        results = [own.get(output) or self.forms.whole(output) for output in wanted]
        self.exchanges.finish()
        traced = self.propagation.traced
        return Built(
            self._target,
            self.graph,
            results,
            own.values(),
            [*(name[1:] for effect in effects for name in self._controls(effect)), *self.exchanges.with_workers],
            self.propagation,
            self._instances,
            self.exchanges.made,
            self.exchanges.meetings,
            [self.feeds.whole[name] for name in traced.handles if self.propagation.static((name, 0)).dtype == tf.resource],
            {self.feeds.whole[name]: place for name, place in traced.places.items()},
        )

    @property
    def begins(self) -> Sequence[str]:
        """For each tower, the index of its first row, int32."""
        return self.feeds.begins

    @property
    def rows(self) -> Sequence[str]:
        """For each tower, the number of rows that it computes with, int32; at least 1."""
        return self.feeds.rows

    def _keeps(self, output: Output) -> bool:
        """Returns whether a worker keeps its own rows of a tensor: one entry of the first axis for each row."""
        across, has_rows = self._target.across, self.propagation.facts[output].placement == Shard(0)
        return across is not None and across.keeps_rows and has_rows and self.propagation.is_on_towers(output)

    # Make instances.

    def _make_at_home(self, definition: Any) -> None:
        if self._needed.counts_all_rows(definition):
            self._instances.home[definition.name] = self._shape_of_whole(definition)
        else:
            device = self._homes.of_node(definition)
            inputs = [self.forms.whole(output, device) for output in self.propagation.sources[definition.name]]
            if definition.op in LOOPS:
                inputs = self._beside_loop(definition, inputs, device)
            controls = self._awaited(definition.name)
            traced = self.propagation.traced
            merged = with_merged_reads(definition, traced.library, traced.graph)

            def copied() -> str:
                return self.graph.copy(merged, device, inputs, controls)

            is_read = definition.op == "ReadVariableOp"
            self._instances.home[definition.name] = self._read_once(inputs[0], controls, copied) if is_read else copied()

    def _make_on_towers(self, definition: Any) -> None:
        plan, outputs = self.propagation.plans[definition.name], self.propagation.sources[definition.name]
        made = []
        for tower in range(len(self.devices)):
            device = self._device(definition.name, tower)
            needs = enumerate(zip(outputs, plan.needs or (), strict=True))
            inputs = [self.forms.form(output, need, tower, device, plan.readings.get(i)) for i, (output, need) in needs]
            if definition.op in LOOPS:
                inputs = self._beside_loop(definition, inputs, device, tower)
            if plan.instance and not self._lookups.is_at_table(definition.name):
                made.append(plan.instance(self, definition, tower, inputs))
            else:
                own = self._bodies.on_tower(definition, plan, tower) if self._bodies and plan.functions else definition
                made.append(self.copy(own, tower, inputs))
        self._instances.towers[definition.name] = made

    def _device(self, name: str, tower: int) -> str:
        """Returns the device of a traced node's instance for a tower: the tower's, or that of the table which it looks up."""
        table = self._lookups.table_of(name)
        return self.devices[tower] if table is None else self._homes.of_node(self.propagation.nodes[table])

    def _beside_loop(self, definition: Any, inputs: Sequence[str], device: str, tower: int | None = None) -> list[str]:
        """Copies the inputs of a loop to its device before it begins.

        TensorFlow keeps a loop's variables on the devices of its inputs, and would otherwise send them in each round.
        """
        placed = []
        for output, tensor in zip(self.propagation.sources[definition.name], inputs, strict=True):
            dtype = self.propagation.static(output).dtype
            is_sent = dtype not in (tf.resource, tf.variant)
            placed.append(
                self.graph.add("Identity", [tensor], device, f"{definition.name}/input", tower, T=dtype) if is_sent else tensor
            )
        return placed

    def _make_local_shapes(self, definition: Any) -> None:
        outputs = self.propagation.sources[definition.name]
        needs = [local_need(self.propagation.facts[output].placement) for output in outputs]
        made = []
        for tower in range(len(self.devices)):
            device = self._device(definition.name, tower)
            inputs = [self.forms.form(output, need, tower, device) for output, need in zip(outputs, needs, strict=True)]
            made.append(self.copy(definition, tower, inputs))
        self._instances.shapes[definition.name] = made

    def _shape_of_whole(self, definition: Any) -> str:
        """Writes the Shape, ShapeN or Size of whole tensors that towers hold as slices or parts."""
        dtype = tf.as_dtype(definition.attr["out_type"].type or tf.int32.as_datatype_enum)
        outputs = self.propagation.sources[definition.name]
        shapes = [self._whole_shape(output, dtype) for output in outputs]
        name = f"home/{definition.name}"
        if definition.op == "Size":
            return self.graph.add(
                "Prod", [shapes[0], self.graph.constant(0)], self.graph.home, name, T=dtype, Tidx=tf.int32, keep_dims=False
            )
        if definition.op == "Shape":
            return self.graph.add("Identity", shapes, self.graph.home, name, T=dtype)
        return self.graph.add("IdentityN", shapes, self.graph.home, name, T=[dtype] * len(shapes))

    def _whole_shape(self, output: Output, dtype: tf.DType) -> str:
        static, placement = self.propagation.static(output), self.propagation.facts[output].placement
        is_given = output[0] in self.feeds.whole
        is_there = static.rank is None if is_given else self.propagation.plans[output[0]].is_at_home
        if isinstance(placement, Replicate) or is_there:
            return self.graph.add("Shape", [self.forms.whole(output)], self.graph.home, "shape", T=static.dtype, out_type=dtype)
        last = len(self.devices) - 1
        part, device = self._instances.part(output, last), self._device(output[0], last)
        shape = self.graph.add("Shape", [part], device, "shape", T=static.dtype, out_type=dtype)
        if not isinstance(placement, Shard):
            return shape
        # Along the axis of the rows, the number of entries is a multiple of the number of rows.
        along = np.arange(static.rank or 0) == placement.axis
        return self.exchanges.of_all_rows(shape, along, dtype)

    # Help rules that make their own instances.

    def count(self, sizes: Sequence[Any], name: str, axes: Sequence[int], dtype: tf.DType, tower: int | None = None) -> str:
        """Counts the entries along some axes of a node's first input, as an int64 scalar on the host.

        Args:
            sizes: the sizes of the axes, as far as they are known.
            name: the traced node.
            axes: the axes.
            dtype: the dtype of the input.
            tower: the tower whose entries are counted; None for the whole batch.
        """
        rows = self.feeds.batch_rows if tower is None else self.feeds.rows[tower]
        output = self.propagation.sources[name][0]
        last = len(self.devices) - 1
        plain = int(np.prod([size for size in sizes if isinstance(size, int)], dtype=np.int64))
        total = self.graph.constant(plain, tf.int64, HOST)
        placement = self.propagation.facts[output].placement
        for size, axis in zip(sizes, axes, strict=True):
            if isinstance(size, int):
                continue
            blocks = placement.blocks if isinstance(placement, Shard) and axis == placement.axis else None
            if blocks is not None and all(isinstance(block, int) for block in blocks):
                factors = [rows, self.graph.constant(sum(blocks), device=HOST)]
            else:
                device = self._device(output[0], last)
                entries = self.graph.size(self.forms.form(output, placement, last, device), axis, dtype, device)
                factors = [entries]
                if blocks is not None:
                    factors = [self.graph.binary("FloorDiv", entries, self.feeds.rows[last], device=HOST), rows]
            for factor in factors:
                total = self.graph.binary("Mul", total, self.graph.cast(factor, tf.int32, tf.int64, HOST), tf.int64, HOST)
        return total

    def read(self, name: str, resource: str, dtype: tf.DType) -> str:
        """Reads the value of a variable, once for all towers."""
        controls = sorted(set(self._awaited(name)))

        def written() -> str:
            return self.graph.add("ReadVariableOp", [resource, *controls], "", f"home/{name}/read", dtype=dtype)

        return self._read_once(resource, controls, written)

    def _read_once(self, resource: str, controls: Iterable[str], read: Callable[[], str]) -> str:
        """Reads a variable with `read`, unless it was read after the same effects."""
        return str(self.graph.once(("read", resource, *sorted(set(controls))), read))

    def copy(self, definition: Any, tower: int, inputs: Sequence[str], operation: str | None = None) -> str:
        """Copies a traced node to a tower, or for it to a table, with other inputs, after the nodes that it waits for."""
        device, controls = self._device(definition.name, tower), self._awaited(definition.name)
        own = None if self._lookups.is_at_table(definition.name) else tower
        return self.graph.copy(definition, device, inputs, controls, operation, own)

    def own_mean(self, part: str, tower: int, dtype: tf.DType) -> str:
        """Returns the mean of a tower's rows, from its part of the mean of all rows."""
        return self.exchanges.own_mean(part, tower, dtype)

    def _awaited(self, name: str) -> list[str]:
        """Returns the control inputs that replace those of a traced node."""
        return [control for source in self.propagation.awaited[name] for control in self._controls(source)]

    def _controls(self, name: str) -> list[str]:
        """Returns the control inputs that replace a control input on a traced node."""
        if not self._needed.is_waited_for(name):
            return []
        made = [self._instances.home[name]] if self.propagation.plans[name].is_at_home else self._instances.towers[name]
        return [f"^{source_of(instance)}" for instance in made]
