"""`explain` tells which share of the arithmetic of rows the towers divide among themselves."""

import random

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


class Between(keras.Model):
    """Two dense layers, and a function between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = (keras.layers.Dense(size, use_bias=False) for size in (HIDDEN, OUTPUTS))
        self.function = function

    def call(self, x):
        return self.last(self.function(self.first(x)))


SQUARES = tf.constant(np.eye(HIDDEN) / 2)


def rolled(x):
    return tf.roll(x, 1, axis=0)


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < ROUNDS, lambda i, x: (i + 1, tf.matmul(x, SQUARES)), (0, x))[1]


def in_a_branch(x):
    return tf.cond(tf.reduce_sum(SQUARES) > 0, lambda: tf.matmul(x, SQUARES), lambda: x)


def explained(model, step="predict", data=X, **compiled):
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile(**compiled)
    return parallel.explain(data, step)


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
    explanation = explained(Between(function))
    assert explanation.share_of_arithmetic == pytest.approx(shared / (shared + once), abs=ABOUT)
    assert f"The towers share {100 * explanation.share_of_arithmetic:.1f} % of the arithmetic." in str(explanation)


def test_updates_of_weights_do_not_count():
    """A batch of a few rows has less to do in its layers than Adam has for their weights."""
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(500), keras.layers.Dense(1)])
    explanation = explained(model, "train", (X, X[:, :1]), optimizer="adam", loss="mse")
    assert explanation.share_of_arithmetic > 0.999


def test_the_gradient_of_a_loop_counts_its_rounds():
    """All but the last layer's forward pass is on towers: the labels have rows, and so has the gradient."""
    explanation = explained(Between(lambda x: rolled(in_a_loop(x))), "train", (X, X[:, :OUTPUTS]), optimizer="sgd", loss="mse")
    shared = 2 * FIRST + 2 * ROUNDS * SQUARE + 2 * LAST
    assert explanation.share_of_arithmetic == pytest.approx(shared / (shared + LAST), abs=2 * ABOUT)


def test_a_step_that_gathers_its_rows_shares_nothing():
    model = keras.Sequential([keras.layers.Lambda(lambda x: x[::-1]), keras.layers.Dense(HIDDEN)])
    assert explained(model).share_of_arithmetic == 0


def test_a_step_for_one_number_of_rows_has_no_known_share():
    explanation = explained(Between(lambda x: tf.reshape(x, (ROWS, HIDDEN))))
    assert explanation.share_of_arithmetic is None
    assert "arithmetic" not in str(explanation)


def test_explaining_leaves_python_as_it_was():
    """A step may keep the number of rows that it saw, and draw from Python's and NumPy's generators while it is traced."""

    class Remembering(Between):
        def predict_step(self, data):
            self.rows = data.shape[0]
            return self(data) * random.random() * np.random.random()

    model = Remembering(tf.identity)
    model(X)
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile()
    states = random.getstate(), np.random.get_state()[1].tolist()
    assert parallel.explain(X, "predict").share_of_arithmetic == 1
    assert model.rows == ROWS
    assert states == (random.getstate(), np.random.get_state()[1].tolist())
