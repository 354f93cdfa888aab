"""The step under MirroredStrategy that is simulated is the one that TensorFlow runs: what it exchanges, and what it takes."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.gpu_model.collectives import collectives
from keras_dp.gpu_model.hardware import Link, machine_of
from keras_dp.gpu_model.mirrored import graph_of_mirrored_step
from keras_dp.gpu_model.nccl import Nccl, Protocol
from keras_dp.gpu_model.placement import logical_cpus_for_gpus, place_step
from keras_dp.gpu_model.simulation import simulate
from keras_dp.reports.step_graph import collect, on_devices

REPLICAS = 3
ROWS = 30_000
ALONE = Shares.alike(1)
MACHINE = machine_of("A100")
FREE = Nccl((Protocol("free", 0.0, 0.0, 1.0),), ())
# A machine on which GPUs alone take time.
LINK = Link("instant", 1e30, nccl=FREE, latency_seconds=0.0)
INSTANT = dataclasses.replace(MACHINE, link=LINK, host_link=LINK, host_seconds=0.0, control_seconds=0.0)


def classifier(inputs, x):
    return keras.Model(inputs, layers.Dense(4, "softmax")(x))


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(inputs)))
    return classifier(inputs, layers.GlobalAveragePooling2D()(x))


def embeddings():
    inputs = keras.Input((6,), dtype="int32")
    return classifier(inputs, layers.GlobalAveragePooling1D()(layers.Embedding(30, 8)(inputs)))


def sequences():
    inputs = keras.Input((6, 5))
    x = layers.Dense(7, "relu")(layers.LayerNormalization()(inputs))
    return classifier(inputs, layers.GlobalAveragePooling1D()(x))


def built(build):
    keras.config.set_floatx("float32")
    model = build()
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def batch_of(model):
    shape, dtype = (6, *model.input_shape[1:]), model.inputs[0].dtype
    return tf.ones(shape, dtype), tf.constant(np.arange(6) % 4)


@functools.cache
def strategy_of(replicas):
    # Collectives of several strategies of the same devices would meet each other.
    with logical_cpus_for_gpus(REPLICAS) as devices:
        return tf.distribute.MirroredStrategy(devices[:replicas])


@functools.cache
def mirrored(build, replicas):
    """Returns a model under MirroredStrategy, and its step for `ROWS` rows for each replica."""
    with logical_cpus_for_gpus(REPLICAS) as devices:
        with strategy_of(replicas).scope():
            model = built(build)
        step = graph_of_mirrored_step(model, batch_of(model))
        return model, place_step(step, ROWS * replicas, devices[:replicas])


@functools.cache
def plain(build):
    """Returns the step of plain Keras for `ROWS` rows."""
    with logical_cpus_for_gpus(REPLICAS) as devices:
        model = built(build)
        model.fit(*batch_of(model), verbose=0)
        slices = on_devices(cut(batch_of(model), ALONE), devices[:1])
        return place_step(collect(lambda parts: model.train_step(parts[0].data), slices, ALONE), ROWS, devices[:1])


def test_one_replica_takes_the_time_of_plain_keras():
    _, placed = mirrored(convolutions, 1)
    assert list(collectives(placed)) == []
    one, of_plain = simulate(placed, MACHINE), simulate(plain(convolutions), MACHINE)
    assert one.seconds == pytest.approx(of_plain.seconds, rel=1e-9)
    assert one.peak_bytes == of_plain.peak_bytes


def test_all_gradients_and_nothing_else_are_reduced_at_once():
    model, placed = mirrored(convolutions, REPLICAS)
    (reduced,) = collectives(placed)
    assert reduced.bytes == sum(4 * int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert [placed.operations[member].device for member in reduced.members] == list(placed.towers)
    # Batch normalization exchanges nothing. The first replica counts the steps for all.
    assert len([copy for copy in placed.copies if copy.source.startswith("GPU") and copy.source != copy.destination]) == 2


def test_replicas_take_at_least_the_time_of_plain_keras_for_their_rows():
    _, placed = mirrored(convolutions, REPLICAS)
    alone = simulate(plain(convolutions), INSTANT).seconds
    together = simulate(placed, INSTANT).seconds
    # Joining and splitting the gradients, and scaling the loss.
    assert alone < together < 1.3 * alone
    (reduced,) = collectives(placed)
    slower = simulate(placed, dataclasses.replace(INSTANT, link=MACHINE.link))
    # Metrics are computed meanwhile.
    seconds = reduced.seconds(MACHINE) + MACHINE.link.latency_seconds
    assert together < slower.seconds <= together + seconds
    spans = [slower.spans[member] for member in reduced.members]
    joined = [slower.spans[placed.operations[member].inputs[0].partition(":")[0]].finish for member in reduced.members]
    assert spans[0].start == max(joined)
    assert spans[0].finish - spans[0].start == pytest.approx(seconds)
    assert {span.finish for span in spans} == {spans[0].finish}


def test_rows_of_sparse_gradients_are_gathered():
    _, placed = mirrored(embeddings, REPLICAS)
    dense, lengths, values, indices = collectives(placed)
    assert dense.type == "CollectiveReduceV2"
    assert {lengths.type, values.type, indices.type} == {"CollectiveGatherV2"}
    assert (dense.bytes, lengths.bytes) == (4 * (8 * 4 + 4), 4)
    assert (values.bytes, indices.bytes) == (4 * ROWS * 6 * 8, 4 * ROWS * 6)


def test_products_of_sequences_count_although_plain_keras_computes_their_shapes():
    placed = plain(sequences)
    flops = [placed.work[name].flops for name, operation in placed.operations.items() if operation.type == "MatMul"]
    # Of each dense layer: forward, and the gradients of its weights and its input.
    assert sorted(flops) == 3 * [2 * ROWS * 7 * 4] + 3 * [2 * ROWS * 6 * 5 * 7]
