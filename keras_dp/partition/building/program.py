"""Define the towers' program: the operations that run at home and on towers, and the form in which each takes its tensors."""

import dataclasses
import enum
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from keras_dp.partition.building.constants import Constants, are_known
from keras_dp.partition.building.instances import Instance, Place
from keras_dp.partition.facts.operations import SHAPES
from keras_dp.partition.facts.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, ListOf, Need, Own, Partial, Placement, Shard
from keras_dp.partition.placing.moments import Variance
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output, name_of


class Form(enum.Enum):
    """The forms in which an operation takes a tensor. The value is the form in words."""

    GIVEN = "{}"  # the whole of a tensor that the step is given
    GIVEN_ROWS = "rows of {}"  # the tower's slice of it
    KNOWN = "{} (known)"  # known while tracing, up to the number of all rows: each device writes it for itself
    KNOWN_OWN = "{} (known, for its rows)"  # the same, for the tower's own number of rows
    HOME = "{} (home)"  # made at home
    TOWERS = "{} (towers)"  # made by the tower
    SHAPES = "{} (own shape)"  # made by the tower, for its own number of rows
    SUM = "sum of {}"  # home combines the towers' parts
    MAX = "maximum of {}"
    MIN = "minimum of {}"
    PROD = "product of {}"
    ALL = "all of {}"
    ANY = "any of {}"
    GATHER = "all rows of {}"  # home gathers the towers' rows
    FIRST = "the first tower's {}"  # home takes the value of the tower with the first row
    LAST = "the last tower's {}"  # all towers have it alike, or count their rows in it
    CUT = "rows cut from {}"  # the tower's rows of a whole tensor
    PART = "a part of {}"  # of a sum that is whole, one tower takes all, the others take zeros
    READ = "{} read as its rows"  # a shape in which some integers are read as the tower's number of rows


EXCHANGES = frozenset([Form.SUM, Form.MAX, Form.MIN, Form.PROD, Form.ALL, Form.ANY, Form.GATHER, Form.FIRST, Form.LAST])
# Where the instances are from which operations take tensors as they are.
PLACES = {Form.HOME: Place.HOME, Form.TOWERS: Place.TOWERS, Form.SHAPES: Place.SHAPES}


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """A tensor in the form in which an operation takes it.

    Attributes:
        form: the form.
        output: the tensor of the traced graph.
        parts: the operands from which it is made, and those that are measured for it.
        rows: the rows that are cut; None for other forms.
        reading: for a shape that is read, its entries with row counts in the place of some integers; see `readings`.
        is_replicated: whether each tower makes it for itself, in place of home; see `replication`.
    """

    form: Form
    output: Output
    parts: tuple["Operand", ...] = ()
    rows: Shard | None = None
    reading: np.ndarray | None = None
    is_replicated: bool = False

    def __str__(self) -> str:
        return self.form.value.format(name_of(*self.output)) + ", replicated" * self.is_replicated

    @property
    def place(self) -> Place | None:
        """Where the instance is from which it is taken as it is; None for other forms."""
        return Place.REPLICATED if self.form is Form.HOME and self.is_replicated else PLACES.get(self.form)

    @property
    def is_meeting(self) -> bool:
        """Whether towers exchange something for it."""
        if self.form is Form.CUT:
            return self.parts[0].form is not Form.KNOWN
        return self.form in EXCHANGES and self.form is not Form.LAST


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program.

    Attributes:
        place: where it runs.
        definition: the NodeDef that it stands for.
        operands: the tensors that it takes.
        awaited: the instances that it waits for.
    """

    place: Place
    definition: Any
    operands: tuple[Operand, ...]
    awaited: tuple[Instance, ...]

    def __str__(self) -> str:
        return f"{self.place.value:9}  {self.definition.name} <- {', '.join(map(str, self.operands))}"

    @property
    def sources(self) -> list[Instance]:
        """The instances of which it takes tensors, as they are or in another form, and those that it waits for."""
        return [*instances_in(self.operands), *self.awaited]


def with_parts(operands: Iterable[Operand]) -> Iterable[Operand]:
    """Returns some operands, and those from which they are made."""
    return reached(operands, lambda operand: operand.parts)


def instances_in(operands: Iterable[Operand]) -> list[Instance]:
    """Returns the instances from whose tensors some operands are made."""
    return [(operand.place, operand.output[0]) for operand in with_parts(operands) if operand.place]


class Program:
    """The program of home and of the towers: what is needed for some outputs and effects, and nothing else.

    Args:
        propagation: the plan of each node.
        given: the names of the arguments that the graph is given.
        constants: the tensors that are known while tracing.
        outputs: the tensors that are wanted, whole.
        kept: of these, the tensors of which a worker keeps its own rows.
        effects: the names of the nodes that must run.

    Attributes:
        operations: the operations, each after those that it is made from.
        results: the operands of the wanted tensors.
        awaited: the instances of the effects.
    """

    def __init__(
        self,
        propagation: Propagation,
        given: Container[str],
        constants: Constants,
        outputs: Iterable[Output],
        kept: Container[Output],
        effects: Iterable[str],
    ):
        self._propagation, self._given, self._constants = propagation, given, constants
        self.results = [
            Operand(Form.GATHER, output, (self._as_placed(output),)) if output in kept else self._whole(output)
            for output in outputs
        ]
        self.awaited = self._instances_of(effects)
        self.operations = self._needed(self._operation)

    def _needed(self, operation_of: Callable[[Place, str], Operation]) -> dict[Instance, Operation]:
        """Returns the operations that the results and effects need, in order."""
        found: dict[Instance, Operation] = {}

        def sources(instance: Instance) -> list[Instance]:
            found[instance] = operation_of(*instance)
            return found[instance].sources

        reached([*instances_in(self.results), *self.awaited], sources)
        in_order = ((place, name) for name in self._propagation.nodes for place in Place)
        return {instance: found[instance] for instance in in_order if instance in found}

    def replicate(self, operations: Container[str], exchanges: Container[Output]) -> None:
        """Lets each tower make for itself, wherever it takes it, what home has made for all.

        Args:
            operations: the names of the nodes that home computes.
            exchanges: the tensors that home combines.
        """
        before = self.operations

        def replicated(operand: Operand) -> Operand:
            if operand.form in EXCHANGES or operand.form is Form.HOME:
                is_replicated = operand.output in exchanges if operand.form in EXCHANGES else operand.output[0] in operations
                return dataclasses.replace(operand, is_replicated=is_replicated)
            return dataclasses.replace(operand, parts=tuple(map(replicated, operand.parts)))

        def operation_of(place: Place, name: str) -> Operation:
            if place is Place.HOME:
                return before[place, name]
            operation = before[Place.HOME if place is Place.REPLICATED else place, name]
            awaited = () if place is Place.REPLICATED else operation.awaited
            return Operation(place, operation.definition, tuple(map(replicated, operation.operands)), awaited)

        self.operations = self._needed(operation_of)

    def __str__(self) -> str:
        results = ", ".join(map(str, self.results))
        return "\n".join([*map(str, self.operations.values()), f"results    {results}"])

    @property
    def meetings(self) -> list[Operand]:
        """The exchanges between towers: all that home combines, and all that is cut from whole tensors."""
        taken = [operand for operation in self.operations.values() for operand in operation.operands]
        met = [operand for operand in with_parts([*taken, *self.results]) if operand.is_meeting]
        return list({(operand.form, operand.output, operand.rows): operand for operand in met}.values())

    @property
    def early(self) -> set[Output]:
        """The exchanged tensors that towers take, directly or indirectly."""
        on_towers = [instance for instance in self.operations if instance[0] is not Place.HOME]
        before = reached(on_towers, lambda instance: self.operations[instance].sources)
        taken = with_parts(operand for instance in before for operand in self.operations[instance].operands)
        return {operand.output for operand in taken if operand.form in EXCHANGES}

    def awaits(self, name: str) -> tuple[Instance, ...]:
        """Returns the instances that stand for the nodes that a traced node waits for."""
        return self._instances_of(self._propagation.awaited[name])

    def _instances_of(self, effects: Iterable[str]) -> tuple[Instance, ...]:
        """Returns the instances of nodes that others wait for."""
        instances = []
        for name in effects:
            if name in self._given:
                continue
            definition, awaited = self._propagation.nodes[name], self._propagation.awaited[name]
            if definition.op != "Const" and (is_stateful(definition.op) or definition.op == "NoOp" or awaited):
                instances.append((Place.HOME if self._propagation.plans[name].is_at_home else Place.TOWERS, name))
        return tuple(instances)

    def _operation(self, place: Place, name: str) -> Operation:
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
        return Operation(place, definition, tuple(operands), self.awaits(name))

    def _operand(self, output: Output, need: Need, reading: np.ndarray | None = None) -> Operand:
        """Returns a tensor in the form that a tower needs."""
        placement = self._propagation.facts[output].placement
        if need == LOCAL_SHAPE and reading is not None:
            more = () if are_known(reading) else (self._own_version(output),)
            return Operand(Form.READ, output, more, reading=reading)
        if need in (REPLICATE, LOCAL_SHAPE, ANY_SHAPE) and self._constants.is_known(output):
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
        if self._constants.is_known(output):
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
        if self._constants.is_known(output):
            return Operand(Form.KNOWN, output)
        return Operand(Form.HOME if self._propagation.plans[name].is_at_home else Form.TOWERS, output)


def _exchange(placement: Placement) -> Form:
    """Returns the exchange by which home gets a tensor that towers have."""
    if isinstance(placement, Shard):
        return Form.GATHER
    if isinstance(placement, Variance):
        return Form.SUM
    if isinstance(placement, Partial):
        return Form[placement.reduction.upper()]
    return Form.FIRST if isinstance(placement, Own) else Form.LAST


def _local_need(placement: Placement) -> Need:
    """Returns the form in which a tower takes a tensor to compute its own version of a shape."""
    return LOCAL_SHAPE if placement == REPLICATE else placement
