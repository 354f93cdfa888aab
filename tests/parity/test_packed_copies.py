"""Copies that share messages give the same results, bit for bit, with far fewer copies."""

import graphlib
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, largest_difference, twins, values
from keras import layers

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
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.25)(x, x))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.LSTM(5)(x)))


def branches():
    """A layer that computes a part of its weights in a branch."""
    model = convolutions()
    outputs = layers.SpectralNormalization(layers.Dense(4))(model.layers[-2].output)
    return keras.Model(model.input, layers.Softmax()(outputs))


class AlternatingSteps(keras.Sequential):
    """Updates its layers in two parts, the second by the loss after the update of the first."""

    def train_step(self, data):
        x, y = data
        for layer in self.layers[:2]:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            weights = layer.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def alternating():
    model = AlternatingSteps([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Conv2D(4, 3), layers.GlobalMaxPooling2D()])
    model.add(layers.Softmax())
    return model


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
    models = twins(build)
    wrappers = [
        keras_dp.DataParallelModel(model, devices=3, parameter_device=parameter_device, pack_copies=packs)
        for model, packs in zip(models, (False, True), strict=True)
    ]
    # TensorFlow's graph optimizer adds in another order where it knows more shapes, which rounds otherwise.
    with graph_optimizer(arithmetic_optimization=False):
        results = [trained(parallel, x, optimizer) for parallel in wrappers]
    for one, other in zip(*map(keras.tree.flatten, results), strict=True):
        np.testing.assert_array_equal(one, other)
    assert largest_difference(*wrappers) == 0.0
    for one, other in zip(*(values(parallel.optimizer) for parallel in wrappers), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_weight_that_is_read_again_after_its_update_is_sent_again():
    plain, model = twins(alternating)
    parallel = keras_dp.DataParallelModel(model, devices=3, pack_copies=True)
    for each in (plain, parallel):
        each.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
        each.optimizer.build(each.trainable_variables)
        each.fit(IMAGES, CLASSES, batch_size=4, shuffle=False, verbose=0)
    assert largest_difference(plain, parallel) < 1e-9


class StepOfSums(keras.Sequential):
    """Trains as Keras does, and returns what a function makes of the model, the rows and the targets."""

    def __init__(self, of_rows):
        super().__init__([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        self.of_rows = of_rows
        self.kept = [self.add_weight(shape=(3,), initializer="zeros", trainable=False) for _ in range(2)]
        self.second = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        return {**super().train_step(data), **self.of_rows(self, *data[:2])}


def a_chain_of_sums(model, x, y):
    """Each sum is a part of the next one."""
    a = tf.reduce_sum(x, 0)
    b = a + tf.reduce_sum(x**2, 0)
    c = b - 2.0 * tf.reduce_sum(tf.abs(x), 0)
    return {"a": tf.norm(a), "b": tf.norm(b), "c": tf.norm(c), "all": tf.norm(a + b + c)}


def sums_that_are_assigned(model, x, y):
    a, b = tf.reduce_sum(x, 0), tf.reduce_sum(x**2, 0)
    model.kept[0].assign(a)
    model.kept[1].assign_add(a + b)
    return {"kept": tf.reduce_sum(model.kept[1] - model.kept[0])}


def a_maximum_that_needs_a_sum(model, x, y):
    total = tf.reduce_sum(x, 0)
    largest = tf.reduce_max(tf.abs(x - total / 8), 0)
    return {"total": tf.norm(total), "largest": tf.norm(largest), "scaled": tf.norm(tf.reduce_sum(x / largest, 0) + total)}


def _gradients(model, x, y, variables):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, variables)


def a_norm_and_clipped_gradients(model, x, y):
    gradients = _gradients(model, x, y, model.trainable_variables)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
    added = [gradient + tf.reduce_sum(x) for gradient in gradients]
    model.optimizer.apply(clipped, model.trainable_variables)
    return {"norm": norm, "first": tf.norm(gradients[0]), "clipped": tf.norm(clipped[0]), "added": tf.linalg.global_norm(added)}


def two_optimizers(model, x, y):
    first, second = (layer.trainable_variables for layer in model.layers)
    gradients = _gradients(model, x, y, [*first, *second])
    total = tf.reduce_sum(x)
    model.second.apply([gradient + total for gradient in gradients[:2]], first)
    model.optimizer.apply(gradients, [*first, *second])
    return {"norm": tf.linalg.global_norm(gradients), "total": total}


STEPS = [a_chain_of_sums, sums_that_are_assigned, a_maximum_that_needs_a_sum, a_norm_and_clipped_gradients, two_optimizers]


@pytest.mark.parametrize(("of_rows", "parameter_device"), list(zip(STEPS, itertools.cycle([None, "sharded"]))))
def test_a_step_may_return_sums_of_which_one_needs_the_other(of_rows, parameter_device):
    """A tower adds its parts of two sums before they travel, and the first one travels too.

    Such a step failed, as a cycle: both parts were in one message, and the addition was to begin after it.
    """
    plain, inner = twins(lambda: StepOfSums(of_rows))
    packed = keras_dp.DataParallelModel(inner, devices=3, parameter_device=parameter_device, pack_copies=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(21, 3)), rng.normal(size=(21, 2))
    results = []
    for model in (plain, packed):
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.second.build(model.layers[0].trainable_variables)
        results.append(model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history)
    assert_same(*results, 1e-9)
    assert largest_difference(plain, packed) < 1e-9


def report(num_towers=4, build=convolutions, **arguments):
    parallel = keras_dp.DataParallelModel(build(), devices=num_towers, **arguments)
    parallel.compile("adam", "sparse_categorical_crossentropy")
    return parallel, keras_dp.communication_report(parallel, (IMAGES[:8], CLASSES[:8]))


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_weights_gradients_and_moments_travel_in_one_message_for_each_pair_of_devices(parameter_device):
    """Towers meet once forward and once backward for each batch normalization."""
    _, apart = report(parameter_device=parameter_device)
    _, packed = report(parameter_device=parameter_device, pack_copies=True)
    pairs = 3 if parameter_device is None else 4 * 3
    for kind in ("weights", "gradients"):
        assert packed.number_of(kind) <= pairs < apart.number_of(kind)
    # TensorFlow sends one of two equal scalars by itself, and both in messages. Small weights also go to towers that combine.
    assert packed.bytes_of("weights", "gradients") <= 1.05 * apart.bytes_of("weights", "gradients")
    # One of the moments has the mean and the variance, or both of their gradients. Another has the denominators of the loss.
    assert max(row.number for row in packed.copies if row.kind == "moments") <= 2 * BLOCKS + 1


def longest_chains(monkeypatch):
    """Returns how often the longest chain of a step goes to a tower, or home from one: before packing, and after it."""
    pack, lengths = step.pack, []

    def measuring(written, *arguments):
        before = longest_chain(written.function)
        pack(written, *arguments)
        lengths.append((before, longest_chain(written.function)))

    with monkeypatch.context() as patched:
        patched.setattr(step, "pack", measuring)
        report(parameter_device="sharded", pack_copies=True)
    return lengths[-1]


def longest_chain(function):
    nodes = {node.name: node for node in function.node_def}
    sources = {name: [source_of(source) for source in node.input if source_of(source) in nodes] for name, node in nodes.items()}
    tower = {name: name.partition("/")[0] if name.startswith("tower_") else "home" for name in nodes}
    lengths = {}
    for name in graphlib.TopologicalSorter(sources).static_order():
        lengths[name] = max((lengths[source] + (tower[source] != tower[name]) for source in sources[name]), default=0)
    return max(lengths.values())


def test_no_message_waits_for_what_a_tower_computes_from_a_part_of_it(monkeypatch):
    """A tower needs no copy of what is made on its own device. It must not get ahead of the towers that wait for a copy."""
    before, after = longest_chains(monkeypatch)
    assert after == before
    # If such a tower has no part in the rounds, towers wait for each other: a negative control.
    steps = packing._steps
    monkeypatch.setattr(packing, "_steps", lambda copies, nodes, order, towers: steps(copies, nodes, order, {}))
    before, after = longest_chains(monkeypatch)
    assert after > before


def keeping_functions(monkeypatch):
    pack, functions = step.pack, []

    def keeping(written, *arguments):
        pack(written, *arguments)
        functions.append(written.function)

    monkeypatch.setattr(step, "pack", keeping)
    return functions


def test_messages_of_towers_are_combined_and_split_once(monkeypatch):
    """Each tower combines parts after it has sent its own, however many there are.

    All other towers wait for them, and a GPU works in the order in which it is given operations.
    """
    functions = keeping_functions(monkeypatch)
    report(pack_copies=True)
    nodes = {node.name: node for node in functions[-1].node_def}
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
    functions = keeping_functions(monkeypatch)
    monkeypatch.setattr(step, "combine_on_towers", lambda *_: None)
    report(pack_copies=True)
    nodes = functions[-1].node_def
    normalizing = [node for node in nodes if node.name.endswith("batchnorm/mul_1") and node.name.startswith("tower_")]
    waiting = [node.name.partition("/")[0] for node in normalizing if any("^packed/message" in name for name in node.input)]
    assert len(normalizing) == 4 * BLOCKS
    assert waiting == ["tower_0"] * BLOCKS


def dropouts():
    """Five layers that draw numbers, each with a key and a counter of its own."""
    stack = [layer for _ in range(5) for layer in (layers.Conv2D(3, 3, padding="same"), layers.Dropout(0.5))]
    return keras.Sequential([keras.Input((8, 8, 3)), *stack, layers.Flatten(), layers.Dense(4, "softmax")])


def test_the_counters_of_random_numbers_share_messages():
    """They are integers, and travel by their bits."""
    _, apart = report(build=dropouts)
    _, packed = report(build=dropouts, pack_copies=True)
    most = [max((row.number for row in found.copies if row.kind == "other"), default=0) for found in (apart, packed)]
    assert most[0] >= 5 > 2 >= most[1]


def test_copies_are_packed_between_gpus_alone_unless_it_is_asked_for(monkeypatch):
    def packs(**arguments):
        return keras_dp.DataParallelModel(convolutions(), devices=2, **arguments).tower_steps.pack_copies

    assert not packs()
    assert packs(pack_copies=True)
    monkeypatch.setattr(keras_dp.trainer, "tower_devices", lambda devices: ["GPU:0", "GPU:1"])
    assert packs()
    assert not packs(pack_copies=False)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="`pack_copies` must be one of True, False, None"):
        keras_dp.DataParallelModel(convolutions(), devices=2, pack_copies="all")
