"""`explain` tells which share of the arithmetic of rows the towers divide among themselves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp

ROWS, FEATURES, HIDDEN, OUTPUTS, ROUNDS = 8, 5, 4, 3, 7
X = np.random.default_rng(0).normal(size=(ROWS, FEATURES))
# A multiplication and an addition are two operations.
FIRST, SQUARE, LAST = 2 * ROWS * FEATURES * HIDDEN, 2 * ROWS * HIDDEN * HIDDEN, 2 * ROWS * HIDDEN * OUTPUTS
# The counters of loops count, too.
ABOUT = 0.01


def between(function):
    """Returns two dense layers, and a function between them."""
    first, last = (keras.layers.Dense(size, use_bias=False) for size in (HIDDEN, OUTPUTS))
    return keras.Sequential([first, keras.layers.Lambda(function, output_shape=(HIDDEN,)), last])


SQUARES = tf.constant(np.eye(HIDDEN) / 2)


def rolled(x):
    return tf.roll(x, 1, axis=0)


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < ROUNDS, lambda i, x: (i + 1, tf.matmul(x, SQUARES)), (0, x))[1]


def in_a_branch(x):
    return tf.cond(tf.reduce_sum(SQUARES) > 0, lambda: tf.matmul(x, SQUARES), lambda: x)


def explained(model, data=X, **compiled):
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile(**compiled)
    return parallel.explain(data, "train" if compiled else "predict")


@pytest.mark.parametrize(
    ("function", "shared", "once"),
    [
        (lambda x: rolled(in_a_loop(x)), FIRST + ROUNDS * SQUARE, LAST),
        (lambda x: in_a_loop(rolled(x)), FIRST, ROUNDS * SQUARE + LAST),
        (lambda x: rolled(in_a_branch(x)), FIRST + SQUARE, LAST),
        (lambda x: in_a_branch(rolled(x)), FIRST, SQUARE + LAST),
    ],
    ids=["after a loop", "before a loop", "after a branch", "before a branch"],
)
def test_the_share_as_computed_by_hand(function, shared, once):
    explanation = explained(between(function))
    assert explanation.share_of_arithmetic == pytest.approx(shared / (shared + once), abs=ABOUT)
    assert f"The towers share {100 * explanation.share_of_arithmetic:.1f} % of the arithmetic." in str(explanation)


def test_updates_of_weights_do_not_count():
    """A batch of a few rows has less to do in its layers than Adam has for their weights."""
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(500), keras.layers.Dense(1)])
    assert explained(model, (X, X[:, :1]), optimizer="adam", loss="mse").share_of_arithmetic > 0.999


def test_the_gradient_of_a_loop_counts_its_rounds():
    """All but the last layer's forward pass is on towers: the labels have rows, and so has the gradient."""
    explanation = explained(between(lambda x: rolled(in_a_loop(x))), (X, X[:, :OUTPUTS]), optimizer="sgd", loss="mse")
    shared = 2 * FIRST + 2 * ROUNDS * SQUARE + 2 * LAST
    assert explanation.share_of_arithmetic == pytest.approx(shared / (shared + LAST), abs=2 * ABOUT)


def test_a_step_for_one_number_of_rows_has_no_known_share():
    explanation = explained(between(lambda x: tf.reshape(x, (ROWS, HIDDEN))))
    assert explanation.share_of_arithmetic is None
    assert "arithmetic" not in str(explanation)
