"""Define the operations of the towers' program, and the forms in which they take tensors."""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.program.places import Instance, Place
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
    VARIANCE = "variance of {}"  # home combines the towers' variances around their own means
    MAX = "maximum of {}"
    MIN = "minimum of {}"
    PROD = "product of {}"
    ALL = "all of {}"
    ANY = "any of {}"
    GATHER = "all rows of {}"  # home gathers the towers' rows
    OWN_ROWS = "this worker's rows of {}"  # home gathers those of this worker alone
    FIRST = "the first tower's {}"  # home takes the value of the tower with the first row
    LAST = "the last tower's {}"  # all towers have it alike, or count their rows in it
    CUT = "rows cut from {}"  # the tower's rows of a whole tensor
    PART = "a part of {}"  # of a sum that is whole, one tower takes all, the others take zeros
    READ = "{} read as its rows"  # a shape in which some integers are read as the tower's number of rows

    __hash__ = object.__hash__  # as that of `Place`


REDUCTIONS = frozenset([Form.SUM, Form.MAX, Form.MIN, Form.PROD, Form.ALL, Form.ANY])
EXCHANGES = REDUCTIONS | {Form.VARIANCE, Form.GATHER, Form.OWN_ROWS, Form.FIRST, Form.LAST}
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
