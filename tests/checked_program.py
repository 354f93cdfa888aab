"""Check the programs of home and of the towers that tests make, and their graphs."""

from keras_dp.partition.building.builder import Builder
from keras_dp.partition.facts.operations import READS, SHAPES
from keras_dp.partition.program.operands import EXCHANGES, Form, instances_in, with_parts
from keras_dp.partition.program.places import Place
from keras_dp.partition.program.program import Program
from keras_dp.partition.tensorflow_internals import is_stateful
from keras_dp.partition.tracing.graph import Graph, reached

AT_HOME = EXCHANGES | {Form.GIVEN, Form.KNOWN, Form.HOME}
ON_TOWERS = {Form.GIVEN_ROWS, Form.TOWERS}
CAN_FAIL = {"GatherNd", "GatherV2", "ResourceGather"}  # for some indices


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
    assert done.issuperset(program.effects), "an effect is missing"
    exchanged = {form: set() for form in EXCHANGES}
    for one in program.operands:
        if one.form in EXCHANGES:
            exchanged[one.form].update(instances_in(one.parts))
    of_last = exchanged[Form.LAST]
    awaited = reached([*program.failing, *set().union(*exchanged.values())], sources_of(program))
    assert program.late.isdisjoint(awaited), "a late write would wait for itself"
    # A late write waits for one of the instances of which home takes the last tower's.
    done = reached({*program.failing, *set().union(*exchanged.values()) - of_last}, sources_of(program, of_last))
    for instance, operation in program.operations.items():
        if program.late and instance[0] is Place.TOWERS and operation.definition.op in CAN_FAIL:
            assert instance in done, f"can fail after a write: {operation}"


def sources_of(program, left_out=()):
    return lambda instance: set(program.operations[instance].sources).difference(left_out)


def check_all_programs():
    """Lets each program be checked that is made from now on, and the graph that is built from it."""
    made = Program.__init__

    def checked(self, *arguments, **named):
        made(self, *arguments, **named)
        check(self)

    Program.__init__ = checked
    build = Builder.build

    def built(self):
        made = build(self)
        assert not Graph(made.graph.function.node_def).cycle, "nodes wait for each other"
        return made

    Builder.build = built
