"""Describe a node of the graph to rules, and hold the plan that a rule makes for it."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.placements import Facts, ListOf, Need, Partial, Shard
from keras_dp.partition.facts.row_counts import USUAL_ROWS
from keras_dp.partition.facts.rows import Number, Rows, counts_all
from keras_dp.partition.facts.tower_builder import InstanceMaker


@dataclasses.dataclass
class Plan:
    """The plan of how a node is computed.

    Attributes:
        outputs: the `Facts` of each output.
        needs: for each input, the form in which a tower takes it; None if the node is computed once, at home.
        instance: makes a tower's instance of the node; None if the instance is a copy of the node.
        also_at_home: whether home can compute the whole result, too, without a gather.
        gathers: the inputs whose rows are gathered although the node is computed on towers.
        readings: by input, the entries of integers in which numbers are read as row counts. A tower takes its own version.
        functions: by attribute, the propagations through the functions that a loop, branch or call runs on towers.
    """

    outputs: list[Facts]
    needs: Sequence[Need] | None = None
    instance: InstanceMaker | None = None
    also_at_home: bool = False
    gathers: tuple[int, ...] = ()
    readings: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_shape(self, shape: Any, k: int = 0) -> "Plan":
        """Returns the plan with the shape of an output."""
        facts = self.outputs[k]
        outputs = [*self.outputs[:k], Facts(facts.placement, facts.entries, shape), *self.outputs[k + 1 :]]
        return dataclasses.replace(self, outputs=outputs)

    def with_ones(self, axes: Collection[int]) -> "Plan":
        """Returns the plan, after noting that some axes of the first output have one entry."""
        shape = self.outputs[0].shape
        return self if shape is None else self.with_shape([1 if i in axes else size for i, size in enumerate(shape)])

    @property
    def is_at_home(self) -> bool:
        """Whether the node is computed once."""
        return self.needs is None


@dataclasses.dataclass(frozen=True)
class Static:
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: the dtype.
        shape: a list of `int`s and of `Size`s by name; None if the rank is not known.
    """

    dtype: tf.DType
    shape: list[Any] | None

    @property
    def rank(self) -> int | None:
        """The number of axes; None if it is not known."""
        return None if self.shape is None else len(self.shape)

    def spec(self) -> tf.TensorSpec:
        """Returns the dtype and the shape as a `tf.TensorSpec`."""
        return tf.TensorSpec(self.shape and [size if isinstance(size, int) else None for size in self.shape], self.dtype)


class Node:
    """A node, with the known facts of its inputs.

    Attributes:
        name: the node's name in the graph.
        type: the type of its operation, such as "MatMul".
        inputs: the `Facts` of each input.
        statics: the `Static` of each input.
        results: the `Static` of each output, as far as TensorFlow knows it.
        in_body: whether the node is in the body of a loop or branch that each tower runs by itself.
        batch_rows: B, if it was known while the step was traced; else None.
        tower_rows: the number of rows for which a tower's work is planned.
        scope: the beginning of the names of sizes that the node makes, which no other graph has.
    """

    def __init__(
        self,
        definition: Any,
        inputs: list[Facts],
        statics: list[Static],
        results: list[Static],
        in_body: bool = False,
        batch_rows: int | None = None,
        tower_rows: int = USUAL_ROWS,
        scope: str = "",
    ):
        self.definition = definition
        self.name: str = definition.name
        self.type: str = definition.op
        self.inputs = inputs
        self.statics = statics
        self.results = results
        self.in_body = in_body
        self.batch_rows = batch_rows
        self.tower_rows = tower_rows
        self.scope = scope

    @property
    def full_name(self) -> str:
        """The node's name with its scope, which no node of another graph has."""
        return self.scope + self.name

    def with_inputs(self, inputs: list[Facts]) -> "Node":
        """Returns the node with other facts of its inputs."""
        numbers = self.batch_rows, self.tower_rows
        return Node(self.definition, inputs, self.statics, self.results, self.in_body, *numbers, self.scope)

    def counts_all(self, number: Number, blocks: Sequence[Any]) -> bool:
        """Returns whether a number is known to count the entries of all rows, of which each has `blocks`."""
        return counts_all(number, blocks, self.batch_rows)

    def shape(self, i: int) -> list[Any] | None:
        """Returns the shape of an input; None if its rank is not known."""
        return self.statics[i].shape

    def rank(self, i: int) -> int | None:
        """Returns the number of axes of an input; None if it is not known."""
        return self.statics[i].rank

    def dtype(self, i: int) -> tf.DType:
        """Returns the dtype of an input."""
        return self.statics[i].dtype

    def result_rank(self, k: int = 0) -> int | None:
        """Returns the number of axes of an output; None if it is not known."""
        return self.results[k].rank

    def sizes(self, i: int) -> list[Number] | None:
        """Returns the shape of an input, with `Rows` as the size of the axis of its rows."""
        shape, placement = self.shape(i), self.inputs[i].placement
        if shape is None:
            return None
        sizes = list(shape)
        if isinstance(placement, Shard):
            sizes[placement.axis] = Rows(placement.blocks)
        return sizes

    def flag(self, attribute: str) -> bool:
        """Returns a boolean attribute; False if the node does not have it."""
        return bool(self.definition.attr[attribute].b) if attribute in self.definition.attr else False

    def integer(self, attribute: str) -> int:
        """Returns an integer attribute; 0 if the node does not have it."""
        return int(self.definition.attr[attribute].i) if attribute in self.definition.attr else 0

    def integers(self, attribute: str) -> list[int]:
        """Returns an attribute that is a list of integers; an empty list if the node does not have it."""
        return list(self.definition.attr[attribute].list.i) if attribute in self.definition.attr else []

    def fixes_rows(self, attribute: str) -> bool:
        """Returns whether an attribute that is a shape fixes how many rows the first input has on all towers together."""
        placement, shape = self.inputs[0].placement, self.definition.attr[attribute].shape
        return isinstance(placement, Shard) and not shape.unknown_rank and shape.dim[placement.axis].size != -1

    def text(self, attribute: str) -> str:
        """Returns a text attribute; an empty string if the node does not have it."""
        return self.definition.attr[attribute].s.decode() if attribute in self.definition.attr else ""

    def result_dtype(self, k: int = 0) -> tf.DType:
        """Returns the dtype of an output."""
        return self.results[k].dtype

    def is_sum(self, i: int) -> bool:
        """Returns whether an input is a part of a sum on each tower."""
        return self.inputs[i].placement == Partial("sum")

    def is_shard(self, i: int) -> bool:
        """Returns whether an input has rows."""
        return isinstance(self.inputs[i].placement, Shard)

    def is_list(self, i: int) -> bool:
        """Returns whether an input is a TensorList on each tower."""
        return isinstance(self.inputs[i].placement, ListOf)
