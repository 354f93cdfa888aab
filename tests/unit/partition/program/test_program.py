"""The towers' program says where each operation runs, and in which form it takes its tensors."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from checked_program import check
from partitioned_steps import partitioned_step

import keras_dp
from keras_dp.partition.program.operands import Form, Operand
from keras_dp.partition.program.places import Place

PAGE = Path(keras_dp.__file__).parents[1] / "docs/architecture.md"
UPDATE, LOSS = (Place.HOME, "AssignSubVariableOp"), (Place.TOWERS, "Square")


@pytest.fixture
def regression():
    """The program of a step of gradient descent on the squared distance from a plane."""
    weight = tf.Variable(np.ones((3, 1)))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weight) - y))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    specs = [tf.TensorSpec([None, size], tf.float64) for size in (3, 1)]
    return partitioned_step(step, specs, [True, True], devices=["CPU:0", "CPU:1"])[1].program


def test_the_program_is_printed_as_the_page_shows_it(regression):
    assert str(regression) in PAGE.read_text(encoding="utf-8")


def takes(program, instance, operand):
    operation = program.operations[instance]
    program.operations[instance] = dataclasses.replace(operation, operands=(operand, *operation.operands[1:]))


FAULTS = {
    "takes what is made later": lambda program: program.operations.update({LOSS: program.operations.pop(LOSS)}),
    "or not at all": lambda program: program.operations.pop(LOSS),
    "is not at home": lambda program: takes(program, UPDATE, Operand(Form.TOWERS, (LOSS[1], 0))),
    "no tower has it": lambda program: takes(program, UPDATE, Operand(Form.SUM, ("mul", 0), (Operand(Form.HOME, ("mul", 0)),))),
    "home does not have it": lambda program: takes(
        program, LOSS, Operand(Form.PART, ("sub", 0), (Operand(Form.TOWERS, ("sub", 0)),))
    ),
    "happens twice": lambda program: program.operations.update(
        {(Place.TOWERS, UPDATE[1]): dataclasses.replace(program.operations[UPDATE], place=Place.TOWERS)}
    ),
    "an effect is missing": lambda program: program.operations.pop(UPDATE),
    "would wait for itself": lambda program: object.__setattr__(program, "late", frozenset([LOSS])),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_program_that_cannot_run_is_found(message, regression):
    check(regression)
    FAULTS[message](regression)
    with pytest.raises(AssertionError, match=message):
        check(regression)


def test_writes_wait_for_a_loop_on_all_towers_though_home_takes_the_last_ones_result():
    total = tf.Variable(np.zeros(3))

    def step(x):
        def body(i, rows):
            return i + 1, rows + tf.gather(tf.ones([1], x.dtype), tf.cast(rows[:, :1] > 100.0, tf.int32))

        rounds, _ = tf.while_loop(lambda i, _: i < 2, body, [0, x])
        total.assign_sub(tf.reduce_mean(x, 0))
        return rounds

    specs = [tf.TensorSpec([None, 3], tf.float64)]
    program = partitioned_step(step, specs, [True], devices=["CPU:0", "CPU:1"])[1].program
    assert Form.LAST in {operand.form for operand in program.operands}
    assert program.late == {(Place.HOME, "AssignSubVariableOp")}
    assert program.failing == {(Place.TOWERS, "while")}
