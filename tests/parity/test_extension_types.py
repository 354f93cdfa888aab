"""Batches may hold values of a `tf.experimental.ExtensionType`, of which each tensor is cut, or stays whole.

Keras's layers do not take such values as their first argument. A step, a loss or a `call` of the user's own takes them apart.
"""

from collections.abc import Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script
from keras import layers
from programs.steps import Learner

import keras_dp

# Keras warns so whenever the length of a dataset is unknown.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

rng = np.random.default_rng(0)


class Weighted(tf.experimental.BatchableExtensionType):
    values: tf.Tensor
    weights: tf.Tensor

    @property
    def shape(self):
        return self.values.shape


class Sample(tf.experimental.BatchableExtensionType):
    """Rows of every kind of tensor, in tuples, mappings and other extension types, with a field that is no tensor."""

    dense: tuple[tf.Tensor, ...]
    by_name: Mapping[str, tf.RaggedTensor]
    sparse: tf.SparseTensor
    target: Weighted
    power: int = 2


def sample(rows):
    lengths = np.arange(rows) % 4
    ragged = tf.RaggedTensor.from_row_lengths(rng.normal(size=lengths.sum()), lengths)
    return Sample(
        (rng.normal(size=(rows, 4)), rng.normal(size=(rows,))),
        {"ragged": ragged},
        tf.sparse.from_dense(rng.normal(size=(rows, 3)) * rng.integers(0, 2, (rows, 3))),
        Weighted(rng.normal(size=(rows, 3)), rng.uniform(size=(rows, 3))),
    )


class OfSamples(Learner, keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 4))
        self.built = True

    def outputs(self, data):
        bias = tf.reduce_sum(data.by_name["ragged"], axis=1)[:, None] + tf.sparse.to_dense(data.sparse)
        return self.dense(data.dense[0] * data.dense[1][:, None]) ** data.power + bias

    def loss_of(self, data, *_):
        target = data.target
        return tf.reduce_sum(target.weights * (self.outputs(data) - target.values) ** 2) / tf.reduce_sum(target.weights), {}

    def test_step(self, data):
        return {"loss": self.loss_of(only(data))[0]}

    def predict_step(self, data):
        return self.outputs(only(data))


def only(data):
    return keras.utils.unpack_x_y_sample_weight(data)[0]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_steps_that_take_samples(run_eagerly):
    """All tensors of a sample are cut. The last batch has fewer rows than there are towers."""
    eight, one = sample(8), sample(5)
    data = tf.data.Dataset.from_tensor_slices(sample(16)).batch(7)

    def script(model):
        model.compile(keras.optimizers.SGD(1e-3), run_eagerly=run_eagerly)
        history = model.fit(data, shuffle=False, verbose=0, validation_data=data).history
        on_batches = [model.train_on_batch(eight), model.test_on_batch(one), model.predict_on_batch(one)]
        return [history, on_batches, float(model.train_step(one)["total"]), model.predict(data, verbose=0)]

    _, parallel = assert_same_script(OfSamples, script, 3)
    if not run_eagerly:
        explanation = parallel.explain(eight)
        assert explanation.once == []
        assert explanation.on_towers > 20


def test_a_verified_step_takes_samples():
    parallel = keras_dp.DataParallelModel(OfSamples(), devices=2, verify=True)
    parallel.compile("sgd")
    parallel.fit(tf.data.Dataset.from_tensor_slices(sample(8)).batch(4), shuffle=False, verbose=0)
    parallel.train_on_batch(sample(5))
    assert keras_dp.check_step(parallel, (sample(6),)).is_exact


def trained(model, data):
    model.compile(keras.optimizers.SGD(0.01))
    return model.fit(data, shuffle=False, verbose=0).history


class WithWeightedTargets(keras.Sequential):
    """Takes targets with weights in its own loss; Keras's own step trains it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum(y.weights * sample_weight.values * (y_pred - y.values) ** 2) / tf.reduce_sum(y.weights)


def test_targets_and_sample_weights():
    x, y = rng.normal(size=(17, 4)), Weighted(rng.normal(size=(17, 3)), rng.uniform(size=(17, 3)))
    weight = Weighted(rng.uniform(size=(17, 1)), rng.uniform(size=(17, 1)))
    data = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(7)
    assert_same_script(lambda: WithWeightedTargets([keras.Input((4,)), layers.Dense(3)]), lambda model: trained(model, data), 3)


class Graph(tf.experimental.ExtensionType):
    nodes: tf.Tensor
    edges: tf.Tensor
    temperature: tf.Tensor


class OfGraphs(Learner, keras.Model):
    """Adds to each node what it receives along its edges. The model takes its graph by keyword."""

    def __init__(self):
        super().__init__()
        self.update = layers.Dense(3)

    def call(self, graph=None):
        sent = tf.gather(graph.nodes * graph.temperature, graph.edges[:, 0])
        return self.update(graph.nodes + tf.math.unsorted_segment_sum(sent, graph.edges[:, 1], tf.shape(graph.nodes)[0]))

    def loss_of(self, graph, y, *_):
        return tf.reduce_mean((self(graph=graph) - y) ** 2), {}


def graph(nodes, edges):
    ends = rng.integers(0, nodes, size=(edges, 2))
    return Graph(rng.normal(size=(nodes, 4)), ends, np.float64(0.5)), tf.constant(rng.normal(size=(nodes, 3)))


def graphs(*sizes):
    whole = [graph(*size) for size in sizes]
    types = (
        Graph.Spec(tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 2], tf.int64), tf.TensorSpec([], tf.float64)),
        tf.TensorSpec([None, 3], tf.float64),
    )
    return tf.data.Dataset.from_generator(lambda: iter(whole), output_signature=types)


def build_of_graphs():
    model = OfGraphs()
    model(graph=graph(3, 2)[0])
    return model


@pytest.mark.parametrize("whole", [["edges"], ["0/nodes", "1"]])
def test_fields_are_named_like_keys(whole):
    """A graph can be cut by its nodes or by its edges. It may have fewer nodes than towers, and no edges beside its rows."""
    data, batch = graphs((8, 13), (3, 4), (1, int("edges" not in whole)), (5, 2)), graph(4, 6)

    def script(model):
        return trained(model, data), model.train_on_batch(*batch)

    assert_same_script(build_of_graphs, script, 3, {"whole": whole})


def test_what_keras_refuses_is_refused():
    values = Weighted(rng.normal(size=(5, 4)), rng.uniform(size=(5, 4)))
    for wrap in (lambda model: model, lambda model: keras_dp.DataParallelModel(model, devices=3)):
        model = wrap(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="Only input tensors may be passed as positional arguments"):
            model.train_on_batch(values, np.ones((5, 2)))
        with pytest.raises(ValueError, match="Unrecognized data type"):
            model.fit(values, np.ones((5, 2)), verbose=0)
