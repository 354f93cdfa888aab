"""`report` tells in one screen how a step runs on the devices, with numbers that can be computed by hand."""

import dataclasses
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp
from keras_dp.reports.report import Report

ROWS, FEATURES, HIDDEN = 14, 64, 128
X, Y = np.ones((ROWS, FEATURES)), np.zeros((ROWS, 1))


def reversed_rows(x):
    return x[::-1]


def wrapped(*inner, devices=4, **arguments):
    model = keras.Sequential([keras.Input((FEATURES,)), *inner])
    parallel = keras_dp.DataParallelModel(model, devices=devices, **arguments)
    parallel.compile(keras.optimizers.Adam(), "mse")
    return parallel


def test_the_numbers_of_a_step():
    """The bytes are those of `communication_report`, and the arithmetic is mostly that of the matrices."""
    parallel = wrapped(layers.Dense(HIDDEN, use_bias=False), layers.BatchNormalization(), layers.Dense(1, use_bias=False))
    report = parallel.report((X, Y))
    communication = keras_dp.communication_report(parallel, (X, Y))
    assert (report.devices, report.rows, report.batch_rows) == (["CPU:0", "CPU:1", "CPU:2", "CPU:3"], [3, 4, 3, 4], ROWS)
    assert report.weight_bytes == {"CPU:0": 8 * sum(np.size(weight) for weight in parallel.get_weights())}
    assert (report.batch_norms, report.batch_norm, report.precisions, report.jit_compile) == (1, "sync", ["float64"], False)
    assert sum(report.sent_bytes.values()) == communication.total_bytes > 0
    assert report.messages == sum(row.number for row in communication.copies)
    assert report.busiest_bytes == communication.busiest_bytes
    matrices = 2 * ROWS * HIDDEN * (2 * FEATURES + 3)
    assert matrices < report.flops < 1.2 * matrices
    assert (report.share, report.once) == (1, [])
    # The busiest tower has 4 of 14 rows.
    assert report.best_speed_up == pytest.approx(3.5)


def test_operations_that_are_computed_once_have_a_line_a_layer_and_a_share():
    parallel = wrapped(layers.Lambda(reversed_rows), layers.Dense(HIDDEN), layers.Dense(1))
    report = parallel.report((X, Y))
    # The labels have rows: from the loss on, all is divided.
    assert 0.2 < report.share < 0.8
    assert report.best_speed_up == pytest.approx(1 / (1 - report.share + report.share * 4 / 14))
    shares = [known.share for known in report.once]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1 - report.share, abs=0.02)
    (gathered,) = [known for known in report.once if "lambda" in known.name and "gradient" not in known.name]
    assert gathered.line == f"{__file__}, line {reversed_rows.__code__.co_firstlineno + 1}"
    # The line that has asked for the report made the other operations: it tells nothing.
    assert {known.line for known in report.once} == {gathered.line, ""}
    assert any(known.name.startswith("MatMul in ") for known in report.once)
    assert "The devices divide" in report.verdict
    assert "One device computes the rest" in report.verdict


def test_a_trained_model_needs_no_batch():
    parallel = wrapped(layers.Dense(3), layers.Dropout(0.5), layers.Dense(1))
    with pytest.raises(ValueError, match=r"not trained yet: pass a batch, report\(\(x, y\)\)"):
        parallel.report()
    parallel.fit(X, Y, batch_size=ROWS, verbose=0)
    assert parallel.report() == parallel.report((X, Y))


def test_a_number_of_rows_that_is_not_known_is_said_to_be_assumed():
    parallel = wrapped(layers.Dense(1), devices=2)
    parallel.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), shuffle=False, verbose=0)
    assert "32 rows on 2 devices (assumed: pass a batch for your own number)" in " ".join(str(parallel.report()).split())
    parallel.train_on_batch(X[:6], Y[:6])
    assert parallel.report().heading == "A training step of 6 rows on 2 devices"
    few = wrapped(layers.Dense(1), devices=2)
    few.fit(X[:6], Y[:6], batch_size=32, verbose=0)
    assert few.report().heading == "A training step of 6 rows on 2 devices"


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_of_sizes_that_differ_cannot_be_made_up():
    model = keras.Sequential([keras.Input((None, 4)), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", "mse")
    batches = [(np.ones((4, length, 4)), np.ones((4, 1))) for length in (3, 5)]
    types = tf.TensorSpec((None, None, 4)), tf.TensorSpec((None, 1))
    parallel.fit(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=types), shuffle=False, verbose=0)
    with pytest.raises(ValueError, match="No batch can be made up if sizes differ, or tensors are not dense: pass a batch"):
        parallel.report()
    assert parallel.report(batches[0]).batch_rows == 4


class Graphs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, graph):
        from_, to = tf.unstack(graph["edges"], axis=1)
        return self.dense(tf.math.unsorted_segment_sum(tf.gather(graph["nodes"], from_), to, graph["size"]))


@pytest.mark.parametrize("method", ["report", "explain", "check_step", "communication_report"])
def test_what_has_no_towers_or_no_batch_is_refused(method):
    """Zeros for integers that stay whole would be edges of the first node alone, and sums for no node at all."""
    parallel = keras_dp.DataParallelModel(Graphs(), devices=2, whole=["edges"])
    inspect = getattr(parallel, method)
    batch = {"nodes": X, "edges": np.ones((20, 2), int), "size": np.int32(ROWS)}, Y
    with pytest.raises(ValueError, match="Compile the model before"):
        inspect(batch)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(*batch)
    with pytest.raises(ValueError, match="a tensor that stays whole holds integers, .*: pass a batch"):
        inspect()
    inspect(batch)
    parallel.compile("sgd", "mse", run_eagerly=True)
    for given in (batch, None):
        with pytest.raises(ValueError, match=r"\(\) looks at towers, and eager steps use one device"):
            inspect(given)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes of TensorFlow's errors")
def test_a_step_that_refuses_ones_asks_for_a_batch():
    class Refusing(layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(x, tf.ones((), x.dtype))]):
                return tf.identity(x)

    parallel = wrapped(Refusing(), layers.Dense(1), devices=2)
    parallel.fit(X / 2, Y, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        parallel.report()
    assert any("report((x, y))" in note for note in caught.value.__notes__)
    assert parallel.report((X / 2, Y)).batch_rows == ROWS


REPORT = Report(
    batch_rows=8,
    workers=1,
    devices=["GPU:0", "GPU:1"],
    rows=[4, 4],
    weight_bytes={"GPU:0": 12_000_000},
    largest_weights=[("dense/kernel", 11_000_000, "GPU:0")],
    should_spread=False,
    batch_norms=2,
    batch_norm="local",
    precisions=["mixed_float16"],
    jit_compile=True,
    messages=12,
    sent_bytes={"weights": 12_000_000, "gradients": 12_000_000},
    busiest_bytes=12_000_000,
    flops=10**12,
    share=1.0,
    once=[],
)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "The devices divide 100 % of the arithmetic: up to 2.0 times the speed of one device."),
        ({"devices": ["GPU:0"], "rows": [8]}, "There is one device, which computes all."),
        ({"rows": [0, 8]}, "1 of 2 devices have no rows: use batches of 2 rows or more."),
        ({"batch_rows": 1, "rows": [0, 1]}, "The batch counts as one row, since it has no more or all its tensors stay whole"),
        ({"share": None, "flops": None}, "How much of the arithmetic the devices divide is not known"),
        ({"share": 0.5}, "50.0 % of the arithmetic. One device computes the rest, so training is at most 1.3 times"),
        ({"flops": 10**9}, "but compute only 42 operations for each byte that they send. GPUs would wait for their links"),
        ({"workers": 2, "batch_rows": 16}, "up to 4.0 times the speed of one device"),
    ],
)
def test_the_verdict(changes, verdict):
    report = dataclasses.replace(REPORT, **changes)
    assert verdict in report.verdict
    assert " ".join(report.verdict.split()) in " ".join(str(report).split())


def test_one_screen_and_a_table_in_notebooks():
    expected = """
A training step of 8 rows on 2 devices

  devices        GPU:0 and GPU:1, 4 rows each
  weights        12.0 MB on GPU:0
                 dense/kernel: 11.0 MB on GPU:0
  batch norm     2 layers, each device with the moments of its own rows
  precision      mixed_float16, compiled by XLA
  sent           12 messages, 24.0 MB in a step: weights 12.0 MB, gradients
                 12.0 MB
  arithmetic     1.0 TFLOP on rows in a step, 100 % of it divided
  computed once  nothing on rows

The devices divide 100 % of the arithmetic: up to 2.0 times the speed of one
device."""
    assert str(REPORT) == expected.strip()
    table = dataclasses.replace(REPORT, precisions=["<b>"])._repr_html_()
    assert table.count("<tr>") == 7
    assert "&lt;b&gt;" in table
    assert REPORT.verdict in table
