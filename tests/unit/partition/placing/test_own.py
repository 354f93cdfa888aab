"""Values that each tower has for itself: the identity on one device, and the first tower's where one value is asked for."""

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import partitioned_step

from keras_dp.partition.own import own_part, total_of_own


def results_of(step, x, known_rows=None):
    """Returns the results of a step on three towers."""
    partitioned, _ = partitioned_step(step, [tf.TensorSpec([known_rows, *x.shape[1:]], tf.float64)], [True], known_rows)
    return [np.array(result) for result in tf.nest.flatten(partitioned(tf.constant(x)))]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("rows", "first"), [(7, 2), (2, 1), (1, 1)])
def test_one_value_of_all_towers_is_that_of_the_first_row(rows, first, is_known):
    """With fewer rows than towers, the first slice is empty: its borrowed row does not count."""
    x = np.random.default_rng(rows).normal(size=(rows, 2))
    (received,) = results_of(lambda x: own_part(tf.reduce_sum(x, axis=0)), x, rows if is_known else None)
    np.testing.assert_allclose(received, x[:first].sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("rows", [7, 2, 1])
def test_the_total_of_own_parts_is_the_sum(rows):
    x = np.random.default_rng(rows).normal(size=(rows, 2))
    (received,) = results_of(lambda x: total_of_own(own_part(tf.reduce_sum(x, axis=0)) ** 2), x)
    ends = [rows * (i + 1) // 3 for i in range(3)]
    slices = [x[begin:end].sum(axis=0) for begin, end in zip([0, *ends], ends, strict=False)]
    np.testing.assert_allclose(received, sum(own**2 for own in slices), rtol=1e-12)


def test_each_tower_computes_with_its_own_value():
    x = np.random.default_rng(0).normal(size=(7, 2))
    (received,) = results_of(lambda x: x * tf.exp(own_part(tf.reduce_sum(x, axis=0))), x)
    own = [x[begin:end].sum(axis=0) for begin, end in ((0, 2), (2, 4), (4, 7))]
    np.testing.assert_allclose(received, x * np.exp(np.repeat(own, [2, 2, 3], axis=0)), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("ConcatV2", lambda own, x: tf.concat([x, own], axis=0)),
        ("AddV2", lambda own, x: own + tf.reduce_sum(tf.exp(x), axis=0)),
    ],
)
def test_own_values_do_not_meet_rows_of_other_towers(kind, step):
    with pytest.raises(ValueError, match=rf"{kind} .*test_own.py, line \d+, combines a value that each tower has for itself"):
        results_of(lambda x: step(own_part(tf.reduce_sum(x, axis=0, keepdims=True)), x), np.ones((7, 2)))
