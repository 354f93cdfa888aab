"""Write the functions that loops, branches and calls run on a tower, for the tower's own number of rows."""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from keras_dp.partition.building.constants import as_read
from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.node import Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Need, Shard
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing.obstacles import can_cut
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.program.known import are_known
from keras_dp.partition.tensorflow_internals import add_function, is_stateful, unused_function_name
from keras_dp.partition.tracing.names import Output, name_of, output_of


class TowerBodies:
    """Writes the functions that nodes run on towers, if the numbers of rows are known while the step is traced.

    The traced functions state the number of rows of the whole batch, in constants and in shapes.

    Args:
        graph: the traced graph, which keeps the functions alive.
        rows: the numbers of rows.
    """

    def __init__(self, graph: tf.Graph, rows: RowCounts):
        self._graph, self._rows = graph, rows

    def on_tower(self, definition: Any, plan: Plan, tower: int) -> Any:
        """Returns a loop, branch or call that runs a tower's own functions."""
        made = node_def_pb2.NodeDef()
        made.CopyFrom(definition)
        for attribute, inside in plan.functions.items():
            made.attr[attribute].func.name = self._function(inside, tower)
        stated = made.attr["output_shapes"].list.shape if "output_shapes" in made.attr else ()
        for shape, facts in zip(stated, plan.outputs, strict=False):
            if isinstance(facts.placement, Shard) and not shape.unknown_rank:
                shape.dim[facts.placement.axis].size = -1
        return made

    def _function(self, inside: Propagation, tower: int) -> str:
        """Writes the function through which facts were propagated, and returns its name."""
        written = _Body(self, inside, tower, self._rows).function
        add_function(written, self._graph)
        return str(written.signature.name)


class _Body:
    """Writes one function for one tower."""

    def __init__(self, bodies: TowerBodies, inside: Propagation, tower: int, rows: RowCounts):
        self._inside, self._rows, self._tower = inside, rows, tower
        self._own_rows = max(rows.own_rows[tower], 1)
        traced = inside.traced
        self._writer = GraphWriter("", prefix="")
        # The names here, by traced name: traced nodes and arguments may be called as what is written for them.
        self._made = {name: self._writer.unique(name) for name in traced.arguments}
        # Arguments stay in their order.
        self._arguments = [self._writer.unique(f"argument_{i}") for i in range(len(traced.arguments))]
        self._writer.given.update(zip(self._made.values(), self._arguments, strict=True))
        for definition in traced.nodes:
            if definition.name in traced.handles:
                continue
            plan = inside.plans[definition.name]
            needs = plan.needs or [REPLICATE] * len(inside.sources[definition.name])
            pairs = enumerate(zip(inside.sources[definition.name], needs, strict=True))
            inputs = [self._form(output, need, plan.readings.get(i)) for i, (output, need) in pairs]
            own = bodies.on_tower(definition, plan, tower) if plan.functions else definition
            controls = [f"^{self._made[name]}" for name in inside.awaited[definition.name]]
            self._made[definition.name] = self._writer.copy(own, "", inputs, controls)
        self.function = self._writer.function
        self._sign()

    def _form(self, output: Output, need: Need, reading: np.ndarray | None) -> str:
        """Returns a tensor in the form that a node of the function needs."""
        name = name_of(self._made[output[0]], output[1])
        if need == LOCAL_SHAPE:
            entries = self._inside.facts[output].entries if reading is None else reading
            if entries is not None and are_known(entries) and self._inside.static(output).dtype.is_integer:
                return self._integers(output, entries)
            if reading is not None:
                return self._as_read(output, name, reading)
        if isinstance(need, Shard) and self._inside.facts[output].placement == REPLICATE:
            static = self._inside.static(output)
            if can_cut(static, need, self._inside.batch_rows):
                return self._own_rows_of(name, need, static)
        return name

    def _integers(self, output: Output, entries: np.ndarray) -> str:
        """Writes integers that count the tower's own rows."""
        numbers = [number.total * self._own_rows if isinstance(number, Rows) else number for number in entries.flat]
        return self._writer.constant(np.reshape(numbers, entries.shape), self._inside.static(output).dtype, "")

    def _as_read(self, output: Output, name: str, reading: np.ndarray) -> str:
        """Writes a shape in which some integers are read as row counts, and others are not known."""
        entries = self._inside.facts[output].entries
        assert entries is not None
        is_read, read = as_read(entries, reading)
        inputs = [self._writer.constant(is_read, tf.bool, ""), self._integers(output, read), name]
        return self._writer.add("SelectV2", inputs, "", "read", T=self._inside.static(output).dtype)

    def _own_rows_of(self, name: str, need: Shard, static: Any) -> str:
        """Cuts the tower's rows from a tensor that has one block for each row."""
        begin, length = (number * need.blocks[0] for number in (self._rows.begins[self._tower], self._own_rows))
        begins = [begin if axis == need.axis else 0 for axis in range(static.rank)]
        lengths = [length if axis == need.axis else -1 for axis in range(static.rank)]
        inputs = [name, self._writer.constant(begins, device=""), self._writer.constant(lengths, device="")]
        return str(
            self._writer.once(
                ("own rows", name, need),
                lambda: self._writer.add("Slice", inputs, "", "own_rows", T=static.dtype, Index=tf.int32),
            )
        )

    def _sign(self) -> None:
        """Writes the signature of the function: its arguments, results and effects."""
        traced, function = self._inside.traced, self.function
        signature = function.signature
        signature.name = unused_function_name("on_tower")
        for i, name in enumerate(traced.arguments):
            argument = signature.input_arg.add(name=self._arguments[i])
            argument.type = self._inside.static((name, 0)).dtype.as_datatype_enum
            handle = traced.handles[name]
            for part in handle.shape_and_type if handle is not None else ():
                argument.handle_data.add(dtype=part.dtype, shape=part.shape)
        for i, name in enumerate(traced.outputs):
            signature.output_arg.add(name=f"result_{i}").type = self._inside.static(output_of(name)).dtype.as_datatype_enum
            node, port = output_of(name)
            function.ret[f"result_{i}"] = self._writer.inside(name_of(self._made[node], port))[0]
        for name in traced.effects:
            function.control_ret[name] = self._made[name]
            signature.control_output.append(name)
        signature.is_stateful = any(is_stateful(definition.op) for definition in traced.nodes)
