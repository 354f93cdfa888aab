"""Copies that share messages give the same results, bit for bit, with far fewer copies."""

import graphlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import largest_difference, twins, values
from keras import layers

import keras_dp
from keras_dp.partition import calling, packing
from keras_dp.partition.crossings import source_of
from keras_dp.reports.graph_optimizer import graph_optimizer

RNG = np.random.default_rng(5)
IMAGES, CLASSES = RNG.normal(size=(11, 8, 8, 3)), RNG.integers(0, 4, 11)
TOKENS = RNG.integers(0, 30, (11, 6))


def convolutions():
    inputs = x = keras.Input((8, 8, 3))
    for _ in range(3):
        y = layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(x))
        x = layers.ReLU()(layers.concatenate([y, layers.Conv2D(2, 1)(x)]))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.Dropout(0.25)(layers.GlobalAveragePooling2D()(x))))


def attention():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(30, 8, mask_zero=True)(inputs)
    for _ in range(2):
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
    "convolutions": (convolutions, IMAGES, lambda: keras.optimizers.Adam(global_clipnorm=0.5)),
    "attention": (attention, TOKENS, lambda: keras.optimizers.AdamW(0.01, use_ema=True)),
    "branches": (branches, IMAGES, lambda: keras.optimizers.SGD(0.1)),
    "loss scaling": (convolutions, IMAGES, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9))),
}


def trained(parallel, x, optimizer, rows=4):
    """Trains on batches of 4, 4 and 3 rows, or on one batch of fewer rows than towers."""
    parallel.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = parallel.fit(x, CLASSES, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
    few = parallel.train_on_batch(x[:2], CLASSES[:2], return_dict=True)
    return history, few, parallel.evaluate(x, CLASSES, batch_size=rows, verbose=0), parallel.predict(x, verbose=0)


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
@pytest.mark.parametrize("case", list(CASES))
def test_packed_copies_give_the_same_result_bit_for_bit(case, parameter_device):
    build, x, optimizer = CASES[case]
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


def report(num_towers=4, build=convolutions, **arguments):
    parallel = keras_dp.DataParallelModel(build(), devices=num_towers, **arguments)
    parallel.compile("adam", "sparse_categorical_crossentropy")
    return parallel, keras_dp.communication_report(parallel, (IMAGES[:8], CLASSES[:8]))


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_weights_and_gradients_travel_in_one_message_for_each_pair_of_devices(parameter_device):
    _, apart = report(parameter_device=parameter_device)
    _, packed = report(parameter_device=parameter_device, pack_copies=True)
    pairs = 3 if parameter_device is None else 4 * 3
    for kind in ("weights", "gradients"):
        assert packed.number_of(kind) <= pairs < apart.number_of(kind)
    # TensorFlow sends one of two equal scalars by itself, and both in messages.
    assert packed.total_bytes <= 1.01 * apart.total_bytes


@pytest.mark.parametrize("parameter_device", [None, "sharded"])
def test_towers_meet_once_forward_and_once_backward_for_each_batch_normalization(parameter_device):
    """A message has the mean and the variance, or both of their gradients. Another one has the denominators of the loss."""
    _, packed = report(parameter_device=parameter_device, pack_copies=True)
    assert max(row.number for row in packed.copies if row.kind == "moments") <= 3 * 2 + 1


def longest_chains(monkeypatch):
    """Returns how often the longest chain of a step goes to a tower, or home from one: before packing, and after it."""
    pack, lengths = calling.pack_copies, []

    def measuring(written, *arguments):
        before = longest_chain(written.function)
        pack(written, *arguments)
        lengths.append((before, longest_chain(written.function)))

    with monkeypatch.context() as patched:
        patched.setattr(calling, "pack_copies", measuring)
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
    monkeypatch.setattr(packing, "_tower", lambda name: "")
    before, after = longest_chains(monkeypatch)
    assert after > before


def test_the_tower_at_home_begins_after_messages_are_sent(monkeypatch):
    """All other towers wait for them, and a GPU works in the order in which it is given operations."""
    pack, functions = calling.pack_copies, []

    def keeping(written, *arguments):
        pack(written, *arguments)
        functions.append(written.function)

    monkeypatch.setattr(calling, "pack_copies", keeping)
    report(pack_copies=True)
    nodes = functions[-1].node_def
    normalizing = [node for node in nodes if node.name.endswith("batchnorm/mul_1") and node.name.startswith("tower_")]
    waiting = [node.name.partition("/")[0] for node in normalizing if any("^packed/message" in name for name in node.input)]
    assert len(normalizing) == 4 * 3
    assert waiting == ["tower_0"] * 3


def dropouts():
    """Five layers that draw numbers, each with a key and a counter of its own."""
    stack = [layer for _ in range(5) for layer in (layers.Conv2D(3, 3, padding="same"), layers.Dropout(0.5))]
    return keras.Sequential([keras.Input((8, 8, 3)), *stack, layers.Flatten(), layers.Dense(4, "softmax")])


def test_the_counters_of_random_numbers_share_messages():
    """They are integers, and travel by their bits."""
    _, apart = report(build=dropouts)
    _, packed = report(build=dropouts, pack_copies=True)
    most = [max(row.number for row in found.copies if row.kind == "other") for found in (apart, packed)]
    assert most[0] >= 5 > 2 >= most[1]


def test_copies_are_packed_between_gpus_alone_unless_it_is_asked_for(monkeypatch):
    def packs(**arguments):
        return keras_dp.DataParallelModel(convolutions(), devices=2, **arguments).tower_steps.pack_copies

    assert not packs()
    assert packs(pack_copies=True)
    monkeypatch.setattr(keras_dp.model, "tower_devices", lambda devices: ["GPU:0", "GPU:1"])
    assert packs()
    assert not packs(pack_copies=False)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="`pack_copies` must be one of True, False, None"):
        keras_dp.DataParallelModel(convolutions(), devices=2, pack_copies="all")
