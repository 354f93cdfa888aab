"""Towers that combine small sums by themselves give the result of plain Keras, and wait for fewer copies."""

import graphlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, largest_difference, twins
from keras import layers

import keras_dp
from keras_dp.partition import step
from keras_dp.partition.tracing.names import source_of

RNG = np.random.default_rng(6)
IMAGES, CLASSES = RNG.normal(size=(11, 8, 8, 3)), RNG.integers(0, 4, 11)
SEQUENCES = np.where(np.arange(5) < RNG.integers(1, 6, (11, 1)), 1.0, 0.0)[..., None] * RNG.normal(size=(11, 5, 3))


def convolutions():
    inputs = x = keras.Input((8, 8, 3))
    for _ in range(3):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same", use_bias=False)(x)))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.GlobalAveragePooling2D()(x)))


def masked():
    """A loss and batch normalizations that leave out masked steps: their denominators are sums, too."""
    inputs = keras.Input((5, 3))
    x = layers.BatchNormalization()(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization()(layers.Dense(4, "tanh")(x))))


CASES = {
    "clipping": (convolutions, lambda: keras.optimizers.Adam(global_clipnorm=0.5)),
    "masked": (masked, lambda: keras.optimizers.SGD(0.1)),
    "loss scaling": (convolutions, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9))),
    "accumulated": (convolutions, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
}


def trained(model, x, y):
    """Trains on batches of 4, 4 and 3 rows, and on one with fewer rows than some numbers of towers."""
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    return history, model.train_on_batch(x[:2], y[:2], return_dict=True), model.evaluate(x, y, batch_size=4, verbose=0)


# Variables at home and sharded, with XLA and without.
RUNS = [
    ("clipping", 3, "sharded", True),
    ("masked", 3, "sharded", False),
    ("loss scaling", 4, None, False),
    ("accumulated", 3, None, True),
]


@pytest.mark.parametrize(("case", "towers", "parameter_device", "jit_compile"), RUNS)
def test_the_result_is_that_of_one_device(case, towers, parameter_device, jit_compile):
    build, optimizer = CASES[case]
    x, y = (SEQUENCES, SEQUENCES[..., :2]) if build is masked else (IMAGES, CLASSES)
    plain, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=towers, parameter_device=parameter_device, pack_copies=True)
    results = []
    for model in (plain, parallel):
        loss = "mse" if build is masked else "sparse_categorical_crossentropy"
        model.compile(optimizer(), loss, jit_compile=jit_compile and model is parallel)
        results.append(trained(model, x, y))
    assert_same(*results, 1e-9)
    assert largest_difference(plain, parallel) < 1e-9


def longest_chain(function):
    """Returns how many copies from one device to another follow each other in a function."""
    nodes = {node.name: node for node in function.node_def}
    sources = {name: [source_of(source) for source in node.input if source_of(source) in nodes] for name, node in nodes.items()}
    lengths = {}
    for name in graphlib.TopologicalSorter(sources).static_order():
        ends = [lengths[source] + (nodes[source].device not in ("", nodes[name].device)) for source in sources[name]]
        lengths[name] = max(ends, default=0)
    return max(lengths.values())


def test_each_batch_normalization_takes_one_hop_forward_and_one_backward(monkeypatch):
    combine, lengths = step.combine_on_towers, []

    def measuring(written, *arguments):
        lengths.append(longest_chain(written.function))
        combine(written, *arguments)
        lengths.append(longest_chain(written.function))

    monkeypatch.setattr(step, "combine_on_towers", measuring)
    parallel = keras_dp.DataParallelModel(convolutions(), devices=3, pack_copies=True)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    parallel.train_on_batch(IMAGES, CLASSES)
    before, after = lengths[-2:]
    assert before - after >= 2 * 3


class Moments(keras.Model):
    """Predicts, for each row, the moments with which its tower normalizes."""

    def predict_step(self, data):
        mean, variance = tf.nn.moments(data, [0, 1, 2])
        rows = tf.zeros_like(data[:, 0, 0])
        return {"mean": rows + mean, "scale": rows + tf.math.rsqrt(variance + 1e-3)}


def test_all_towers_have_the_same_moments_bit_for_bit():
    """Each row has the moments of its own tower."""
    model = Moments(inputs=(inputs := keras.Input((8, 8, 3))), outputs=layers.Conv2D(1, 1)(inputs))
    parallel = keras_dp.DataParallelModel(model, devices=4, parameter_device="sharded", pack_copies=True)
    moments = parallel.predict(IMAGES, batch_size=11, verbose=0)
    np.testing.assert_allclose(moments["mean"][0], IMAGES.mean((0, 1, 2)), rtol=1e-12)
    for values in moments.values():
        assert len(values) == 11
        assert len(np.unique(values, axis=0)) == 1
