"""Check the programs of home and of the towers that tests make."""

from keras_dp.partition.building import builder
from keras_dp.partition.building.instances import Place
from keras_dp.partition.building.program import EXCHANGES, Form, Program, with_parts
from keras_dp.partition.facts.operations import READS, SHAPES
from keras_dp.partition.tensorflow_internals import is_stateful

AT_HOME = EXCHANGES | {Form.GIVEN, Form.KNOWN, Form.HOME}
ON_TOWERS = {Form.GIVEN_ROWS, Form.TOWERS}


class CheckedProgram(Program):
    """A program that is checked when it is made."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        check(self)

    def replicate(self, *chosen):
        super().replicate(*chosen)
        check(self)


def check(program):
    """Asserts that each tensor is where it is taken, that nothing waits for what comes later, and that effects happen once."""
    done = set()
    for instance, operation in program.operations.items():
        assert done.issuperset(operation.sources), f"takes what is made later, or not at all: {operation}"
        if operation.place in (Place.HOME, Place.REPLICATED) and operation.definition.op not in SHAPES:
            assert all(operand.form in AT_HOME for operand in operation.operands), f"is not at home: {operation}"
        for operand in with_parts(operation.operands):
            if operand.form in EXCHANGES:
                assert operand.parts[0].form in ON_TOWERS, f"no tower has it: {operand} in {operation}"
            elif operand.form in (Form.CUT, Form.PART):
                assert operand.parts[0].form in AT_HOME, f"home does not have it: {operand} in {operation}"
        has_effects = is_stateful(operation.definition.op) and operation.definition.op not in READS
        others = [place for place in Place if place is not operation.place]
        assert not has_effects or done.isdisjoint((place, instance[1]) for place in others), f"happens twice: {operation}"
        done.add(instance)
    assert done.issuperset(program.awaited), "an effect is missing"


def check_all_programs():
    """Lets each program be checked that is made from now on."""
    builder.Program = CheckedProgram
