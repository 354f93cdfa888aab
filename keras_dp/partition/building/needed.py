"""Find the instances of traced nodes that a partitioned graph needs."""

import enum
from collections.abc import Container, Iterable, Sequence, Set
from typing import Any

from keras_dp.partition.building.constants import Constants
from keras_dp.partition.facts.operations import SHAPES
from keras_dp.partition.facts.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, Facts, Need, Placement, Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output


class Kind(enum.Enum):
    """The kinds of instance that a traced node may have."""

    FED = "given, or written where it is needed"
    HOME = "one at home"
    TOWERS = "one on each tower"
    SHAPES = "one on each tower, for its own number of rows"


NeededInstance = tuple[Kind, str]  # of a traced node, by name

# The kind of instance from which a tensor is made: by where its node is computed, and by the form that is needed of it.
# "whole" is needed by home and by all that cuts it, "as placed" by the towers, "own version" by a tower that reads a shape.
MADE_FROM = {
    "at home": {"whole": Kind.HOME, "as placed": Kind.HOME, "own version": Kind.SHAPES},
    "on towers": {"whole": Kind.TOWERS, "as placed": Kind.TOWERS, "own version": Kind.TOWERS},
    "on both": {"whole": Kind.HOME, "as placed": Kind.TOWERS, "own version": Kind.TOWERS},
}


class NeededInstances:
    """Finds the instances that some outputs and effects need, directly or indirectly.

    Args:
        propagation: the plan of each node.
        given: the names of the arguments that the graph is given.
        constants: the tensors that are known while tracing.
    """

    def __init__(self, propagation: Propagation, given: Container[str], constants: Constants):
        self._propagation, self._given, self._constants = propagation, given, constants

    def of(self, outputs: Iterable[tuple[Output, Need]], effects: Iterable[str]) -> Set[NeededInstance]:
        """Returns the instances that some tensors need, each in a form, and some nodes with effects."""
        taken = [instance for output, need in outputs for instance in self._makers(output, need)]
        return self._needed(taken + self._kinds_after(effects))

    def _needed(self, wanted: list[NeededInstance]) -> Set[NeededInstance]:
        """Returns some instances and all instances that they depend on."""

        def made(instances: Iterable[NeededInstance]) -> list[NeededInstance]:
            return [instance for instance in instances if instance[0] is not Kind.FED]

        return reached(made(wanted), lambda instance: made(self._sources(*instance)))

    def early(self, needed: Iterable[NeededInstance]) -> set[Output]:
        """Returns the tensors of which an instance on a tower needs the whole, directly or indirectly."""
        on_towers = [instance for instance in needed if instance[0] in (Kind.TOWERS, Kind.SHAPES)]
        facts = self._propagation.facts
        return {
            output
            for instance in self._needed(on_towers)
            for output, need in self._inputs(*instance)
            if instance[0] is Kind.HOME or need != facts[output].placement
        }

    def _inputs(self, kind: Kind, name: str) -> list[tuple[Output, Need]]:
        """Returns the tensors that an instance takes, each with the form that the instance needs."""
        definition, plan = self._propagation.nodes[name], self._propagation.plans[name]
        outputs = self._propagation.sources[name]
        needs: Sequence[Need]
        if kind is Kind.HOME and self.counts_all_rows(definition):
            needs = [self._propagation.facts[output].placement for output in outputs]
        elif kind is Kind.HOME:
            needs = [REPLICATE] * len(outputs)
        elif kind is Kind.TOWERS:
            needs = plan.needs or [REPLICATE] * len(outputs)
        else:
            needs = [local_need(self._propagation.facts[output].placement) for output in outputs]
        return list(zip(outputs, needs, strict=True))

    def _sources(self, kind: Kind, name: str) -> list[NeededInstance]:
        sources = [instance for output, need in self._inputs(kind, name) for instance in self._makers(output, need)]
        return sources + self._kinds_after(self._propagation.awaited[name])

    def _makers(self, output: Output, need: Need) -> list[NeededInstance]:
        """Returns the instances from which a form of a tensor is made, with those of tensors that are measured for it."""
        facts, kinds = self._propagation.facts, [(self._kind(output, need), output[0])]
        if need != facts[output].placement or self._is_at_home(output[0]):
            for placement in (facts[output].placement, need):
                measured = self._propagation.measures.of(placement)
                kinds += [(self._kind(known, facts[known].placement), known[0]) for known in measured]
        return kinds

    def _kinds_after(self, names: Iterable[str]) -> list[NeededInstance]:
        """Returns the instances that a node waits for, if it waits for some traced nodes."""
        kinds = []
        for name in names:
            if self.is_waited_for(name):
                kinds.append((Kind.HOME if self._is_at_home(name) else Kind.TOWERS, name))
        return kinds

    def is_waited_for(self, name: str) -> bool:
        """Returns whether other nodes wait for a traced node by control inputs, once it has instances."""
        if name in self._given:
            return False
        definition = self._propagation.nodes[name]
        return definition.op != "Const" and (
            is_stateful(definition.op) or definition.op == "NoOp" or bool(self._propagation.awaited[name])
        )

    def _is_at_home(self, name: str) -> bool:
        return self._propagation.plans[name].is_at_home

    def counts_all_rows(self, definition: Any) -> bool:
        """Returns whether a node takes the shape of tensors that towers hold as slices or parts."""
        return definition.op in SHAPES and any(
            self._propagation.facts[output].placement != REPLICATE for output in self._propagation.sources[definition.name]
        )

    def _kind(self, output: Output, need: Need) -> Kind:
        """Returns the kind of instance from which a form of a tensor is made: a cell of the table `MADE_FROM`."""
        name = output[0]
        if name in self._given or self._constants.is_known(output):
            return Kind.FED
        plan = self._propagation.plans[name]
        computed = "at home" if plan.is_at_home else "on both" if plan.also_at_home else "on towers"
        return MADE_FROM[computed][_wanted(self._propagation.facts[output], need)]


def _wanted(facts: Facts, need: Need) -> str:
    """Returns the column of `MADE_FROM` for a tensor and a need."""
    if need == LOCAL_SHAPE and facts.placement == REPLICATE and facts.counts_rows():
        return "own version"
    is_whole = need in (REPLICATE, ANY_SHAPE) or (isinstance(need, Shard) and need != facts.placement)
    return "whole" if is_whole else "as placed"


def local_need(placement: Placement) -> Need:
    """Returns the form in which a tower takes a tensor to compute its own version of a shape."""
    return LOCAL_SHAPE if placement == REPLICATE else placement
