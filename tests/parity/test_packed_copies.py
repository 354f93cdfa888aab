"""Copies that share messages give the same results, bit for bit, with far fewer copies."""

import graphlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, assert_same_training, twins, values
from keras import layers
from ways_of_wrapping import wrapped

import keras_dp
from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.partition import step
from keras_dp.partition.running import packing
from keras_dp.partition.tracing.names import data_inputs, source_of

RNG = np.random.default_rng(5)
IMAGES, CLASSES = RNG.normal(size=(11, 8, 8, 3)), RNG.integers(0, 4, 11)
TOKENS = RNG.integers(0, 30, (11, 6))
BLOCKS = 2  # each with a batch normalization


def convolutions():
    inputs = x = keras.Input((8, 8, 3))
    for _ in range(BLOCKS):
        y = layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(x))
        x = layers.ReLU()(layers.concatenate([y, layers.Conv2D(2, 1)(x)]))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.Dropout(0.25)(layers.GlobalAveragePooling2D()(x))))


def attention():
    """Its table has a gradient of rows, and its LSTM runs in a loop."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.25)(x, x))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.LSTM(5)(x)))


def masked():
    """A loss and batch normalizations that leave out masked steps: their denominators are sums, too."""
    inputs = keras.Input((5, 3))
    x = layers.BatchNormalization()(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(layers.Dense(4, "tanh")(x))))


def branches():
    """A layer that computes a part of its weights in a branch."""
    model = convolutions()
    outputs = layers.SpectralNormalization(layers.Dense(4))(model.layers[-2].output)
    return keras.Model(model.input, layers.Softmax()(outputs))


CASES = {
    "branches": (branches, IMAGES, lambda: keras.optimizers.AdamW(0.01, use_ema=True, global_clipnorm=0.5), None),
    "attention": (attention, TOKENS, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9)), "sharded"),
}


def trained(parallel, x, optimizer):
    """Trains on batches of 4, 4 and 3 rows, and on one batch of fewer rows than towers."""
    parallel.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = parallel.fit(x, CLASSES, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return history, parallel.train_on_batch(x[:2], CLASSES[:2], return_dict=True)


@pytest.mark.parametrize("case", CASES)
def test_packed_copies_give_the_same_result_bit_for_bit(case):
    build, x, optimizer, parameter_device = CASES[case]
    results = []
    for model, packs in zip(twins(build), (False, True), strict=True):
        parallel = wrapped(model, 3, parameter_device, pack_copies=packs)
        # TensorFlow's graph optimizer adds in another order where it knows more shapes, which rounds otherwise.
        with graph_optimizer(arithmetic_optimization=False):
            results.append([trained(parallel, x, optimizer), parallel.get_weights(), values(parallel.optimizer)])
    assert_same(*results, 0.0)


def test_towers_that_combine_sums_and_are_compiled_have_one_devices_result():
    """Each tower adds the small parts of all towers by itself, with XLA, masks, and clipped gradients that accumulate."""
    x = np.where(np.arange(5) < RNG.integers(1, 6, (21, 1)), 1.0, 0.0)[..., None] * RNG.normal(size=(21, 5, 3))

    def script(model):
        optimizer = keras.optimizers.Adam(global_clipnorm=0.5, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", jit_compile=isinstance(model, keras_dp.DataParallelModel))
        histories = [model.fit(x, x[..., :2], batch_size=size, shuffle=False, verbose=0).history for size in (8, 2)]
        return [histories, model.evaluate(x, x[..., :2], verbose=0)]

    assert_same_script(masked, script, 3, {"parameter_device": "sharded", "pack_copies": True})


class StepOfSums(keras.Sequential):
    def __init__(self, of_rows):
        super().__init__([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        self.of_rows = of_rows
        self.kept = [self.add_weight(shape=(3,), initializer="zeros", trainable=False) for _ in range(2)]

    def train_step(self, data):
        return {**super().train_step(data), **self.of_rows(self, *data[:2])}


def a_chain_of_sums(model, x, y):
    """Each sum is a part of the next one."""
    a = tf.reduce_sum(x, 0)
    b = a + tf.reduce_sum(x**2, 0)
    c = b - 2.0 * tf.reduce_sum(tf.abs(x), 0)
    largest = tf.reduce_max(tf.abs(x - a / 8), 0)
    return {"a": tf.norm(a), "b": tf.norm(b), "c": tf.norm(c), "all": tf.norm(a + b + c), "largest": tf.norm(largest)}


def sums_that_are_assigned(model, x, y):
    a, b = tf.reduce_sum(x, 0), tf.reduce_sum(x**2, 0)
    model.kept[0].assign(a)
    model.kept[1].assign_add(a + b)
    return {"kept": tf.reduce_sum(model.kept[1] - model.kept[0])}


def a_norm_and_clipped_gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
    added = [gradient + tf.reduce_sum(x) for gradient in gradients]
    model.optimizer.apply(clipped, model.trainable_variables)
    return {"norm": norm, "first": tf.norm(gradients[0]), "clipped": tf.norm(clipped[0]), "added": tf.linalg.global_norm(added)}


STEPS = {a_chain_of_sums: None, sums_that_are_assigned: "sharded", a_norm_and_clipped_gradients: "sharded"}


@pytest.mark.parametrize("of_rows", STEPS)
def test_a_step_may_return_sums_of_which_one_needs_the_other(of_rows):
    """A tower adds its parts of two sums before they travel, and the first one travels too.

    Such a step failed, as a cycle: both parts were in one message, and the addition was to begin after it.
    """
    data = RNG.normal(size=(21, 3)), RNG.normal(size=(21, 2))
    compiled, arguments = {"optimizer": "sgd", "loss": "mse"}, {"parameter_device": STEPS[of_rows], "pack_copies": True}
    assert_same_training(lambda: StepOfSums(of_rows), lambda: compiled, [(data, 8)], 3, arguments)


def report(**arguments):
    parallel = wrapped(convolutions(), devices=4, **arguments)
    parallel.compile("adam", "sparse_categorical_crossentropy")
    return keras_dp.communication_report(parallel, (IMAGES[:8], CLASSES[:8]))


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_weights_gradients_and_moments_travel_in_one_message_for_each_pair_of_devices(parameter_device):
    """Towers meet once forward and once backward for each batch normalization."""
    apart = report(parameter_device=parameter_device)
    packed = report(parameter_device=parameter_device, pack_copies=True)
    pairs = 3 if parameter_device is None else 4 * 3
    for kind in ("weights", "gradients"):
        assert packed.number_of(kind) <= pairs < apart.number_of(kind)
    # TensorFlow sends one of two equal scalars by itself, and both in messages. Small weights also go to towers that combine.
    assert packed.bytes_of("weights", "gradients") <= 1.05 * apart.bytes_of("weights", "gradients")
    # One of the moments has the mean and the variance, or both of their gradients. Another has the denominators of the loss.
    assert max(row.number for row in packed.copies if row.kind == "moments") <= 2 * BLOCKS + 1


def longest_chain(function):
    """Returns how often the longest chain of a step goes to a tower, or home from one."""
    nodes = {node.name: node for node in function.node_def}
    sources = {name: [source_of(source) for source in node.input if source_of(source) in nodes] for name, node in nodes.items()}
    tower = {name: name.partition("/")[0] if name.startswith("tower_") else "home" for name in nodes}
    lengths = {}
    for name in graphlib.TopologicalSorter(sources).static_order():
        lengths[name] = max((lengths[source] + (tower[source] != tower[name]) for source in sources[name]), default=0)
    return max(lengths.values())


def written_by_packing(monkeypatch, measure=lambda function: function, **arguments):
    """Returns what a function makes of the function of a step: before its copies are packed, and after it."""
    pack, measured = step.pack_copies, []

    def measuring(written, *given):
        before = measure(written.function)
        pack(written, *given)
        measured.append((before, measure(written.function)))

    with monkeypatch.context() as patched:
        patched.setattr(step, "pack_copies", measuring)
        report(pack_copies=True, **arguments)
    return measured[-1]


def test_no_message_waits_for_what_a_tower_computes_from_a_part_of_it(monkeypatch):
    """A tower needs no copy of what is made on its own device. It must not get ahead of the towers that wait for a copy."""
    before, after = written_by_packing(monkeypatch, longest_chain, parameter_device="sharded")
    assert after == before
    # If such a tower has no part in the rounds, towers wait for each other: a negative control.
    steps = packing._steps
    monkeypatch.setattr(packing, "_steps", lambda copies, nodes, order, towers: steps(copies, nodes, order, {}))
    before, after = written_by_packing(monkeypatch, longest_chain, parameter_device="sharded")
    assert after > before


def test_messages_of_towers_are_combined_and_split_once(monkeypatch):
    """Each tower combines parts after it has sent its own, however many there are.

    All other towers wait for them, and a GPU works in the order in which it is given operations.
    """
    _, function = written_by_packing(monkeypatch)
    nodes = {node.name: node for node in function.node_def}
    stacks = [node for node in nodes.values() if node.name.startswith("packed/stack")]
    # Forward and backward.
    assert sorted(node.device[-1] for node in stacks) == sorted("0123" * 2 * BLOCKS)
    for stack in stacks:
        messages = [nodes[source_of(tensor)] for tensor in data_inputs(stack)]
        assert sorted(message.device[-1] for message in messages) == list("0123")
        assert all(message.op == "ConcatV2" for message in messages)
    # A tower gets the weights and these moments, and sends the moments and the gradients.
    for kind in ("packed/received", "packed/message"):
        assert sum(name.startswith(kind) and node.device.endswith("3") for name, node in nodes.items()) == 1 + 2 * BLOCKS


def test_the_tower_at_home_begins_after_messages_are_sent(monkeypatch):
    """Home sends all other towers what it computes, where towers do not combine parts by themselves."""
    monkeypatch.setattr(step, "with_replicated_sums", lambda program, *_: program)
    _, function = written_by_packing(monkeypatch)
    normalizing = [node for node in function.node_def if node.name.endswith("batchnorm/mul_1")]
    normalizing = [node for node in normalizing if node.name.startswith("tower_")]
    waiting = [node.name.partition("/")[0] for node in normalizing if any("^packed/message" in name for name in node.input)]
    assert len(normalizing) == 4 * BLOCKS
    assert waiting == ["tower_0"] * BLOCKS


def test_copies_are_packed_between_gpus_alone(monkeypatch):
    def packs():
        return keras_dp.DataParallelModel(convolutions(), devices=2).tower_steps.pack_copies

    assert not packs()
    monkeypatch.setattr(keras_dp.trainer, "tower_devices", lambda devices: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(keras_dp.trainer, "refuse_broken_copies", lambda devices: None)
    assert packs()
