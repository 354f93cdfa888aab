"""Batches may have tensors with different numbers of rows: some are cut, others stay whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script
from keras import layers, ops

import keras_dp
from keras_dp.batches.whole_tensors import WholeTensors

# Keras warns so whenever the length of a dataset is unknown.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

rng = np.random.default_rng(0)
TABLE = rng.normal(size=(5, 4))


def batches(*counts):
    """Returns a dataset of batches with the given numbers of rows."""

    def generate():
        rng = np.random.default_rng(1)
        for rows in counts:
            yield rng.normal(size=(rows, 4)), rng.normal(size=(rows, 3))

    types = tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 3], tf.float64)
    return tf.data.Dataset.from_generator(generate, output_signature=types)


def test_names_are_keys_and_indices():
    batch = ({"nodes": tf.zeros((3, 2)), "edges": {"from": tf.zeros(4), "to": tf.zeros(4)}}, tf.zeros(3))
    assert [WholeTensors((name,)).of(batch) for name in ("edges", "0/edges/to", "1", "edges/from", "edge")] == [
        [True, True, False, False],
        [False, True, False, False],
        [False, False, False, True],
        [True, False, False, False],
        [False, False, False, False],
    ]
    assert WholeTensors().of((tf.zeros(()), tf.zeros(2), None)) == [True, False, False]


class TwoBatches(keras.Model):
    """Learns from labelled rows, and from a different number of unlabelled rows, which are compared with them."""

    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dense(3)])

    def call(self, x, training=None):
        return self.dense(x, training=training)

    def train_step(self, data):
        (unlabelled, _), (x, y) = data
        with tf.GradientTape() as tape:
            likeness = ops.mean(ops.matmul(self(unlabelled, training=True), ops.transpose(self(x, training=True))))
            loss = ops.mean((self(x, training=True) - y) ** 2) + 0.1 * likeness
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("whole", ["0", "1"])
def test_labelled_and_unlabelled_rows(whole):
    """Either part can be cut, while the other stays whole. The last batches have other numbers of rows."""

    def script(model):
        model.compile(keras.optimizers.Adam(0.01))
        data = tf.data.Dataset.zip(batches(11, 11, 2), batches(4, 4, 7))
        return model.fit(data, epochs=2, shuffle=False, verbose=0).history

    def build():
        model = TwoBatches()
        model(TABLE)
        return model

    assert_same_script(build, script, 3, {"whole": [whole]})


class Graph(keras.Model):
    """Passes messages along edges between nodes, with a loss for each node."""

    def __init__(self):
        super().__init__()
        self.message, self.update = layers.Dense(6, activation="relu"), layers.Dense(3)

    def call(self, graph):
        nodes, edges = graph["nodes"], graph["edges"]
        messages = self.message(ops.concatenate([tf.gather(nodes, edges[:, 0]), tf.gather(nodes, edges[:, 1])], axis=-1))
        received = tf.math.unsorted_segment_sum(messages, edges[:, 1], tf.shape(nodes)[0])
        return self.update(ops.concatenate([nodes, received], axis=-1))


def graphs():
    def generate():
        rng = np.random.default_rng(1)
        for nodes, edges in ((8, 13), (3, 4), (1, 0)):
            yield (
                {"nodes": rng.normal(size=(nodes, 4)), "edges": rng.integers(0, nodes, size=(edges, 2))},
                rng.normal(size=(nodes, 3)),
            )

    types = {"nodes": tf.TensorSpec([None, 4], tf.float64), "edges": tf.TensorSpec([None, 2], tf.int64)}
    return tf.data.Dataset.from_generator(generate, output_signature=(types, tf.TensorSpec([None, 3], tf.float64)))


def test_nodes_and_edges_of_graphs():
    """Trains by Keras's own step on graphs whose numbers of edges are independent of their numbers of nodes."""

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        history = model.fit(graphs(), epochs=2, shuffle=False, verbose=0, validation_data=graphs()).history
        return [history, model.evaluate(graphs(), verbose=0), model.predict(graphs(), verbose=0)]

    def build():
        model = Graph()
        model({"nodes": TABLE, "edges": np.zeros((1, 2), int)})
        return model

    assert_same_script(build, script, 3, {"whole": ["edges"]})


class ReadingATable(keras.Model):
    """Looks up rows in the batch's table, and scales them by the batch's temperature."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        likeness = ops.softmax(ops.matmul(inputs["rows"], ops.transpose(inputs["table"])))
        return self.dense(inputs["temperature"] * ops.matmul(likeness, inputs["table"]))


def test_a_table_and_a_scalar_beside_the_rows():
    def data(rows):
        return batches(rows, 3).map(lambda x, y: ({"rows": x, "table": TABLE[:4], "temperature": 0.5}, y))

    def script(model):
        model.compile("sgd", "mse")
        return [model.fit(data(rows), epochs=2, shuffle=False, verbose=0).history for rows in (7, 4)]

    def build():
        model = ReadingATable()
        model({"rows": TABLE, "table": TABLE, "temperature": np.float64(0.5)})
        return model

    assert_same_script(build, script, 3, {"whole": ["table"]})


def test_debugging_eagerly_sees_the_whole_tensors():
    inner = ReadingATable()
    parallel = keras_dp.DataParallelModel(inner, devices=2, whole=["table"])
    parallel.compile("sgd", "mse", run_eagerly=True)
    x = {"rows": rng.normal(size=(6, 4)), "table": TABLE, "temperature": np.float64(2.0)}
    parallel.train_on_batch(x, rng.normal(size=(6, 3)))
    np.testing.assert_allclose(parallel.predict_on_batch(x), inner(x))


def test_what_is_not_said_is_refused():
    """The sizes of a batch do not decide which tensors stay whole."""
    parallel = keras_dp.DataParallelModel(ReadingATable(), devices=2)
    parallel.compile("sgd", "mse")
    x = {"rows": rng.normal(size=(6, 4)), "table": TABLE, "temperature": np.float64(2.0)}
    with pytest.raises(
        ValueError, match=r"same number of rows.*whole=\[.*\(6, 4\) \(0/rows\), \(5, 4\) \(0/table\), \(6, 3\) \(1\)"
    ):
        parallel.train_on_batch(x, rng.normal(size=(6, 3)))
    with pytest.raises(ValueError, match="`whole` lists names of tensors.*Received: whole='table'"):
        keras_dp.DataParallelModel(ReadingATable(), devices=2, whole="table")


def test_copies_keep_what_is_whole():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(3)]), devices=2, whole=["table"])
    assert keras.models.clone_model(parallel).tower_steps.inputs.whole == parallel.tower_steps.inputs.whole


class CountsTable(keras.Model):
    """Divides by the number of rows of a table, which is known while tracing."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        rows, table = inputs["x"], inputs["table"]
        assert table.shape[0] == len(TABLE)
        return self.dense(rows) + ops.sum(table, axis=0)[:3] / table.shape[0]


def test_tensors_that_are_not_cut_keep_their_shapes():
    def build():
        model = CountsTable()
        model({"x": np.zeros((2, 4)), "table": TABLE})
        return model

    x = rng.normal(size=(9, 4))

    def script(model):
        model.compile("sgd", "mse")
        model.train_on_batch({"x": x, "table": TABLE}, x[:, :3])
        return [model.predict_on_batch({"x": x[:rows], "table": TABLE}) for rows in (9, 8, 2)]

    assert_same_script(build, script, 3, {"whole": ["table"]})
