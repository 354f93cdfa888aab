"""Build the partitioned graph, with each node at home or on towers."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.bodies import TowerBodies
from keras_dp.partition.building.branches import with_merged_reads
from keras_dp.partition.building.constants import Constants
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.exchanges import Exchanges
from keras_dp.partition.building.forms import Forms
from keras_dp.partition.building.homes import Homes
from keras_dp.partition.building.instances import Feeds, Instances
from keras_dp.partition.building.lookups import Lookups
from keras_dp.partition.building.target import Target
from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.operations import BRANCHES, CASES, LOOPS
from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.slice_bytes import bytes_of_slice
from keras_dp.partition.program.operands import Form, Operand, Operation
from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.program.program import Program
from keras_dp.partition.tensorflow_internals import HOST, results_of
from keras_dp.partition.tracing.names import name_of, source_of


@dataclasses.dataclass(frozen=True)
class Built:
    """Describes a partitioned graph, which can be called once: its function gets a signature then.

    Attributes:
        target: the devices.
        graph: the nodes, in topological order.
        outputs: the names of the wanted tensors: of the whole batch, or of this worker's rows.
        own_rows: the names of the outputs that are this worker's rows alone.
        effects: the names of further nodes that must run.
        propagation: the plan of each traced node.
        program: the operations that the graph has.
        variable_devices: the devices of variables by name, as far as they are known.
    """

    target: Target
    graph: GraphWriter
    outputs: list[str]
    own_rows: Collection[str]
    effects: list[str]
    propagation: Propagation
    program: Program
    variable_devices: dict[str, str]

    def bytes_of_rows(self, name: str) -> float:
        """Returns the bytes of the rows that a node of a tower makes; 0 if it makes none, or stands for no traced node."""
        origin = self.propagation.nodes.get(self.graph.origins.get(name, ""))
        outputs = [] if origin is None else [(origin.name, port) for port in range(len(results_of(origin)))]
        rows = [output for output in outputs if isinstance(self.propagation.facts[output].placement, Shard)]
        return sum(bytes_of_slice(output, self.propagation) for output in rows if self.propagation.static(output).rank)


class Builder:
    """Makes the nodes of the partitioned graph.

    Args:
        program: the operations of home and of the towers.
        propagation: the plan of each node.
        target: the devices.
        feeds: the names of the tensors that the graph is given.
        known_rows: the numbers of rows, if they are known while the step is traced; else None.

    Attributes:
        graph: the graph so far.
    """

    def __init__(self, program: Program, propagation: Propagation, target: Target, feeds: Feeds, known_rows: RowCounts | None):
        self._program, self.propagation, self._target = program, propagation, target
        self.devices = list(target.devices)
        self.graph = GraphWriter(target.home)
        self.feeds = self._with_rows_of_slices(feeds) if known_rows is None else self._with_constants(feeds, known_rows)
        self._instances = Instances(feeds.slices)
        self._homes = Homes(propagation, target.home)
        construction = Construction(
            self.graph, propagation, self.devices, self.feeds, known_rows, self._instances, self._homes, target.across
        )
        constants = Constants(self.graph, propagation)
        self._lookups = Lookups(propagation, program.operations)
        self._exchanges = Exchanges(construction, constants, program.early)
        self._forms = Forms(construction, self._exchanges, constants)
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

    def _with_rows_of_slices(self, feeds: Feeds) -> Feeds:
        """Returns the names that the graph is given; for XLA, with the sizes of slices in the place of the towers' rows.

        XLA knows the sizes of tensors while it compiles a program, but no numbers that the program is given.
        """
        dtypes = {name: self.propagation.static((name, 0)).dtype for name in feeds.slices}
        name = next((name for name, dtype in dtypes.items() if dtype != tf.string), None)
        if name is None or not self._target.jit_compile:
            return feeds
        slices = zip(feeds.slices[name], self.devices, strict=True)
        rows = [self.graph.size(part, 0, dtypes[name], device) for part, device in slices]
        is_alone = len(rows) == 1 and self._target.across is None
        return dataclasses.replace(feeds, rows=rows, batch_rows=rows[0] if is_alone else feeds.batch_rows)

    def build(self) -> Built:
        """Writes the nodes that the outputs and effects need, and no others."""
        makers: dict[Place, Callable[[Operation], list[str]]] = {
            Place.SHAPES: self._own_shapes,
            Place.TOWERS: self._on_towers,
            Place.HOME: lambda operation: [self._at_home(operation)],
            Place.REPLICATED: lambda operation: [self._on_each(operation, tower) for tower in range(len(self.devices))],
        }
        for instance, operation in self._program.operations.items():
            self._instances.made[instance] = makers[operation.place](operation)
        results = list(map(self._forms.whole, self._program.results))
        self._exchanges.finish()
        self._hold_back_writes()
        named = zip(self._program.results, results, strict=True)
        return Built(
            self._target,
            self.graph,
            results,
            {name for operand, name in named if operand.form is Form.OWN_ROWS},
            [*(name[1:] for name in self._controls(self._program.effects)), *self._exchanges.with_workers],
            self.propagation,
            self._program,
            {self.feeds.whole[name]: place for name, place in self.propagation.traced.places.items()},
        )

    def _hold_back_writes(self) -> None:
        """Makes the late operations wait for all exchanges, and for all that can fail."""
        nodes = {node.name: node for node in self.graph.function.node_def}
        met = [f"^{name}" for name in map(source_of, self._exchanges.meetings) if name in nodes]
        failing = [source_of(name) for instance in self._program.failing for name in self._instances.made[instance]]
        results = [self._results_of_branches(nodes[name]) for name in sorted(failing) if nodes[name].op in (*BRANCHES, *CASES)]
        awaited = {*met, *(f"^{name}" for name in itertools.chain(failing, *results))}
        late = [source_of(name) for instance in self._program.late for name in self._instances.made[instance]]
        if late and awaited:
            barrier = self.graph.add("NoOp", sorted(awaited), self.graph.home, "all_have_met")
            for name in dict.fromkeys(late):
                nodes[name].input.append(f"^{barrier}")

    def _results_of_branches(self, node: Any) -> list[str]:
        """Returns nodes that take the results of a condition.

        A node that waits for a condition waits for the operations of its branches that have effects, not for all that can fail:
        lower_if_op.cc, CondBuilder::AddOutputs.
        """
        made = []
        for port, (_, dtype) in enumerate(results_of(node)):
            result = name_of(node.name, port)
            made.append(self.graph.add("Identity", [result], node.device, f"{node.name}/result", T=dtype))
        return made

    @property
    def begins(self) -> Sequence[str]:
        """For each tower, the index of its first row, int32."""
        return self.feeds.begins

    @property
    def rows(self) -> Sequence[str]:
        """For each tower, the number of rows that it computes with, int32; at least 1."""
        return self.feeds.rows

    # Make instances.

    def _at_home(self, operation: Operation) -> str:
        definition, operands = operation.definition, operation.operands
        if any(map(_is_on_towers, operands)):
            return self._shape_of_whole(definition, operands)
        device = self._homes.of_node(definition)
        inputs = [self._forms.whole(operand, device) for operand in operands]
        if definition.op in LOOPS:
            inputs = self._beside_loop(definition, inputs, device)
        controls = self._controls(operation.awaited)
        traced = self.propagation.traced
        merged = with_merged_reads(definition, traced.library, traced.graph)

        if definition.op == "ReadVariableOp":
            return self._read_once(inputs[0], controls, lambda: self.graph.copy(merged, device, inputs, controls))
        return self._copied_home(merged, device, inputs, controls)

    def _on_each(self, operation: Operation, tower: int) -> str:
        """Returns the node that computes a home's operation for a tower: the home's, if all is on the tower's device."""
        definition, device, forms = operation.definition, self.devices[tower], self._forms
        inputs = [
            forms.of_tower(operand, tower, device) if operand.is_replicated else forms.whole(operand, device)
            for operand in operation.operands
        ]
        made = self._copied_home(definition, device, inputs)
        self.graph.replicated.setdefault(made, tower)
        return made

    def _copied_home(self, definition: Any, device: str, inputs: Sequence[str], controls: Sequence[str] = ()) -> str:
        """Copies a node of home to a device, once for home and for the tower there if both take and await the same.

        What home awaits may be a write, which itself awaits what the tower computes.
        """
        name = definition.name
        # AddN begins with any addend whose memory it can reuse at that moment, so that towers would round otherwise.
        is_reordered = definition.op == "AddN" and len(inputs) > 2 and (Place.REPLICATED, name) in self._program.operations

        def copied() -> str:
            if not is_reordered:
                return self.graph.copy(definition, device, inputs, controls)
            dtype = self.propagation.static((name, 0)).dtype
            made = self.graph.reduced("Sum", inputs, dtype, device, f"home/{name}")
            self.graph.origins[made] = name
            return made

        return str(self.graph.once(("home", name, device, *inputs, *controls), copied))

    def _on_towers(self, operation: Operation) -> list[str]:
        definition, plan = operation.definition, self.propagation.plans[operation.definition.name]
        made = []
        for tower in range(len(self.devices)):
            inputs = self._inputs(operation, tower)
            if definition.op in LOOPS:
                inputs = self._beside_loop(definition, inputs, self._device(definition.name, tower), tower)
            if plan.instance and not self._lookups.is_at_table(definition.name):
                made.append(plan.instance(self, definition, tower, inputs))
            else:
                own = self._bodies.on_tower(definition, plan, tower) if self._bodies and plan.functions else definition
                made.append(self.copy(own, tower, inputs))
        return made

    def _own_shapes(self, operation: Operation) -> list[str]:
        towers = range(len(self.devices))
        return [self.copy(operation.definition, tower, self._inputs(operation, tower)) for tower in towers]

    def _inputs(self, operation: Operation, tower: int) -> list[str]:
        device = self._device(operation.definition.name, tower)
        return [self._forms.of_tower(operand, tower, device) for operand in operation.operands]

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

    def _shape_of_whole(self, definition: Any, operands: Sequence[Operand]) -> str:
        """Writes the Shape, ShapeN or Size of whole tensors that towers hold as slices or parts."""
        dtype = tf.as_dtype(definition.attr["out_type"].type or tf.int32.as_datatype_enum)
        shapes = [self._whole_shape(operand, dtype) for operand in operands]
        name = f"home/{definition.name}"
        if definition.op == "Size":
            return self.graph.add(
                "Prod", [shapes[0], self.graph.constant(0)], self.graph.home, name, T=dtype, Tidx=tf.int32, keep_dims=False
            )
        if definition.op == "Shape":
            return self.graph.add("Identity", shapes, self.graph.home, name, T=dtype)
        return self.graph.add("IdentityN", shapes, self.graph.home, name, T=[dtype] * len(shapes))

    def _whole_shape(self, operand: Operand, dtype: tf.DType) -> str:
        output = operand.output
        static, placement = self.propagation.static(output), self.propagation.facts[output].placement
        if not _is_on_towers(operand):
            whole = self._forms.whole(operand)
            return self.graph.add("Shape", [whole], self.graph.home, "shape", T=static.dtype, out_type=dtype)
        last = len(self.devices) - 1
        part, device = self._instances.part(output, last), self._device(output[0], last)
        shape = self.graph.add("Shape", [part], device, "shape", T=static.dtype, out_type=dtype)
        if not isinstance(placement, Shard):
            return shape
        # Along the axis of the rows, the number of entries is a multiple of the number of rows.
        along = np.arange(static.rank or 0) == placement.axis
        return self._exchanges.of_all_rows(shape, along, dtype)

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
        operand, last = self._program.operations[Place.TOWERS, name].operands[0], len(self.devices) - 1
        output = operand.output
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
                entries = self.graph.size(self._forms.of_tower(operand, last, device), axis, dtype, device)
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
        return self._exchanges.own_mean(part, tower, dtype)

    def _awaited(self, name: str) -> list[str]:
        """Returns the control inputs that replace those of a node on towers."""
        operations = self._program.operations
        operation = operations.get((Place.TOWERS, name)) or operations[Place.SHAPES, name]
        return self._controls(operation.awaited)

    def _controls(self, instances: Iterable[Instance]) -> list[str]:
        """Returns control inputs for some instances."""
        return [f"^{source_of(name)}" for instance in instances for name in self._instances.made[instance]]


def _is_on_towers(operand: Operand) -> bool:
    return operand.form in (Form.GIVEN_ROWS, Form.TOWERS)
