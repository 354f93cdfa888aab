"""Make the towers' program, from the wanted tensors back."""

from collections.abc import Callable, Iterable

import numpy as np

from keras_dp.partition.facts.operations import SHAPES
from keras_dp.partition.facts.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Placement, Shard
from keras_dp.partition.placing.moments import Variance
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.program.known import KnownTensors, are_known
from keras_dp.partition.program.operands import Form, Operand, Operation, instances_in
from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.program.program import Program
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output, output_of


def demanded(propagation: Propagation, outputs: Iterable[str], effects: Iterable[str], keeps_rows: bool = False) -> Program:
    """Returns the program that makes some tensors whole, and runs some effects.

    Args:
        propagation: the plan of each node.
        outputs: the names of the tensors of the traced graph that are wanted.
        effects: the names of its nodes that must run.
        keeps_rows: whether this worker keeps its own rows of wanted tensors that have one entry of the first axis for each row.
    """
    demand = _Demand(propagation)
    results = [demand.result(output_of(output), keeps_rows) for output in outputs]
    awaited = demand.instances_of(effects)
    return Program(operations_for(propagation.nodes, results, awaited, demand.operation), results, awaited)


def operations_for(
    names: Iterable[str],
    results: Iterable[Operand],
    effects: Iterable[Instance],
    operation_of: Callable[[Place, str], Operation],
) -> dict[Instance, Operation]:
    """Returns the operations that results and effects need, in order.

    Args:
        names: the traced nodes, each after its sources.
        results: the operands of the wanted tensors.
        effects: the instances that must run.
        operation_of: returns the operation of an instance.
    """
    found: dict[Instance, Operation] = {}

    def sources(instance: Instance) -> list[Instance]:
        found[instance] = operation_of(*instance)
        return found[instance].sources

    reached([*instances_in(results), *effects], sources)
    in_order = ((place, name) for name in names for place in Place)
    return {instance: found[instance] for instance in in_order if instance in found}


class _Demand:
    """Finds what an operation takes, where, and in which form.

    Args:
        propagation: the plan of each node.
    """

    def __init__(self, propagation: Propagation):
        self._propagation, self._known = propagation, KnownTensors(propagation)
        self._given = frozenset(propagation.traced.arguments)

    def result(self, output: Output, keeps_rows: bool) -> Operand:
        """Returns the operand of a wanted tensor."""
        has_rows = self._propagation.facts[output].placement == Shard(0) and self._propagation.is_on_towers(output)
        return Operand(Form.OWN_ROWS, output, (self._as_placed(output),)) if keeps_rows and has_rows else self._whole(output)

    def instances_of(self, effects: Iterable[str]) -> tuple[Instance, ...]:
        """Returns the instances of nodes that others wait for."""
        instances = []
        for name in effects:
            if name in self._given:
                continue
            definition, awaited = self._propagation.nodes[name], self._propagation.awaited[name]
            if definition.op != "Const" and (is_stateful(definition.op) or definition.op == "NoOp" or awaited):
                instances.append((Place.HOME if self._propagation.plans[name].is_at_home else Place.TOWERS, name))
        return tuple(instances)

    def operation(self, place: Place, name: str) -> Operation:
        """Returns the operation that stands for a traced node at a place."""
        definition, plan = self._propagation.nodes[name], self._propagation.plans[name]
        outputs, facts = self._propagation.sources[name], self._propagation.facts
        operands: Iterable[Operand]
        if place is Place.TOWERS:
            needs = enumerate(zip(outputs, plan.needs or (), strict=True))
            operands = [self._operand(output, need, plan.readings.get(i)) for i, (output, need) in needs]
        elif place is Place.SHAPES:
            operands = [self._operand(output, _local_need(facts[output].placement)) for output in outputs]
        elif definition.op in SHAPES:
            operands = map(self._whose_shape_is_taken, outputs)
        else:
            operands = map(self._whole, outputs)
        return Operation(place, definition, tuple(operands), self.instances_of(self._propagation.awaited[name]))

    def _operand(self, output: Output, need: Need, reading: np.ndarray | None = None) -> Operand:
        """Returns a tensor in the form that a tower needs."""
        placement = self._propagation.facts[output].placement
        if need == LOCAL_SHAPE and reading is not None:
            more = () if are_known(reading) else (self._own_version(output),)
            return Operand(Form.READ, output, more, reading=reading)
        if need in (REPLICATE, LOCAL_SHAPE, ANY_SHAPE) and output in self._known:
            return Operand(Form.KNOWN if need == REPLICATE else Form.KNOWN_OWN, output)
        if need == LOCAL_SHAPE:
            return self._own_version(output)
        if isinstance(need, Shard):
            if placement == need and self._propagation.is_on_towers(output):
                return self._as_placed(output)
            return Operand(Form.CUT, output, (self._whole(output), *self._needed_beside(need)), need)
        if isinstance(need, Partial):
            return self._as_placed(output) if placement == need else Operand(Form.PART, output, (self._whole(output),))
        if isinstance(need, ListOf | Own) or (need == REPLICATE and self._is_on_each_tower(output)):
            return self._as_placed(output)
        return self._whole(output)

    def _is_on_each_tower(self, output: Output) -> bool:
        """Returns whether each tower computes a tensor that is the same on all of them, such as the result of a loop."""
        facts, plan = self._propagation.facts[output], self._propagation.plans[output[0]]
        return not (plan.is_at_home or plan.also_at_home or facts.counts_rows()) and facts.placement == REPLICATE

    def _own_version(self, output: Output) -> Operand:
        """Returns a shape that counts the tower's own rows."""
        if output[0] in self._given or not self._propagation.facts[output].counts_rows():
            return self._whole(output)
        return Operand(Form.SHAPES if self._propagation.plans[output[0]].is_at_home else Form.TOWERS, output)

    def _whole(self, output: Output) -> Operand:
        """Returns the tensor of the whole batch, at home."""
        name, plan = output[0], self._propagation.plans[output[0]]
        if name in self._given:
            return Operand(Form.GIVEN, output)
        if output in self._known:
            return Operand(Form.KNOWN, output)
        if plan.is_at_home or plan.also_at_home:
            return Operand(Form.HOME, output)
        placement = self._propagation.facts[output].placement
        assert not isinstance(placement, ListOf), f"a list on towers is needed at home: {name}"
        return Operand(_exchange(placement), output, (self._as_placed(output), *self._needed_beside(placement)))

    def _needed_beside(self, placement: Placement) -> list[Operand]:
        """Returns what an exchange of a tensor with this placement needs beside it: tensors to measure, or a mean."""
        mean = [self._as_placed(placement.mean)] if isinstance(placement, Variance) else []
        return mean + [self._as_placed(output) for output in self._propagation.measures.of(placement)]

    def _whose_shape_is_taken(self, output: Output) -> Operand:
        """Returns a tensor whose shape home takes: if towers have its rows or parts, as the last one has it."""
        placement, is_given = self._propagation.facts[output].placement, output[0] in self._given
        static, plan = self._propagation.static(output), self._propagation.plans[output[0]]
        is_whole = static.rank is None if is_given else plan.is_at_home
        return self._whole(output) if placement == REPLICATE or is_whole else self._as_placed(output)

    def _as_placed(self, output: Output) -> Operand:
        """Returns a tensor as it is there: whole, or on each tower."""
        name, placement = output[0], self._propagation.facts[output].placement
        if name in self._given:
            return Operand(Form.GIVEN_ROWS if isinstance(placement, Shard) else Form.GIVEN, output)
        if output in self._known:
            return Operand(Form.KNOWN, output)
        return Operand(Form.HOME if self._propagation.plans[name].is_at_home else Form.TOWERS, output)


def _exchange(placement: Placement) -> Form:
    """Returns the exchange by which home gets a tensor that towers have."""
    if isinstance(placement, Shard):
        return Form.GATHER
    if isinstance(placement, Variance):
        return Form.VARIANCE
    if isinstance(placement, Partial):
        return Form[placement.reduction.upper()]
    return Form.FIRST if isinstance(placement, Own) else Form.LAST


def _local_need(placement: Placement) -> Need:
    """Returns the form in which a tower takes a tensor to compute its own version of a shape."""
    return LOCAL_SHAPE if placement == REPLICATE else placement
