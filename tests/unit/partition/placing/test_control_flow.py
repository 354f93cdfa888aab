"""Loops, branches and calls in which towers would have to meet are computed once, and the reason is given."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import agree, run


def looped(body, *variables, rounds=3):
    return tf.while_loop(lambda i, *_: i < rounds, lambda i, *state: (i + 1, *body(*state)), [0, *variables])[1:]


def called(function):
    return tf.function(function, jit_compile=True, autograph=False)


def sums_that_move_on(x):
    """A sum reaches the last variable after as many rounds as there are variables."""
    sums = [tf.zeros([2], x.dtype) for _ in range(13)]
    return looped(lambda *sums: (tf.reduce_sum(x, axis=0) + sums[0] / 2, *sums[:-1]), *sums, rounds=15)


def a_sum_or_a_constant(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(x, axis=0), lambda: tf.constant([1.0, 2.0], x.dtype))


def counts_that_move_on(x):
    counts = looped(lambda *counts: (tf.shape(x)[0] + counts[0], *counts[:-1]), *map(tf.constant, [0] * 3), rounds=5)
    return tf.cast(tf.stack(counts), x.dtype) * tf.reduce_sum(x)


def one_hot_among_all_rows(x):
    def one(y):
        marks = tf.one_hot(tf.argmax(y, axis=1), tf.shape(y)[0], dtype=y.dtype)
        return (y + tf.reduce_sum(marks, axis=1, keepdims=True),)

    return looped(one, x)


def rows_that_meet_the_same_sorted(x):
    in_order = tf.sort(x, axis=0)
    return looped(lambda y: (tf.tanh(y + in_order),), x)


STEPS = [
    (sums_that_move_on, "the placements of the loop's variables do not settle"),
    (a_sum_or_a_constant, "the branches place their results differently"),
    (lambda x: tf.while_loop(lambda y: tf.reduce_max(y) < 10.0, lambda y: 2 * y + 1, [x])[0], "in the loop's condition, Less"),
    (lambda x: called(lambda y: tf.cumsum(y, axis=0))(x), "in the function, Cumsum"),
    (lambda x: called(lambda y: y / tf.cast(tf.shape(y)[0], y.dtype))(x), "takes the number of all rows"),
    (rows_that_meet_the_same_sorted, "in the loop, AddV2"),
    (counts_that_move_on, "in the loop, a variable counts rows in some rounds only"),
    (one_hot_among_all_rows, "takes the number of all rows"),
    (lambda x: looped(lambda y: (y + tf.random.stateless_normal(tf.shape(y), [1, 2], dtype=y.dtype),), x), "in the loop"),
]


@pytest.mark.parametrize(("step", "reason"), STEPS)
def test_it_is_computed_once(step, reason):
    partition = agree(step, *([np.random.default_rng(rows).normal(size=(rows, 2))] for rows in (7, 2)))
    assert any(reason in gathered.reason for gathered in partition.gathered), partition.gathered


@pytest.mark.parametrize("known_rows", [None, 8])
def test_a_branch_that_reads_a_variable_runs_on_towers(known_rows):
    scale = tf.Variable(0.5, dtype=tf.float64)

    def step(x):
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: tf.reshape(x, [tf.shape(x)[0], 2]) * scale, lambda: x)

    assert not agree(step, [np.random.default_rng(0).normal(size=(8, 2))], known_rows=known_rows).gathered


@pytest.mark.parametrize(
    "step",
    [
        lambda x: looped(lambda y: (y + tf.reduce_sum(x, 0) / tf.zeros([2], x.dtype),), tf.zeros([2], x.dtype))[0],
        lambda x: tf.reduce_sum(x, 0) * tf.constant([np.inf, -np.inf], x.dtype) + tf.reduce_sum(x * x, 0),
    ],
)
def test_a_part_of_zero_and_an_infinite_factor(step):
    """Towers differ, as docs/same_and_different.md states; if no part is zero, they agree."""
    x = np.concatenate([np.zeros((3, 2)), np.ones((6, 2))])
    for rows, is_same in ((x, False), (x + 1, True)):
        (received,), _ = run(step, [rows])
        expected = tf.function(step, autograph=False)(tf.constant(rows)).numpy()
        assert np.isinf(expected).all()
        assert np.isnan(received).all() != is_same
        assert np.array_equal(received, expected) == is_same
