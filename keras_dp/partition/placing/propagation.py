"""Propagate placements from the batch to the results."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan, Static
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.facts.placements import (
    OWN,
    REPLICATE,
    Facts,
    Partial,
    Placement,
    Shard,
)
from keras_dp.partition.facts.row_counts import USUAL_ROWS
from keras_dp.partition.facts.rows import Size
from keras_dp.partition.placing import control_flow
from keras_dp.partition.placing.gathered_rows import compute_once_from_gathered_rows
from keras_dp.partition.placing.integers import Integers, axes_of_a_gradient, integers_of
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
from keras_dp.partition.placing.soundness import is_sound, why_once
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.names import Output, data_inputs, name_of, output_of
from keras_dp.partition.tracing.traced import Traced, awaited_effects, traced_function
from keras_dp.partition.tracing.user_lines import user_line

_Blocks = tuple[Any, ...] | None  # the segments of the rows that a node may make; None if it makes no rows
_LISTS = ("EmptyTensorList", "TensorListReserve")


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
        integers = integers_of(node)
        planners: tuple[Callable[[Node, _Blocks, Integers], Plan | None], ...] = (
            self._of_list_at_home,
            self._of_recomputation,
            self._of_own,
            self._of_new_rows,
            self._of_same_tensors,
            self._of_known_integers,
            self._of_control_flow,
            self._of_rule,
        )
        plans = (planner(node, blocks, integers) for planner in planners)
        return next(plan for plan in plans if plan is not None)

    def _of_list_at_home(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        return self._once(node, self._at_home[node.name]) if node.name in self._at_home else None

    def _of_recomputation(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        return self._recomputation.plan(node, self.sources[node.name])

    def _of_own(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
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

    def _of_new_rows(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        """Plans a node that makes rows although it takes none, such as random numbers for each row."""
        if _is_spread(node) or blocks is None or integers is not None:
            return None
        made = self._by_rule(node, blocks)
        return made if made is not None and self._is_sound(node, made) else None

    def _of_same_tensors(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        """Plans a node that neither takes rows nor counts them."""
        if _is_spread(node) or any(facts.counts_rows() for facts in node.inputs) or node.type in _LISTS:
            return None
        # In loops, rules may know more of a shape than TensorFlow does.
        shape = node.shape(0) if len(node.inputs) == len(node.results) == 1 and node.type in ("Identity", "Cast") else None
        return Plan([Facts(REPLICATE, None if integers is None else integers[k], shape) for k in range(len(node.results))])

    def _of_known_integers(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        if integers is None or (_is_spread(node) and node.type not in SHAPES_AND_RANK):
            return None
        are_known = all(known is not None for known in integers)
        return Plan([Facts(REPLICATE, known) for known in integers]) if are_known else None

    def _of_control_flow(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan | None:
        if not control_flow.is_control_flow(node):
            return None
        found = control_flow.plan(node, self)
        return self._once(node, found) if isinstance(found, str) else self._on_towers_or_once(node, found)

    def _of_rule(self, node: Node, blocks: _Blocks, integers: Integers) -> Plan:
        has_effects = is_stateful(node.type) and node.type not in (*DRAWS, *CHECKS, *RECURRENT, "ResourceGather")
        plan = self._on_towers_or_once(node, None if has_effects else self._by_rule(node, blocks or ()))
        if node.type == "Mean" and plan.outputs[0].placement == Partial() and not self.in_body:
            return self._as_variance(node, plan)
        return plan

    def _on_towers_or_once(self, node: Node, plan: Plan | None) -> Plan:
        """Returns a plan for towers if it is sound, or else one that computes the node at home."""
        if plan is None or not self._is_sound(node, plan):
            return self._once(node, why_once(node, plan, self._meetings))
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
        return is_sound(node, plan, self._meetings)

    @property
    def _meetings(self) -> Measures | None:
        """No towers meet in a body; they may meet over its results, which are those of its loop, branch or call."""
        return None if self.in_body else self.measures

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
