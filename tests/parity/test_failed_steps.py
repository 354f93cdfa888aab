"""A step that fails leaves the weights of the last good step, and its error names the tower and the user's line."""

import inspect
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_change

import keras_dp
from keras_dp.partition import step

rng = np.random.default_rng(0)
X, Y = np.abs(rng.normal(size=(8, 3))), rng.normal(size=(8, 2))


def slow(x):
    """Returns zero, after some time."""
    square = tf.zeros([700, 700], x.dtype) + x[:, :1][0, 0]
    for _ in range(3):
        square = square @ square / 700.0
    return 0 * square[0, 0]


class Watched(keras.Model):
    """Fails late if an input is negative, in an output that only a metric uses, so that no gradient waits for it."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        watched = tf.math.log(x[:, :1])
        is_bad = tf.cast(tf.math.is_nan(slow(watched)), tf.int32)
        return {"y": self.dense(x), "watched": watched * tf.gather(tf.ones([1], x.dtype), 9 * is_bad)}


def change_by_failed_steps(parallel, targets, bad, message):
    """Returns the largest change of a weight by failed steps after a good one."""
    parallel.train_on_batch(X, targets)
    before = parallel.get_weights()
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            parallel.train_on_batch(bad, targets)
    change = largest_change(before, parallel.get_weights())
    parallel.train_on_batch(X, targets)
    assert largest_change(before, parallel.get_weights()) > 1e-6
    return change


@pytest.mark.parametrize("is_held_back", [True, False])
def test_nothing_is_written_before_all_towers_have_met(is_held_back, monkeypatch):
    """Weights would be written otherwise."""
    if not is_held_back:
        monkeypatch.setattr(step, "with_late_writes", lambda program, _: program)
    parallel = keras_dp.DataParallelModel(Watched(), devices=2)
    parallel.compile("adam", {"y": "mse", "watched": None}, metrics={"watched": ["mse"]})
    targets = {"y": Y, "watched": np.zeros((8, 1))}
    assert (change_by_failed_steps(parallel, targets, -np.ones_like(X), "indices = 9") == 0) == is_held_back


def checked(x):
    return tf.debugging.check_numerics(x, "broken")


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


def looked_up_in_a_branch(x):
    """TensorFlow lets a node that waits for the branch wait for the operations in it that have effects alone."""
    largest = tf.reduce_max(x)
    return tf.cond(largest > 100.0, lambda: tf.gather(tf.ones([1], x.dtype), tf.cast(largest, tf.int32)), lambda: largest)


def looked_up_in_a_case(x):
    largest = tf.reduce_max(x)
    branches = [lambda: largest, lambda: tf.gather(tf.ones([1], x.dtype), tf.cast(largest, tf.int32))]
    return tf.switch_case(tf.cast(largest > 100.0, tf.int32), branches)


def one_result_is_looked_up(x):
    """The other result of the branch is sent to the towers before the lookup fails."""
    largest = tf.reduce_max(x)

    def fails():
        return largest, tf.gather(tf.ones([1], x.dtype), tf.cast(largest + slow(x), tf.int32))

    sent, looked_up = tf.cond(largest > 100.0, fails, lambda: (largest, largest))
    return tf.stop_gradient(looked_up + 0 * tf.reduce_sum(x * sent))


CHECKS = {
    "assertion": (asserted, 1000.0, "broken"),
    "numbers": (checked, np.nan, "broken"),
    "assertion in a loop": (asserted_in_a_loop, 1000.0, "broken"),
    "lookup": (looked_up, 1000.0, r"not in \[0, 1\)"),
    "lookup in a branch": (looked_up_in_a_branch, 1000.0, r"not in \[0, 1\)"),
    "one of two results": (one_result_is_looked_up, 1000.0, r"not in \[0, 1\)"),
    "lookup in a case": (looked_up_in_a_case, 1000.0, r"not in \[0, 1\)"),
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


def failing(layer):
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", "mse")
    return parallel


def note_of(call, *arguments, **named):
    """Returns what an error of TensorFlow says below its message."""
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(*arguments, **named)
    return "".join(getattr(error.value, "__notes__", []))


def in_a_scope_like_a_place(x):
    with tf.name_scope("tower_0"):
        return checked(x)


def bounded(x):
    asserted(x)
    return x


def mixed(x):
    return tf.gather(x, tf.argsort(x, axis=0) + 9, axis=0)[:, :, 0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes of TensorFlow's errors")
@pytest.mark.parametrize(
    ("function", "method", "bad", "failed"),
    [
        (checked, "fit", np.nan, r"^keras_dp: \S+/CheckNumerics failed on tower 1 \(CPU:1\)"),
        (checked, "predict_on_batch", np.nan, r"^keras_dp: \S+/CheckNumerics failed on tower 1 \(CPU:1\)"),
        (
            in_a_scope_like_a_place,
            "train_on_batch",
            np.nan,
            r"/tower_0/\S*CheckNumerics failed on tower 1 \(CPU:1\)",
        ),
        (bounded, "train_on_batch", 1000.0, "/Assert failed"),  # in a branch
        (mixed, "train_on_batch", 0.0, "/GatherV2 failed on all rows, for which it is computed once"),
    ],
)
def test_an_error_names_the_operation_the_tower_and_the_users_line(function, method, bad, failed):
    """TensorFlow alone says of a function's nodes: <stack traces unavailable>."""
    called = {in_a_scope_like_a_place: checked, bounded: asserted}.get(function, function)
    source, start = inspect.getsourcelines(called)
    arguments = {"fit": {"y": Y, "shuffle": False}, "train_on_batch": {"y": Y}, "predict_on_batch": {}}[method]
    note = note_of(getattr(failing(keras.layers.Lambda(function)), method), with_row_6(bad), **arguments)
    line = start + len(source) - 1
    assert re.search(rf"{failed}, at {re.escape(__file__)}, line {line}\.", note)
    assert note.endswith("To run the step line by line on one device, compile with run_eagerly=True.")


def test_an_error_of_the_data_gets_no_note():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, "data"), y))
    assert note_of(failing(keras.layers.Identity()).evaluate, dataset.batch(4)) == ""


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_written_before_a_check_that_no_gradient_needs(check):
    function, bad, message = CHECKS[check]
    assert change_by_failed_steps(failing(CheckedAside(function)), Y, with_row_6(bad), message) == 0
