"""Propagate placements from the batch to the results."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan, Static
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.facts.placements import (
    LOCAL_SHAPE,
    OWN,
    REPLICATE,
    Facts,
    Partial,
    Placement,
    Shard,
    array_of,
)
from keras_dp.partition.facts.row_counts import USUAL_ROWS
from keras_dp.partition.facts.rows import Size
from keras_dp.partition.facts.sizes import LARGEST, BroadcastAxes, evaluate
from keras_dp.partition.placing import control_flow
from keras_dp.partition.placing.gathered_rows import compute_once_from_gathered_rows
from keras_dp.partition.placing.lists_at_home import lists_wanted_at_home
from keras_dp.partition.placing.measuring import Measures
from keras_dp.partition.placing.moments import mean_of_variance, plan_of_variance
from keras_dp.partition.placing.obstacles import obstacle
from keras_dp.partition.placing.planned import Gathered
from keras_dp.partition.placing.readings import RowSources, readings
from keras_dp.partition.placing.recomputation import Recomputation
from keras_dp.partition.placing.rules import RULES
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.elementwise import CHECKS
from keras_dp.partition.placing.rules.own import with_own
from keras_dp.partition.placing.rules.recurrent import RECURRENT
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.names import Output, data_inputs, name_of, output_of
from keras_dp.partition.tracing.traced import Traced, awaited_effects, traced_function
from keras_dp.partition.tracing.user_lines import user_line

_Blocks = tuple[Any, ...] | None  # the segments of the rows that a node may make; None if it makes no rows
_Entries = Sequence[np.ndarray | None] | None  # the integers of each result, as far as they are known
_LISTS = ("EmptyTensorList", "TensorListReserve")
_INTEGERS = (tf.int32, tf.int64, tf.bool)


class Propagation:
    """Finds the facts of each tensor of a graph, and a plan for each node.

    Whatever a node needs can be had: all rows and parts on towers can be gathered and summed, and all tensors can be cut that
    a tower takes as rows. A plan without this property is refused, and its node is computed once. Only a list cannot be
    gathered. If a node needs a list at home, the list and all nodes after it are planned again, with the list at home.

    Args:
        traced: the graph.
        arguments: the facts of its placeholders, by name.
        in_body: whether the graph is the body of a loop or branch, which each tower runs by itself.
        batch_rows: B, if it was known while the step was traced; else None.
        tower_rows: the number of rows for which a tower's work is planned.

    Attributes:
        facts: the facts of each output.
        plans: the plan of each node, by name.
        nodes: the NodeDefs, by name.
        sources: by node, the outputs that it takes.
        awaited: by node, the nodes with effects that it waits for by control inputs.
        gathered: the nodes that are computed once, from gathered rows.
        obstacle: for a body, why it cannot run unchanged on towers; None if it can.
        bodies: the propagations through the functions that nodes run.
        measures: the tensors that have named sizes.
    """

    def __init__(
        self,
        traced: Traced,
        arguments: Mapping[str, Facts],
        in_body: bool = False,
        batch_rows: int | None = None,
        tower_rows: int = USUAL_ROWS,
    ):
        self.traced = traced
        self.in_body = in_body
        self.batch_rows = batch_rows
        self.tower_rows = tower_rows
        self.facts: dict[Output, Facts] = {}
        self.plans: dict[str, Plan] = {}
        self.nodes = {node.name: node for node in traced.nodes}
        self.sources = {name: [output_of(source) for source in data_inputs(node)] for name, node in self.nodes.items()}
        self.awaited = awaited_effects(self.nodes)
        self.gathered: list[Gathered] = []
        self.obstacle: str | None = None
        self.bodies: list[Propagation] = []
        self.measures = Measures(self)
        self._at_home: dict[str, str] = {}
        self._functions: dict[Any, Traced] = {}
        self._recomputation = Recomputation(self.nodes, self.sources, traced.outputs)
        self._row_sources = None if batch_rows is None else RowSources(self.nodes, self.sources, traced.statics, arguments)
        self._propagate(arguments)
        if not in_body:
            compute_once_from_gathered_rows(self)

    def _propagate(self, arguments: Mapping[str, Facts]) -> None:
        """Plans the nodes in order, and again from the first list that a later node turns out to need at home."""
        nodes = self.traced.nodes
        known_before: list[tuple[int, int]] = []  # for each planned node, the numbers of nodes gathered and of bodies before it
        while len(known_before) < len(nodes):
            node = nodes[len(known_before)]
            known_before.append((len(self.gathered), len(self.bodies)))
            plan = Plan([arguments[node.name]]) if node.name in arguments else self._plan(node)
            self.plans[node.name] = plan
            for k, facts in enumerate(plan.outputs):
                self.facts[node.name, k] = facts
            if self.in_body:
                if self.obstacle is None and node.name not in arguments:
                    self.obstacle = obstacle(node, self)
                continue
            lists = lists_wanted_at_home(node.name, self)
            if lists:
                # Each round adds to these nodes, so that the rounds end.
                self._at_home |= dict.fromkeys(lists, f"{node.op} {node.name!r} takes its list, which cannot be gathered")
                first = next(i for i, known in enumerate(nodes) if known.name in lists)
                self._forget(nodes[first : len(known_before)], *known_before[first])
                del known_before[first:]

    def _forget(self, nodes: Sequence[Any], gathered: int, bodies: int) -> None:
        """Removes the plans of some nodes, after which as many nodes are gathered and as many bodies known as given."""
        for node in nodes:
            for k in range(len(self.plans.pop(node.name).outputs)):
                del self.facts[node.name, k]
            self.sources[node.name] = [output_of(source) for source in data_inputs(node)]
        del self.gathered[gathered:], self.bodies[bodies:]
        self.measures = Measures(self)

    def static(self, output: Output) -> Static:
        """Returns the dtype and the shape of an output, as far as TensorFlow or the rules know them.

        Of the axis of rows, the size is never known: it differs from tower to tower.
        """
        static = self.traced.statics[output[0]][output[1]]
        facts = self.facts.get(output)
        if self.batch_rows is not None and facts is not None:
            static = _without_rows(static, facts.placement, f"{self.traced.scope}{name_of(*output)}")
        if facts is not None and facts.entries is not None and not axes_of_a_gradient(facts):
            return Static(static.dtype, list(facts.entries.shape))
        if facts is None or not isinstance(facts.shape, tuple) or static.dtype in (tf.resource, tf.variant):
            return static
        if static.shape is None:
            name = f"{self.traced.scope}{output[0]}:{output[1]}"
            return Static(static.dtype, [Size.named(f"{name}[{i}]") if d is None else d for i, d in enumerate(facts.shape)])
        if len(static.shape) != len(facts.shape):
            return static
        pairs = zip(static.shape, facts.shape, strict=True)
        return Static(static.dtype, [size if isinstance(size, int) or known is None else known for size, known in pairs])

    def is_on_towers(self, output: Output) -> bool:
        """Returns whether each tower has a tensor, or its rows of one, as it was given or has computed them."""
        is_given = self.nodes[output[0]].op == "Placeholder" and isinstance(self.facts[output].placement, Shard)
        return is_given or not self.plans[output[0]].is_at_home

    def view(self, definition: Any) -> Node:
        """Returns a node as rules see it."""
        sources = self.sources[definition.name]
        inputs = [self.facts[source] for source in sources]
        statics = [self.static(source) for source in sources]
        results = self.traced.statics[definition.name]
        return Node(definition, inputs, statics, results, self.in_body, self.batch_rows, self.tower_rows, self.traced.scope)

    def body(
        self, name: str, arguments: Sequence[Facts], statics: Sequence[Static], known_shapes: bool
    ) -> "tuple[Propagation, list[Facts]]":
        """Returns the propagation through a function that each tower would run by itself, and the facts of its outputs.

        Args:
            name: the function's name.
            arguments: the facts of its arguments.
            statics: the statics of the tensors that it is called with.
            known_shapes: whether the arguments keep the shapes of these tensors. The shapes of a loop's variables may change
                from round to round.
        """
        shapes: list[Any] = []
        handles: list[Any] = []
        for facts, static in zip(arguments, statics, strict=True):
            is_handle = static.dtype in (tf.resource, tf.variant)
            shape = facts.shape if facts.shape is not None or not known_shapes else static.shape
            handles.append(facts.shape if is_handle and not isinstance(facts.shape, tuple) else None)
            plain = None if shape is None or is_handle else [size if isinstance(size, int) else None for size in shape]
            if plain is not None and isinstance(facts.placement, Shard):
                plain[facts.placement.axis] = None
            shapes.append(plain)
        key = (name, repr(shapes))
        if key not in self._functions:
            self._functions[key] = traced_function(self.traced, name, shapes, handles)
        traced = self._functions[key]
        placed = dict(zip(traced.arguments, arguments, strict=True))
        propagation = Propagation(traced, placed, in_body=True, batch_rows=self.batch_rows, tower_rows=self.tower_rows)
        self.bodies.append(propagation)
        results = []
        for output in map(output_of, traced.outputs):
            facts, static = propagation.facts[output], propagation.static(output)
            shape = facts.shape if static.dtype in (tf.resource, tf.variant) else static.shape
            results.append(Facts(facts.placement, facts.entries, shape))
        return propagation, results

    def _plan(self, definition: Any) -> Plan:
        """Plans a node by the first of the planners that has a plan."""
        node = self.view(definition)
        blocks = None if self._row_sources is None else self._row_sources.blocks_made(node, self.facts)
        entries = evaluate(node) if _is_small(node) else None
        planners: tuple[Callable[[Node, _Blocks, _Entries], Plan | None], ...] = (
            self._of_constant,
            self._of_list_at_home,
            self._of_recomputation,
            self._of_own,
            self._of_new_rows,
            self._of_same_tensors,
            self._of_known_numbers,
            self._of_control_flow,
            self._of_rule,
        )
        plans = (planner(node, blocks, entries) for planner in planners)
        return next(plan for plan in plans if plan is not None)

    def _of_constant(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        return Plan([Facts(REPLICATE, _constant(node.definition))]) if node.type == "Const" else None

    def _of_list_at_home(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        return self._once(node, self._at_home[node.name]) if node.name in self._at_home else None

    def _of_recomputation(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        return self._recomputation.plan(node, self.sources[node.name])

    def _of_own(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        """Plans a node that takes values that each tower has for itself."""
        if is_stateful(node.type) or not any(facts.placement == OWN for facts in node.inputs):
            return None
        rule = RULES.get(node.type)
        if node.type == "Snapshot":
            plan = rule(node) if rule else None
        else:
            inputs = [
                Facts(REPLICATE, facts.entries, facts.shape) if facts.placement == OWN else facts for facts in node.inputs
            ]
            as_one = node.with_inputs(inputs)
            has_rows = any(facts.placement != REPLICATE or facts.counts_rows() for facts in inputs)
            found = self._by_rule(as_one, blocks or ()) if has_rows or blocks is not None else None
            plan = with_own(node, found, has_rows)
        if plan is None or not self._is_sound(node, plan):
            line = user_line(self.traced.graph, node.name)
            raise ValueError(
                f"{node.type} {node.name!r}{f', at {line},' if line else ''} combines a value that each tower has for itself "
                "with rows of other towers."
            )
        return plan

    def _of_new_rows(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        """Plans a node that makes rows although it takes none, such as random numbers for each row."""
        if _is_spread(node) or blocks is None or entries is not None:
            return None
        made = self._by_rule(node, blocks)
        return made if made is not None and self._is_sound(node, made) else None

    def _of_same_tensors(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        """Plans a node that neither takes rows nor counts them."""
        if _is_spread(node) or any(facts.counts_rows() for facts in node.inputs) or node.type in _LISTS:
            return None
        # In loops, rules may know more of a shape than TensorFlow does.
        shape = node.shape(0) if len(node.inputs) == len(node.results) == 1 and node.type in ("Identity", "Cast") else None
        return Plan([Facts(REPLICATE, None if entries is None else entries[k], shape) for k in range(len(node.results))])

    def _of_known_numbers(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        if (
            entries is None
            or any(known is None for known in entries)
            or (_is_spread(node) and node.type not in SHAPES_AND_RANK)
        ):
            return None
        return Plan([Facts(REPLICATE, known) for known in entries])

    def _of_control_flow(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan | None:
        if not control_flow.is_control_flow(node):
            return None
        found = control_flow.plan(node, self)
        return self._once(node, found) if isinstance(found, str) else self._if_sound(node, found)

    def _of_rule(self, node: Node, blocks: _Blocks, entries: _Entries) -> Plan:
        has_effects = is_stateful(node.type) and node.type not in (*DRAWS, *CHECKS, *RECURRENT, "ResourceGather")
        plan = self._if_sound(node, None if has_effects else self._by_rule(node, blocks or ()))
        if node.type == "Mean" and plan.outputs[0].placement == Partial() and not self.in_body:
            return self._as_variance(node, plan)
        return plan

    def _if_sound(self, node: Node, plan: Plan | None) -> Plan:
        """Returns a plan if it is sound, or else one that computes the node at home."""
        if plan is None or not self._is_sound(node, plan):
            return self._once(node, self._why_gathered(node, plan))
        if plan.gathers:
            self.gathered.append(Gathered(node.type, node.name, "rows meet rows: one operand is gathered"))
        return plan

    def _by_rule(self, node: Node, blocks: tuple[Any, ...] = ()) -> Plan | None:
        """Plans a node by its rule, with the first reading of its integers that gives a sound plan.

        Returns another plan of the rule if no plan is sound, and None if there is no plan.
        """
        rule = RULES.get(node.type)
        refused = None
        for read in readings(node, blocks) if rule else ():
            plan = rule(read)  # type: ignore[misc]
            if plan is not None and self._is_sound(read, plan):
                pairs = enumerate(zip(read.inputs, node.inputs, strict=True))
                read_again = {i: facts.entries for i, (facts, own) in pairs if facts is not own and facts.entries is not None}
                return dataclasses.replace(plan, readings={**read_again, **plan.readings}) if read_again else plan
            refused = refused or plan
        return refused

    def _as_variance(self, node: Node, plan: Plan) -> Plan:
        """Plans a mean over rows. If it computes a variance, it takes the rows in place of the distances."""
        found = mean_of_variance(node, self.sources, self.nodes, self.facts)
        if found is None or plan.instance is None:
            return plan
        rows, mean = found
        if not set(self.awaited[node.name]) <= set(self.awaited[mean[0]]):
            # The node waits for others that may depend on the mean, but the mean would come in the same message.
            return plan
        self.sources[node.name] = [rows, mean, self.sources[node.name][1]]
        return plan_of_variance(mean, self.facts[rows], plan.outputs[0].shape, plan.instance)

    def _is_sound(self, node: Node, plan: Plan) -> bool:
        """Returns whether each shape that a tower takes in its own version is known to have one, and all rows can be met."""
        needs = plan.needs or [REPLICATE] * len(node.inputs)
        return all(
            facts.is_local_shape() for facts, need in zip(node.inputs, needs, strict=True) if need == LOCAL_SHAPE
        ) and not self._obstacle_to_meeting(node, plan)

    def _obstacle_to_meeting(self, node: Node, plan: Plan) -> str | None:
        """Returns why an input could not be cut, or the rows of a result could not be gathered; None if all can be."""
        if self.in_body:
            # No towers meet in a body; they may meet over its results, which are those of its loop, branch or call.
            return None
        needs = plan.needs or [REPLICATE] * len(node.inputs)
        for facts, static, need in zip(node.inputs, node.statics, needs, strict=True):
            if isinstance(need, Shard) and need != facts.placement:
                if static.rank is None:
                    return "it takes a tensor with an unknown number of axes, which cannot be cut"
                if not self.measures.can_split(need.blocks):
                    return "it takes rows in segments of unknown lengths"
        for facts, static in zip(plan.outputs, node.results, strict=True):
            if isinstance(facts.placement, Shard):
                if not isinstance(facts.shape, tuple) and static.rank is None:
                    return "its result has an unknown number of axes, and its rows could not be gathered"
                if not self.measures.can_split(facts.placement.blocks):
                    return "its result has rows in segments of unknown lengths, which could not be gathered"
        return None

    def _why_gathered(self, node: Node, plan: Plan | None = None) -> str:
        obstacle = self._obstacle_to_meeting(node, plan) if plan else None
        if obstacle:
            return obstacle
        if control_flow.is_control_flow(node):
            return "no tower has its own version of a shape that it takes"
        if is_stateful(node.type) and node.type not in (*DRAWS, *CHECKS, *RECURRENT):
            return "it has effects, which happen once"
        if node.type not in RULES:
            return "the operation has no rule"
        has_all_axes = all(static.rank is not None for static in node.statics)
        return "rows meet rows" if has_all_axes else "rows meet a tensor with an unknown number of axes"

    def _once(self, node: Node, reason: str) -> Plan:
        """Plans a node that is computed at home."""
        if any(node.is_shard(i) or node.is_list(i) for i in range(len(node.inputs))):
            self.gathered.append(Gathered(node.type, node.name, reason))
        return Plan([Facts() for _ in node.results])


def _without_rows(static: Static, placement: Placement, name: str) -> Static:
    """Returns a static without the known size of the axis of rows."""
    if static.shape is None or not isinstance(placement, Shard):
        return static
    shape = list(static.shape)
    shape[placement.axis] = Size.named(f"{name}[{placement.axis}]")
    return Static(static.dtype, shape)


def _is_spread(node: Node) -> bool:
    """Returns whether a node takes tensors that towers hold as slices or parts."""
    return any(facts.placement != REPLICATE for facts in node.inputs)


def _is_small(node: Node) -> bool:
    """Returns whether all outputs are integers, and few enough to evaluate."""
    for result in node.results:
        if result.dtype not in _INTEGERS:
            return False
        is_known = node.inputs and all(facts.entries is not None for facts in node.inputs)
        if node.type in ("BroadcastGradientArgs", "Range", *SHAPES_AND_RANK) or is_known:
            continue
        if result.shape is None or len(result.shape) > 2 or any(not isinstance(size, int) for size in result.shape):
            return False
        if int(np.prod(result.shape)) > LARGEST:
            return False
    return True


def _constant(definition: Any) -> np.ndarray | None:
    """Returns the entries of a constant of few integers; None for other constants."""
    if tf.as_dtype(definition.attr["dtype"].type) not in _INTEGERS:
        return None
    value = tf.make_ndarray(definition.attr["value"].tensor)
    return array_of([int(number) for number in value.flat]).reshape(value.shape) if value.size <= LARGEST else None


def axes_of_a_gradient(facts: Facts) -> bool:
    """Returns whether a tensor holds the axes over which a gradient is summed, whose number may be unknown."""
    return bool(facts.numbers) and isinstance(facts.numbers[0], BroadcastAxes)  # type: ignore[index]


def axes_to_sum(facts: Facts) -> list[int] | None:
    """Returns the axes over which a gradient is summed, if all are known; else None."""
    numbers = facts.numbers
    if numbers and isinstance(numbers[0], BroadcastAxes) and numbers[0].surely == numbers[0].perhaps:
        return sorted(numbers[0].surely)
    return None
