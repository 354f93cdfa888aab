"""All workers make the same exchanges, whatever rows they have; with NCCL, one after another in one order."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_dp
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.partition.running.calling import node_by_node
from keras_dp.workers.collectives import Collectives

WORKERS = 3


class SumsThatFollowSums(keras.Model):
    """Scales rows by sums over the batch, which depend on the sums before."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(3), layers.Dense(3)

    def call(self, x):
        hidden = self.hidden(x) * ops.sum(self.hidden(x), axis=0)
        hidden = self.last(hidden) * ops.max(hidden, axis=0)
        return hidden + ops.sum(ops.square(hidden)) * 0.01


def branches():
    """Normalizes in branches, none of which waits for the others, and compares all rows with each other."""
    x = keras.Input((4,))
    ways = [layers.BatchNormalization()(layers.Dense(3)(x)) for _ in range(2)]
    compared = layers.Lambda(lambda h: h * ops.mean(ops.matmul(h, ops.transpose(h)), axis=1, keepdims=True))(layers.add(ways))
    return keras.Model(x, layers.Dense(3)(compared))


def graph_of(build, rows, index, towers, communication):
    """Returns the graph of a worker's training step, node by node. Nothing runs."""
    with mock.patch.object(Collectives, "gather", lambda self, x: tf.range(self.count)):
        worker = Collectives(index, WORKERS, communication)
    keras.utils.set_random_seed(0)
    model = build()
    model(np.zeros((2, 4)))
    parallel = keras_dp.DataParallelModel(model, devices=towers)
    parallel.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), "mse", metrics=["mae"])
    parallel.optimizer.build(model.trainable_variables)

    def step(x, y):
        slices = cut((x, y), Shares.alike(towers), index, WORKERS)
        return parallel.tower_steps.trace("train", slices, worker).run()[0]

    with node_by_node(), tf.__internal__.FuncGraph("step").as_default() as graph:
        step(tf.ones((rows, 4), tf.float64), tf.ones((rows, 3), tf.float64))
    return graph


def collectives(graph):
    return [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]


def described(operation):
    """Returns an exchange's kind, shape and key; the key of a tensor of unknown size is known in the step."""
    is_second_version = operation.type.endswith("V2")
    key = tf.get_static_value(operation.inputs[3]) if is_second_version else operation.get_attr("instance_key")
    return operation.type, operation.inputs[0].shape.as_list(), key


def launch_orders(graph):
    """Yields the collectives that may be launched at each moment, if the first one of them is launched each time."""
    found = collectives(graph)

    @functools.cache
    def awaited(operation):
        before = {tensor.op for tensor in operation.inputs} | set(operation.control_inputs)
        return frozenset(before.intersection(found).union(*map(awaited, before)))

    waiting = list(found)
    for operation in graph.get_operations():
        awaited(operation)  # In the order of the graph, so that none recurses far.
    while waiting:
        ready = [operation for operation in waiting if not awaited(operation).intersection(waiting)]
        yield ready
        waiting.remove(ready[0])


@pytest.mark.parametrize(("build", "rows", "towers"), [(SumsThatFollowSums, 2, 1), (branches, 3, 2)])
def test_workers_without_rows_make_the_exchanges_of_others(build, rows, towers):
    """Their zeros follow no exchange, but their sums must not go in fewer messages: all would wait for each other."""
    first, *others = [
        [described(operation) for operation in collectives(graph_of(build, rows, index, towers, "ring"))]
        for index in range(WORKERS)
    ]
    assert first
    assert all(other == first for other in others)


@pytest.mark.parametrize(("build", "rows"), [(SumsThatFollowSums, 2), (branches, 7)])
def test_with_nccl_there_is_one_order(build, rows):
    """NCCL deadlocks if workers launch two collectives in different orders, or two at once."""
    orders = []
    for index in range(WORKERS):
        moments = list(launch_orders(graph_of(build, rows, index, 1, "nccl")))
        assert all(len(ready) == 1 for ready in moments)
        orders.append([described(ready[0]) for ready in moments])
    assert len(orders[0]) > 1
    assert all(order == orders[0] for order in orders)


def test_without_nccl_several_may_be_under_way():
    """The negative control of the test above."""
    assert any(len(ready) > 1 for ready in launch_orders(graph_of(branches, 7, 0, 1, "ring")))
