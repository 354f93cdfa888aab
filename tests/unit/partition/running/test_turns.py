"""Towers of one device wait for each other in turns, whatever the graph, and compute what they did."""

import itertools
import random
from collections import defaultdict

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_dp
from keras_dp.partition import step
from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running import turns
from keras_dp.partition.running.calling import call, function_of
from keras_dp.partition.running.compilation import known_from_shapes
from keras_dp.partition.tracing.graph import Graph

DEVICES = [["CPU:0"] * 2, ["CPU:0"] * 4, ["CPU:0"] * 2 + ["CPU:1"] * 3]


def drawn(seed):
    """Returns a random graph of towers and of home, its last tensors, and the devices of the towers."""
    draw = random.Random(seed)
    devices = draw.choice(DEVICES)
    written, tensors = GraphWriter("CPU:0"), ["given"]
    for _ in range(draw.randint(2, 60)):
        tower = draw.choice([None, *range(len(devices)), *range(len(devices))])
        device = "CPU:0" if tower is None else devices[tower]
        waits = [f"^{name}" for name in draw.sample(tensors[1:], min(len(tensors) - 1, draw.choice([0, 0, 0, 1, 2])))]
        inputs = [draw.choice([tensors[0], *tensors[-6:]]), draw.choice(tensors)]
        tensors.append(written.add("AddV2", [*inputs, *waits], device, "sum", tower, T=tf.float64))
    return written, tensors[-4:], devices


class Waiting:
    """Watches whether towers take their turns.

    Attributes:
        stages: the stages of all nodes before turns are taken, as they were chosen.
        is_in_turns: for each tower but the first one of a device and stage, whether each node waits for all of the one before.
        kept: the bytes of rows that the first tower keeps from one stage for others.
        made: the bytes of all rows that it makes.
    """

    def __init__(self, monkeypatch):
        self.is_in_turns = []
        find = turns._stages_with_kept_bytes

        def found(graph, towers, devices, bytes_of):
            self.stages, self.kept = find(graph, towers, devices, bytes_of)
            self.towers, self.made = towers, sum(bytes_of(name) for name, tower in towers.items() if tower == 0)
            return self.stages, self.kept

        monkeypatch.setattr(turns, "_stages_with_kept_bytes", found)

    def look(self, written, devices):
        graph, groups = Graph(written.function.node_def), defaultdict(lambda: defaultdict(set))
        assert graph.cycle == []
        known = known_from_shapes(graph, lambda node: True)
        for name, tower in self.towers.items():
            if name in graph.nodes and name not in known:
                groups[devices[tower], self.stages[name]][tower].add(name)
        for towers in groups.values():
            in_order = [towers[tower] for tower in sorted(towers)]
            for before, names in itertools.pairwise(in_order):
                self.is_in_turns.append(all(before <= graph.before([name]) for name in names))


@pytest.mark.parametrize("takes_turns", [True, False])
def test_random_graphs_have_no_cycle_and_compute_the_same_in_turns(takes_turns, monkeypatch):
    """Without turns, a negative control: towers begin when they can."""
    waiting = Waiting(monkeypatch)

    def computed(seed, in_turns):
        written, outputs, devices = drawn(seed)

        @tf.function(autograph=False)
        def run(x):
            function = function_of(written, {"given": lambda: x}, [name for name in outputs if name != "given"], [])
            if in_turns:
                before = Graph([*written.function.node_def])
                turns.take_turns(written, devices, lambda name: 1.0)
                if not takes_turns:
                    del written.function.node_def[:]
                    written.function.node_def.extend(without_turns(before))
                waiting.look(written, devices)
            return call(function)

        return run(tf.constant(1.0, tf.float64))

    for seed in range(60):
        np.testing.assert_array_equal(computed(seed, True), computed(seed, False))
    assert len(waiting.is_in_turns) > 100
    assert all(waiting.is_in_turns) == takes_turns


def without_turns(graph):
    """Returns copies of nodes which wait for no turn."""
    for node in graph.nodes.values():
        copied = type(node)()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(name for name in node.input if "turn" not in name)
        yield copied


def convolutions():
    stack = [layers.Conv2D(6, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6, 6, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(4)])


def masked():
    stack = [layers.Embedding(10, 5, mask_zero=True), layers.LSTM(4, return_sequences=True), layers.Dense(4)]
    return keras.Sequential([keras.Input((6,)), *stack])


@pytest.mark.parametrize(
    ("build", "x", "targets", "batch_norm", "keeps"),
    [
        (convolutions, (6, 6, 3), (), "sync", True),
        (convolutions, (6, 6, 3), (), "local", False),
        # Of a mask, all must know how many entries it has: nothing else is kept.
        (masked, (6,), (6,), "sync", False),
    ],
)
@pytest.mark.parametrize("rows", [6, None])
def test_the_towers_of_a_step_take_turns(build, x, targets, batch_norm, keeps, rows, monkeypatch):
    waiting = Waiting(monkeypatch)
    take_turns = step.take_turns

    def watched(written, devices, bytes_of):
        take_turns(written, devices, bytes_of)
        waiting.look(written, devices)

    monkeypatch.setattr(step, "take_turns", watched)
    rng = np.random.default_rng(0)
    parallel = keras_dp.DataParallelModel(build(), 2, batch_norm=batch_norm, slices_per_device=3)
    parallel.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    batch = rng.integers(0, 10, (16, *x)), rng.integers(0, 4, (16, *targets))
    parallel.fit(*batch, batch_size=16 if rows else 6, verbose=0)
    assert waiting.is_in_turns
    assert all(waiting.is_in_turns)
    assert (waiting.kept > 0.05 * waiting.made) == keeps


def test_parts_of_gradients_are_added_one_by_one(monkeypatch):
    """On two devices with three slices each, of which one has the variables."""
    graphs = []
    take_turns = step.take_turns
    monkeypatch.setattr(step, "take_turns", lambda written, *more: graphs.append(written) or take_turns(written, *more))
    parallel = keras_dp.DataParallelModel(
        keras.Sequential([keras.Input((4,)), layers.Dense(1, use_bias=False)]), 2, slices_per_device=3
    )
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(np.ones((12, 4)), np.ones((12, 1)))
    nodes = {node.name: node for node in graphs[-1].function.node_def}
    sums = [node for node in nodes.values() if node.op == "AddN" and "MatMul" in node.name]
    assert [node.attr["N"].i for node in sums] == [2] * 5
    assert [graphs[-1].towers.get(node.name) for node in sums] == [1, None, 4, None, None]
    assert [node.device for node in sums] == ["/device:CPU:0"] * 2 + ["/device:CPU:1"] * 2 + ["/device:CPU:0"]
