"""A step that fails leaves the weights of the last good step, and its error names the tower and the user's line."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_training, largest_change

import keras_dp
from keras_dp.partition import step

rng = np.random.default_rng(0)
X, Y = np.abs(rng.normal(size=(8, 3))), rng.normal(size=(8, 2))


class Watched(keras.Model):
    """Fails late if an input is negative, in an output that only a metric uses, so that no gradient waits for it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        watched = tf.math.log(x[:, :1])
        square = tf.zeros([700, 700], x.dtype) + watched[0, 0]
        for _ in range(3):
            square = square @ square / 700.0
        return {
            "y": self.dense(x),
            "watched": watched * tf.gather(tf.ones([1], x.dtype), 9 * tf.cast(tf.math.is_nan(square[0, 0]), tf.int32)),
        }


def one_good_and_some_failed_steps():
    """Returns the largest change of a weight by failed steps after a good one."""
    inner = Watched()
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.compile("adam", {"y": "mse", "watched": None}, metrics={"watched": ["mse"]})
    targets = {"y": Y, "watched": np.zeros((8, 1))}
    parallel.train_on_batch(X, targets)
    before = inner.get_weights()
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match="indices = 9"):
            parallel.train_on_batch(-np.ones_like(X), targets)
    change = largest_change(before, inner.get_weights())
    parallel.train_on_batch(X, targets)
    assert largest_change(before, inner.get_weights()) > 1e-6
    return change


def test_nothing_is_written_before_all_towers_have_met():
    assert one_good_and_some_failed_steps() == 0


def test_weights_would_be_written_otherwise(monkeypatch):
    monkeypatch.setattr(step, "hold_back_writes", lambda built: None)
    assert one_good_and_some_failed_steps() > 0


def test_a_second_update_in_a_step_does_not_wait_for_itself():
    """The towers meet again after the first update, so that it cannot wait until all of them have met."""

    class Twice(keras.Sequential):
        def train_step(self, data):
            for _ in range(2):
                logs = super().train_step(data)
            return logs

    def build():
        return Twice([keras.Input((3,)), keras.layers.Dense(2)])

    assert_same_training(build, lambda: {"optimizer": "sgd", "loss": "mse"}, [((X, Y), 5)], 3, epochs=1)


class Checked(keras.layers.Layer):
    def call(self, x):
        return tf.debugging.check_numerics(x, "broken")  # This line.


def slow(x):
    """Returns zero, after some time."""
    square = tf.zeros([700, 700], x.dtype) + x[:, :1][0, 0]
    for _ in range(3):
        square = square @ square / 700.0
    return 0 * square[0, 0]


def asserted(x):
    """TensorFlow makes a branch of this."""
    tf.debugging.assert_less(tf.reduce_max(x), tf.cast(100.0, x.dtype), "broken")


def asserted_in_a_loop(x):
    def body(i):
        asserted(x + tf.cast(i, x.dtype))
        return i + 1

    tf.while_loop(lambda i: i < 2, body, [0])


def looked_up(x):
    """Fails in an operation that is not there to check."""
    return tf.gather(tf.ones([1], x.dtype), tf.cast(x > 100.0, tf.int32))


CHECKS = {
    "numbers": (lambda x: tf.debugging.check_numerics(x, "broken"), np.nan, "broken"),
    "assertion": (asserted, 1000.0, "broken"),
    "assertion in a loop": (asserted_in_a_loop, 1000.0, "broken"),
    "lookup": (looked_up, 1000.0, r"not in \[0, 1\)"),
}


class CheckedAside(keras.layers.Layer):
    """Checks a value that no gradient needs."""

    def __init__(self, check):
        super().__init__()
        self.check = check
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        checked = self.check(x + slow(x))
        if tf.is_tensor(checked):
            self.kept.assign(tf.reduce_sum(checked))
        return tf.where(tf.abs(x) < 100.0, x, tf.zeros_like(x))


def with_row_6(value):
    """Returns rows of which one, on the second of two towers, has this value."""
    x = X.copy()
    x[6] = value
    return x


def failing(layer, loss="mse"):
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", loss)
    return parallel


def note_of(call, *arguments, **named):
    """Returns what an error of TensorFlow says below its message."""
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(*arguments, **named)
    return "".join(getattr(error.value, "__notes__", []))


needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes of TensorFlow's errors")


@needs_notes
@pytest.mark.parametrize("method", ["fit", "predict_on_batch"])
def test_an_error_names_the_operation_the_tower_and_the_users_line(method):
    """TensorFlow alone says of a function's nodes: <stack traces unavailable>."""
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# This line."))
    arguments = {"y": Y, "shuffle": False} if method == "fit" else {}
    note = note_of(getattr(failing(Checked()), method), with_row_6(np.nan), **arguments)
    where = rf"{re.escape(__file__)}, line {line}"
    assert re.search(rf"^keras_dp: \S+/CheckNumerics failed on tower 1 \(CPU:1\), at {where}\.", note)
    assert note.endswith("To run the step line by line on one device, compile with run_eagerly=True.")


@needs_notes
def test_an_assertion_inside_a_branch_is_named():
    bounded = keras.layers.Lambda(lambda x: asserted(x) or x)
    note = note_of(failing(bounded).fit, with_row_6(1000.0), Y)
    assert re.search(rf"/Assert failed, at {re.escape(__file__)}, line \d+\.", note)


@needs_notes
def test_an_operation_in_a_scope_that_is_called_like_a_place_is_named():
    class Scoped(Checked):
        def call(self, x):
            with tf.name_scope("tower_0"):
                return super().call(x)

    note = note_of(failing(Scoped()).fit, with_row_6(np.nan), Y, shuffle=False)
    assert re.search(rf"/tower_0/\S*CheckNumerics failed on tower 1 \(CPU:1\), at {re.escape(__file__)}, line \d+\.", note)


@needs_notes
def test_an_operation_that_is_computed_once_belongs_to_no_tower():
    sorting = keras.layers.Lambda(lambda x: tf.gather(x, tf.argsort(x, axis=0) + 9, axis=0)[:, :, 0])
    note = note_of(failing(sorting).fit, X, Y)
    assert re.search(r"/GatherV2 failed on all rows, for which it is computed once, at ", note)


def test_an_error_of_the_data_gets_no_note():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, "data"), y))
    assert note_of(failing(keras.layers.Identity()).evaluate, dataset.batch(4)) == ""


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_written_before_a_check_that_no_gradient_needs(check):
    function, bad, message = CHECKS[check]
    parallel = failing(CheckedAside(function))
    parallel.train_on_batch(X, Y)
    before = parallel.get_weights()
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            parallel.train_on_batch(with_row_6(bad), Y)
    assert largest_change(before, parallel.get_weights()) == 0
    parallel.train_on_batch(X, Y)
    assert largest_change(before, parallel.get_weights()) > 1e-6
