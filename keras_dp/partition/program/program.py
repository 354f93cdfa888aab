"""Define the towers' program: the operations that run at home and on towers, and the form in which each takes its tensors."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from keras_dp.partition.program.operands import EXCHANGES, Operand, Operation, with_parts
from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of home and of the towers: what is needed for some outputs and effects, and nothing else.

    A pass over a program returns another one.

    Attributes:
        operations: the operations, each after those that it is made from.
        results: the operands of the wanted tensors.
        effects: the instances that must run.
        late: the instances that wait for all exchanges, and for the instances in `failing`; see `late_writes`.
        failing: the instances that can fail.
    """

    operations: Mapping[Instance, Operation]
    results: Sequence[Operand]
    effects: Sequence[Instance]
    late: frozenset[Instance] = frozenset()
    failing: frozenset[Instance] = frozenset()

    def __str__(self) -> str:
        lines = [f"{one}{'; after all that can fail' * (instance in self.late)}" for instance, one in self.operations.items()]
        return "\n".join([*lines, f"results    {', '.join(map(str, self.results))}"])

    @property
    def operands(self) -> Iterable[Operand]:
        """The operands of all operations and results, and those from which they are made."""
        taken = [operand for operation in self.operations.values() for operand in operation.operands]
        return with_parts([*taken, *self.results])

    @property
    def meetings(self) -> list[Operand]:
        """The exchanges between towers: all that home combines, and all that is cut from whole tensors."""
        met = [operand for operand in self.operands if operand.is_meeting]
        return list({(operand.form, operand.output, operand.rows): operand for operand in met}.values())

    @property
    def early(self) -> set[Output]:
        """The exchanged tensors that towers take, directly or indirectly."""
        on_towers = [instance for instance in self.operations if instance[0] is not Place.HOME]
        before = reached(on_towers, lambda instance: self.operations[instance].sources)
        taken = with_parts(operand for instance in before for operand in self.operations[instance].operands)
        return {operand.output for operand in taken if operand.form in EXCHANGES}
