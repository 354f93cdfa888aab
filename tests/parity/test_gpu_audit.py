"""The audit of a step on GPUs finds what TensorFlow sends, and what is planted; small models stay within limits."""

import collections
import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers
from ways_of_wrapping import wrapped

from keras_dp.gpu_model.audit import audit, audit_step
from keras_dp.gpu_model.placement import logical_cpus_for_gpus, place_step
from keras_dp.reports import step_graph
from keras_dp.reports.step_graph import graph_of_step

TOWERS = 3
RNG = np.random.default_rng(3)
IMAGES, TOKENS, CLASSES = RNG.normal(size=(9, 8, 8, 3)), RNG.integers(0, 30, (9, 6)), RNG.integers(0, 4, 9)


def classifier(inputs, features):
    return keras.Model(inputs, layers.Dense(4, "softmax", dtype="float32")(features))


def of_images(stack):
    inputs = x = keras.Input((8, 8, 3))
    for layer in stack:
        x = layer(x)
    return classifier(inputs, x)


def convolutions(depth=2):
    stack = []
    for _ in range(depth):
        stack += [layers.Conv2D(6, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    return of_images([*stack, layers.GlobalAveragePooling2D()])


def dense_layers(depth):
    return of_images([layers.Flatten(), *(layers.Dense(12, "relu") for _ in range(depth))])


def attention():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return classifier(inputs, layers.GlobalAveragePooling1D()(x))


def recurrent():
    inputs = keras.Input((6,), dtype="int32")
    return classifier(inputs, layers.LSTM(5)(layers.Embedding(30, 8)(inputs)))


def spelling():
    """Hashes numbers by their decimal digits, for which there are no GPU kernels."""

    def spelled(x):
        return x + tf.cast(tf.strings.to_hash_bucket_fast(tf.strings.as_string(x), 5), x.dtype)

    return of_images([layers.Lambda(spelled, output_shape=(8, 8, 3)), layers.Flatten()])


def reshaping():
    """Reshapes rows to a size that is computed from them, which a GPU must tell its host first."""

    def reshaped(x):
        ones = tf.reduce_sum(tf.cast(x < np.inf, tf.int64)) // tf.shape(x, tf.int64)[0]
        return tf.ensure_shape(tf.reshape(x, tf.stack([tf.shape(x, tf.int64)[0], ones])), (None, 192))

    return of_images([layers.Lambda(reshaped, output_shape=(192,))])


def scaling():
    keras.config.set_dtype_policy("mixed_float16")
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


def on_gpus(build, optimizer="adam", towers=TOWERS, **arguments):
    """Builds, wraps and compiles a model on logical CPUs that stand for GPUs. Returns it and a batch."""
    # Some operations have GPU kernels for float32 alone.
    keras.config.set_floatx("float32")
    with logical_cpus_for_gpus(towers) as devices:
        parallel = wrapped(build(), devices=devices, **{"pack_copies": True} | arguments)
        parallel.compile(optimizer, "sparse_categorical_crossentropy")
    return parallel, (IMAGES if parallel.input_shape[1:] == (8, 8, 3) else TOKENS, CLASSES)


@pytest.mark.parametrize(
    ("build", "normalizations", "parameter_device"), [(convolutions, 2, None), (attention, 0, "sharded"), (recurrent, 0, None)]
)
def test_copies_are_those_that_tensorflow_sends_and_stay_within_limits(build, normalizations, parameter_device, monkeypatch):
    kept, collect = [], step_graph.partition_graphs
    monkeypatch.setattr(step_graph, "partition_graphs", lambda *given: kept.extend(collect(*given)) or kept)
    parallel, batch = on_gpus(build, parameter_device=parameter_device)
    before = [variable.numpy() for variable in parallel.variables]
    step = graph_of_step(parallel, batch)

    sent = [node for graph in kept for node in graph.node if node.op in ("_Send", "_HostSend")]
    of_controls = sum("/ctrl/" in node.input[0] for node in sent)
    placed = place_step(step, 9, parallel.devices, on_gpus=False)
    between = [copy for copy in placed.copies if copy.source != copy.destination]
    assert len(between) == len(sent) - of_controls
    assert len(placed.controls) == of_controls
    assert len(between) > 2 * TOWERS

    audited = audit(parallel, step, place_step(step, 9, parallel.devices))
    pairs = collections.Counter()
    for (kind, source, destination), number in audited.copies.items():
        if kind in ("weights", "gradients", "moments"):
            pairs[source, destination] += number
    assert 0 < max(pairs.values()) <= 12 + 2 * normalizations
    assert 0 < audited.most_received("weights") <= 24
    assert audited.controls.total() <= 20
    # The messages of asserts are strings.
    assert audited.without_kernel.keys() <= {"Const"}
    assert audited.misplaced == ()
    for words in ("weights", "control edges between devices", "operations without a GPU kernel", "none"):
        assert words in str(audited)
    assert_same(before, [variable.numpy() for variable in parallel.variables], 0)


def test_copies_of_loss_scaling_do_not_grow_with_the_layers():
    # Keras updates in a branch then, where it reads the learning rate and the loss scale once for each variable.
    numbers = {}
    for packs, depth in itertools.product((True, False), (2, 4)):
        parallel, batch = on_gpus(partial(dense_layers, depth), scaling(), pack_copies=packs, parameter_device="sharded")
        placed = place_step(graph_of_step(parallel, batch), 9, parallel.devices, on_gpus=False)
        numbers[packs, depth] = sum(copy.source != copy.destination for copy in placed.copies)
    assert numbers[True, 4] == numbers[True, 2]
    assert numbers[False, 4] > numbers[False, 2]


@pytest.mark.parametrize(("towers", "parameter_device"), [(2, None), (3, "sharded")])
def test_towers_compute_at_the_same_time(towers, parameter_device):
    """Each sends each other its moments once for each batch normalization, each way.

    In mixed precision, weights that are cast where they live once let one tower begin later. Then the moments of two batch
    normalizations, one after the other, shared a message, and two GPUs took turns: ResNet-20 took as long as on one.
    """
    depth = 4
    build = partial(convolutions, depth)
    audited = audit_step(*on_gpus(build, scaling(), towers=towers, parameter_device=parameter_device))
    assert audited.most_sent("moments") >= 2 * depth * (towers - 1)


def test_an_operation_without_a_gpu_kernel_is_found_and_moved_to_the_host():
    parallel, batch = on_gpus(spelling)
    step = graph_of_step(parallel, batch)
    placed = place_step(step, 9, parallel.devices)
    audited = audit(parallel, step, placed)
    assert audited.without_kernel["AsString"] == audited.without_kernel["StringToHashBucketFast"] == TOWERS
    assert {operation.device for operation in placed.operations.values() if operation.type == "AsString"} == {"CPU:0"}
    taken = [copy for copy in placed.copies if placed.operations[copy.takers[0]].type == "AsString"]
    assert sorted((copy.source, copy.from_host, copy.destination, copy.to_host) for copy in taken) == [
        (f"GPU:{tower}", False, "CPU:0", True) for tower in range(TOWERS)
    ]


def test_a_tensor_that_goes_to_the_host_is_found():
    planted, other = (audit_step(*on_gpus(build)) for build in (reshaping, spelling))
    numbers = [sum(number for (_, taker), number in each.to_host.items() if taker == "Pack") for each in (planted, other)]
    assert numbers[0] >= TOWERS
    assert numbers[1] == 0


def test_a_wrong_device_is_found():
    parallel, batch = on_gpus(convolutions)
    step = graph_of_step(parallel, batch)
    (planted, *_) = [node for node in step.nodes.node if node.op == "Conv2D" and node.name.startswith("partitioned/tower_2/")]
    planted.device = parallel.devices[0]
    assert audit(parallel, step, place_step(step, 9, parallel.devices)).misplaced == (planted.name,)
