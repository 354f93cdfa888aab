"""Devices with unlike shares of the rows train with the result of one device."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_results, assert_same_run, plain_run, run, training
from keras import layers
from test_packed_copies import attention
from test_programs import KINDS, plain, program
from ways_of_wrapping import wrapped

import keras_dp
from keras_dp.batches.shares import Shares
from keras_dp.wrapping.one_state import own_of

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(23, 6, 6, 3)), RNG.integers(0, 4, 23)
TOKENS = RNG.integers(0, 30, (23, 6))


def convolutions():
    stack = [layers.Conv2D(6, 3, padding="same", activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6, 6, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(4, "softmax")])


def comparing():
    stack = [layers.Flatten(), layers.Dropout(0.2), layers.Dense(4)]
    return keras.Sequential([keras.Input((6, 6, 3)), *stack])


def of_all_pairs(y, p):
    """Compares all rows of a batch with each other, and sorts them."""
    similar = keras.ops.softmax(p @ keras.ops.transpose(p))
    same = keras.ops.cast(y == keras.ops.transpose(y), p.dtype)
    return keras.ops.mean(keras.ops.square(similar - same)) + keras.ops.mean(keras.ops.sort(p[:, 0])[:2])


CROSS_ENTROPY = "sparse_categorical_crossentropy"
MODELS = {
    "convolutions": (convolutions, X, CROSS_ENTROPY),
    "attention": (attention, TOKENS, CROSS_ENTROPY),
    "comparing": (comparing, X, of_all_pairs),
}


def script(model, x, loss, is_compiled):
    """Trains on batches with a smaller last one, of known rows, and of fewer rows than towers; then evaluates and predicts."""
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=1.0)
    # On one device, XLA would draw other random numbers.
    is_compiled &= isinstance(model, keras_dp.DataParallelModel)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=is_compiled)
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(7)
    known = {"batch_size": 9, "shuffle": False, "verbose": 0}
    histories = [model.fit(data, shuffle=False, verbose=0).history, model.fit(x[:18], Y[:18], **known).history]
    few = [model.train_on_batch(x[:rows], Y[:rows], return_dict=True) for rows in (2, 1)]
    return histories, few, model.evaluate(x, Y, batch_size=8, verbose=0), model.predict(x, batch_size=9, verbose=0)


def program_of(name, is_compiled=False):
    build, x, loss = MODELS[name]
    return build, training(functools.partial(script, x=x, loss=loss, is_compiled=is_compiled))


@functools.cache
def expected(name):
    return plain_run(*program_of(name))


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("convolutions", [3, 1]),
        ("convolutions", [1, 2, 5]),
        ("convolutions", [1, 30]),
        ("attention", [3, 1]),
        ("comparing", [1, 2, 5]),
        ("comparing", [1, 30]),
    ],
)
def test_unlike_shares_train_with_the_result_of_one_device(name, shares):
    """With [1, 30], the first device has no row of these batches."""
    assert_same_run(*program_of(name), len(shares), expected(name), rows=shares)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("attention", {"slices_per_device": 2}),
        ("convolutions", {"pack_copies": True, "jit_compile": True, "parameter_device": "sharded"}),
        ("convolutions", {"slices_per_device": 2, "jit_compile": True}),
        ("convolutions", {"communication": "nccl", "parameter_device": "sharded"}),
    ],
)
def test_they_do_so_in_each_way(name, arguments):
    """On logical CPUs, TensorFlow runs the collectives of NCCL by itself: their messages are padded to the longest one."""
    wrapper_arguments = {name: value for name, value in arguments.items() if name != "jit_compile"}
    program = program_of(name, "jit_compile" in arguments)
    assert_same_run(*program, 3, expected(name), rows=[1, 2, 5], **wrapper_arguments)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_program_trains_with_unlike_shares(name):
    assert_same_run(*program(name), 3, plain(name), rows=[5, 1, 2])


def test_the_moments_of_the_first_rows_are_those_of_a_first_device_with_so_many():
    """With [1, 30], the first device has no row of these batches, and the second one all of them."""
    program = program_of("convolutions")
    first = run(*program, functools.partial(wrapped, devices=2, rows=[1, 30], batch_norm="first"))
    assert_same_results(plain_run(*program), first)
    other = run(*program, functools.partial(wrapped, devices=2, rows=[3, 1], batch_norm="first"))
    with pytest.raises(AssertionError):
        assert_same_results(first, other)


def test_negative_control_moments_of_unlike_slices_are_not_those_of_like_ones():
    """With each slice's own moments, the result depends on the cuts: the shares take effect, and the comparison sees it."""
    results = {}
    for shares in ((1, 1), (3, 1), (6, 2)):
        wrap = functools.partial(wrapped, devices=2, rows=shares, batch_norm="local")
        results[shares] = run(*program_of("convolutions"), wrap)
    assert_same_results(results[3, 1], results[6, 2])
    with pytest.raises(AssertionError):
        assert_same_results(results[1, 1], results[3, 1])


def test_negative_control_slices_that_leave_out_a_row_are_noticed(monkeypatch):
    def dense():
        return keras.Sequential([keras.Input((6, 6, 3)), layers.Flatten(), layers.Dense(4, "softmax")])

    def trained(model):
        model.compile("adam", "sparse_categorical_crossentropy")
        return model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(7), shuffle=False, verbose=0).history

    def without_a_row(*given):
        (begin, end), *others = ranges(*given)
        return [(begin, end - 1), *others]

    of_plain, ranges = assert_same_run(dense, trained, 2, rows=[3, 1]), Shares.ranges
    monkeypatch.setattr(Shares, "ranges", without_a_row)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_run(dense, trained, 2, of_plain, rows=[3, 1])


def compiled(shares, **arguments):
    parallel = keras_dp.DataParallelModel(convolutions(), len(shares), rows=shares, **arguments)
    parallel.compile("sgd", CROSS_ENTROPY)
    return parallel


def test_the_report_and_the_first_line_tell_the_sizes_of_slices(caplog):
    parallel = compiled([2, 1, 1], slices_per_device=2)
    report = parallel.report((X, Y))
    assert (report.rows, report.slices) == ([11, 6, 6], 2)
    assert "6 to 11 rows each" in str(report)
    # Half of the rows, and some more, are the busiest device's.
    assert report.best_speed_up < 23 / 11 + 1e-9
    with caplog.at_level("INFO", "keras_dp"):
        parallel.fit(X, Y, batch_size=16, verbose=2)
    assert "6 towers in turns on CPU:0, CPU:1 and CPU:2; global batch 16, 2 to 4 rows a tower" in caplog.text


def test_copies_and_clones_have_the_same_shares():
    parallel = compiled([3, 1])
    for copied in (keras.models.clone_model(parallel), own_of(parallel).wrap(convolutions())):
        assert copied.tower_steps.options.rows == (3, 1)
        assert own_of(copied).feed.shares == Shares((3, 1))


def test_the_slices_of_recalibration_are_those_of_training():
    """The second normalization takes what the first one makes of each slice."""
    statistics = []
    for shares, batch_norm in itertools.product(([1, 1], [3, 1]), ("sync", "local")):
        keras.utils.set_random_seed(3)
        stack = [layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dense(3, "tanh"), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), *stack])
        parallel = keras_dp.DataParallelModel(model, 2, batch_norm=batch_norm, rows=shares)
        keras_dp.recalibrate_batch_norm(parallel, np.random.default_rng(0).normal(size=(32, 4)), verbose=0)
        statistics.append(model.layers[-1].moving_variance.numpy())
    like, of_like_slices, unlike, of_unlike_slices = statistics
    np.testing.assert_allclose(unlike, like, rtol=1e-9)
    assert np.abs(of_unlike_slices - of_like_slices).max() > 1e-6


@pytest.mark.parametrize(
    "shares",
    [0, 3, "32", "auto", [3, 0], [3, -2], [1.5, 1], [True, 1], [float("nan"), 1], ["3", "2"], [None, 1], {3: 2}],
    ids=repr,
)
def test_refuses_what_are_no_shares(shares):
    with pytest.raises(ValueError, match="`rows` must be None, or a list of positive integers.*Received: rows=") as error:
        keras_dp.DataParallelModel(convolutions(), 2, rows=shares)
    assert str(error.value).endswith(repr(shares))


@pytest.mark.parametrize("shares", [[], [1], [1, 2, 3]], ids=repr)
def test_refuses_other_numbers_of_shares_than_of_devices(shares):
    with pytest.raises(ValueError, match="one share for each of the 2 devices, CPU:0, CPU:1. Received: rows="):
        keras_dp.DataParallelModel(convolutions(), 2, rows=shares)
