"""Moments of the global batch are Keras's, accurate, masked and cheap; the other modes work as documented."""

import itertools
import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_training, assert_towers_match_one_device, twins
from keras import layers

import keras_dp
from keras_dp import choices
from keras_dp.batch_normalization.modes import batch_norm_mode
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.keras_internals import keras_batch_norms
from keras_dp.partition.building.target import Target
from keras_dp.partition.running.calling import node_by_node
from keras_dp.steps.partitioned import on_slices

rng = np.random.default_rng(0)


def step_on_towers(function, batch, num_towers):
    """Returns a `tf.function` that runs `function` on the slices of a batch."""

    @tf.function(autograph=False)
    def run():
        devices, shares = [f"CPU:{i}" for i in range(num_towers)], Shares.alike(num_towers)
        return on_slices(function, cut(batch, shares), shares, lambda: Target(devices, "CPU:0")).run()[0]

    return run


def moments_on_towers(x, num_towers, mask=None, mode="sync"):
    layer = layers.BatchNormalization()
    layer.build(x.shape)

    def moments(batch):
        x, mask = batch
        with keras.StatelessScope(), batch_norm_mode(mode, []) as taken:
            layer(x, training=True, mask=mask)
        return tuple(taken[layer][0])

    return step_on_towers(moments, (x, mask), num_towers)()


@pytest.mark.parametrize(("rows", "num_towers", "mode"), [(10, 4, "sync"), (10, 4, "local"), (1, 2, "sync"), (3, 4, "local")])
def test_moments_of_the_global_batch(rows, num_towers, mode):
    """Each row has the same weight, also if towers have several rows, one or none, and other means than their neighbours.

    https://github.com/pytorch/pytorch/issues/22192: the running variance gave every process the same weight.
    https://github.com/pytorch/pytorch/issues/36865: a process with a single value failed, even if others had more.
    """
    x = rng.normal(size=(rows, 5, 3)) + np.arange(rows)[:, None, None]
    count, mean, variance = moments_on_towers(x, num_towers, mode=mode)
    np.testing.assert_array_equal(count, rows * 5)
    np.testing.assert_allclose(mean, x.mean(axis=(0, 1)), atol=1e-13)
    np.testing.assert_allclose(variance, x.var(axis=(0, 1)), atol=1e-13)


def test_masked_moments_divide_by_n_plus_epsilon():
    x, mask = rng.normal(size=(7, 5, 3)), rng.random((7, 5)) < 0.6
    mask[0] = False
    n = mask.sum() + keras.config.epsilon()
    mean = x[mask].sum(axis=0) / n
    variance = ((x[mask] - mean) ** 2).sum(axis=0) / n
    count, received_mean, received_variance = moments_on_towers(x, 4, mask)
    np.testing.assert_allclose(count, n, rtol=1e-15)
    np.testing.assert_allclose(received_mean, mean, rtol=1e-12)
    np.testing.assert_allclose(received_variance, variance, rtol=1e-12)


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_large_means_do_not_cost_the_variance(mode):
    """Keras with `synchronized=True` computes E[x^2] - E[x]^2, which is 0.0 or 6.0 in float32 for a variance of 1."""
    keras.config.set_floatx("float32")
    x = (5000 + rng.normal(size=(64, 8, 4))).astype("float32")
    exact = x.astype("float64").var(axis=(0, 1))
    _, _, variance = moments_on_towers(x, 3, mode=mode)
    np.testing.assert_allclose(variance, exact, rtol=1e-3)
    layer = layers.BatchNormalization(synchronized=True, momentum=0.0)
    layer(x, training=True)
    assert np.abs(layer.moving_variance.numpy() / exact - 1).max() > 0.1, "Keras has mended it: say so in the docs"


@pytest.mark.parametrize(("value", "mode", "masked"), [(-3e7, "sync", True), (0.1, "local", False)])
def test_variance_is_never_negative(value, mode, masked):
    keras.config.set_floatx("float32")
    x = np.full((11, 3, 2), value, "float32")
    _, _, variance = moments_on_towers(x, 4, np.ones((11, 3), bool) if masked else None, mode)
    assert np.all(variance.numpy() >= 0)


def test_a_tower_without_rows_is_no_infinity_away():
    """The square of this distance overflows."""

    class Variance(keras.Model):
        def train_step(self, x):
            return {"variance": tf.reduce_sum(tf.nn.moments(x, [0])[1])}

    parallel = keras_dp.DataParallelModel(Variance(), devices=2)
    parallel.compile()
    history = parallel.fit(np.full((1, 2), 1e200), verbose=0)
    assert history.history["variance"] == [0]


@pytest.mark.parametrize(("mask", "exchanged"), [(None, (2, 4)), (rng.random((9, 5)) < 0.6, (3, 5))], ids=["plain", "masked"])
def test_what_the_towers_exchange(mask, exchanged):
    """Towers combine 2C numbers forward, and 2C backward. With a mask, they also sum Keras's counts of each channel.

    `exchanged` has the multiples of C forward, and forward and backward together.
    """
    x, channels = rng.normal(size=(9, 5, 8)), 8
    layer = layers.BatchNormalization()
    layer.build(x.shape)

    def forward(batch):
        x, mask = batch
        with keras.StatelessScope():
            return layer(x, training=True, mask=mask)

    def backward(batch):
        with tf.GradientTape() as tape:
            tape.watch(batch[0])
            loss = tf.reduce_sum(forward(batch) ** 3)
        return tape.gradient(loss, batch[0])

    def summed(step):
        with node_by_node():
            operations = step_on_towers(step, (x, mask), 3).get_concrete_function().graph.get_operations()
        found = [operation for operation in operations if operation.name.startswith("partitioned/sum/")]
        variances = [operation for operation in operations if operation.name.startswith("partitioned/variance/")]
        found += [operation for operation in variances if operation.type == "Identity"]
        return sum(operation.outputs[0].shape.num_elements() for operation in found)

    assert [summed(step) for step in (forward, backward)] == [times * channels for times in exchanged]


RENORM = {"renorm": True, "renorm_clipping": {"rmax": 2.0, "rmin": 0.5, "dmax": 0.5}}

LAYERS = {
    "clipped": lambda: layers.BatchNormalization(**RENORM),
    "not_clipped": lambda: layers.BatchNormalization(renorm=True, renorm_momentum=0.8, axis=1),
    "no_center": lambda: layers.BatchNormalization(center=False, momentum=0.8),
    "no_scale": lambda: layers.BatchNormalization(scale=False, epsilon=0.1),
    "regularized_and_constrained": lambda: layers.BatchNormalization(
        gamma_regularizer="l2", beta_regularizer="l1", gamma_constraint=keras.constraints.MaxNorm(0.9)
    ),
    "synchronized": lambda: layers.BatchNormalization(synchronized=True),
    "over_time": lambda: layers.TimeDistributed(layers.BatchNormalization()),
    "nested": lambda: keras.Sequential([layers.Dense(6), layers.BatchNormalization(), layers.ReLU()]),
    "not_trainable": lambda: layers.BatchNormalization(trainable=False, moving_mean_initializer="ones"),
}


def compile_arguments():
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"}


def test_every_kind_of_layer():
    """Each kind has an output and so a loss of its own, which a failure names. Towers have two or three rows.

    https://github.com/pytorch/pytorch/issues/36382: backward, gradients were averaged over processes, not over rows.
    """

    def build():
        inputs = keras.Input((4, 6))
        normalized = {kind: layer()(layers.Dense(6)(inputs)) for kind, layer in LAYERS.items()}
        return keras.Model(inputs, {kind: layers.Dense(2, name=kind)(layers.Flatten()(x)) for kind, x in normalized.items()})

    data = rng.normal(size=(15, 4, 6)), dict.fromkeys(LAYERS, rng.normal(size=(15, 2)))
    assert_towers_match_one_device(build, compile_arguments, [(data, 7)], 3)


AXES = {"of_6": ((6,), 1), "of_4x6": ((4, 6), -2), "of_3x2x4": ((3, 2, 4), 2), "of_2x3x2x2": ((2, 3, 2, 2), 1)}


def test_every_rank_and_axis():
    """The last batch has one row for three towers; in inputs of rank 2, its variance is zero.

    https://github.com/pytorch/pytorch/issues/36530: a process without rows failed, or blocked the others.
    https://github.com/pytorch/pytorch/issues/62967: statistics of permuted inputs assumed another memory layout.
    """

    def build():
        inputs, outputs = keras.Input((24,)), {}
        for name, (shape, axis) in AXES.items():
            x = layers.Reshape(shape)(layers.Dense(math.prod(shape), "tanh")(inputs))
            x = layers.BatchNormalization(axis=axis, momentum=0.5)(x)
            outputs[name] = layers.Dense(2, name=name)(layers.Flatten()(x))
        return keras.Model(inputs, outputs)

    data = rng.normal(2, 3, size=(15, 24)), dict.fromkeys(AXES, rng.normal(size=(15, 2)))
    assert_same_training(build, compile_arguments, [(data, 7)], 3)


def test_masked_layer():
    """Under tf.distribute, Keras with `synchronized=True` takes the moments of each replica's valid entries separately."""

    def build():
        inputs = keras.Input((5, 3))
        masked = layers.Masking()(inputs)
        normalized = {f"axis{axis}": layers.BatchNormalization(axis=axis)(layers.Dense(4)(masked)) for axis in (-1, 1)}
        return keras.Model(inputs, {name: layers.Dense(2, name=name)(x) for name, x in normalized.items()})

    x, y = rng.normal(size=(13, 5, 3)), rng.normal(size=(13, 5, 2))
    x[:, 3:] *= rng.integers(0, 2, (13, 1, 1))
    x[4:8] = 0  # A slice of which every entry is masked.
    assert_same_training(build, compile_arguments, [((x, {"axis-1": y, "axis1": y}), 12)], 3)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_moments_are_float32_under_mixed_precision(policy):
    """The sum of 12 x 64 activations of 500 overflows float16, and bfloat16 loses its last digits."""
    keras.config.set_floatx("float32")
    dtype = policy.removeprefix("mixed_")
    x = tf.cast(500 + 20 * rng.normal(size=(12, 64, 3)), dtype)
    norm = layers.BatchNormalization(momentum=0.0, dtype=policy)
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((64, 3), dtype=dtype), norm]), devices=3)
    parallel.compile(keras.optimizers.SGD(0.0), "mse")
    parallel.train_on_batch(x, tf.zeros_like(x))
    exact = tf.cast(x, tf.float64).numpy()
    np.testing.assert_allclose(norm.moving_mean, exact.mean(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, exact.var(axis=(0, 1)), rtol=1e-4)


def small_network(**first):
    norms = [layers.BatchNormalization(momentum=0.5, **first), layers.BatchNormalization(momentum=0.9)]
    parts = [layers.Dense(3, "tanh"), norms[0], layers.Dense(2, "tanh"), norms[1], layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *parts])


def slices_one_after_the_other(model, batches, num_slices, mode, learning_rate=0.1):
    """Trains in one of the other modes on one device, as a reference: Keras runs each slice, and NumPy sums and updates.

    Returns the losses. The gradients of the slices' parts of the loss add up. The moving statistics are updated with the
    moments of all slices' inputs together ("local"), or of the first slice's inputs ("first").
    """
    norms = [layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)]
    inputs_of = keras.Model(model.inputs[0], [norm.input for norm in norms])
    losses = []
    for x, y in batches:
        bounds = [len(x) * i // num_slices for i in range(num_slices + 1)]
        gradients, parts, loss = [0.0] * len(model.trainable_variables), [], 0.0
        for rows in [slice(*bound) for bound in itertools.pairwise(bounds) if bound[0] < bound[1]]:
            with keras.StatelessScope():
                parts.append([part.numpy() for part in inputs_of(x[rows], training=True)])
            with keras.StatelessScope(), tf.GradientTape() as tape:
                part = tf.reduce_sum((model(x[rows], training=True) - y[rows]) ** 2) / len(x)
            for k, gradient in enumerate(tape.gradient(part, model.trainable_variables)):
                gradients[k] += gradient.numpy()
            loss += part.numpy()
        losses.append(loss)
        for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
            weight.assign_sub(learning_rate * gradient)
        for norm, own in zip(norms, zip(*parts, strict=True), strict=True):
            values = own[0] if mode == "first" else np.concatenate(own)
            update(norm, values.mean(0), values.var(0))
    return losses


def update(norm, mean, variance):
    """Updates a layer's moving statistics as Keras documents it (Ioffe 2017, arXiv 1702.03275, for `renorm`)."""

    def move(variable, value, momentum):
        variable.assign(variable.numpy() * momentum + value * (1 - momentum))

    move(norm.moving_mean, mean, norm.momentum)
    if not keras_batch_norms.renormalizes(norm):
        move(norm.moving_variance, variance, norm.momentum)
        return
    deviation = np.sqrt(variance + norm.epsilon)
    move(norm.renorm_mean, mean, norm.renorm_momentum)
    move(norm.renorm_stddev, deviation, norm.renorm_momentum)
    move(norm.moving_stddev, deviation, norm.momentum)
    norm.moving_variance.assign(norm.moving_stddev.numpy() ** 2 - norm.epsilon)


@pytest.mark.parametrize("mode", ["local", "first"])
def test_other_modes_against_the_slices_one_after_the_other(mode):
    """Covers uneven slices, and a batch with fewer rows than towers. In "local", the first layer renormalizes."""

    def build():
        return small_network(**RENORM if mode == "local" else {})

    batches = [(rng.normal(2, 3, size=(rows, 3)), rng.normal(size=(rows, 1))) for rows in (7, 11, 2)]
    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm=mode)
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    received = []
    for batch in batches:
        parallel.reset_metrics()
        received.append(parallel.train_on_batch(*batch))
    expected = slices_one_after_the_other(one, batches, 3, mode)
    np.testing.assert_allclose(received, expected, rtol=1e-9)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def take_a_local_step(model, x):
    parallel = keras_dp.DataParallelModel(model, devices=3, batch_norm="local")
    parallel.compile(keras.optimizers.SGD(0.0), "mse")
    parallel.train_on_batch(x, np.zeros_like(x))


def test_local_statistics_of_masked_slices_are_those_of_the_global_batch():
    def build():
        inputs = keras.Input((5, 3))
        return keras.Model(inputs, layers.BatchNormalization(momentum=0.5)(layers.Masking()(inputs)))

    x = rng.normal(2, 3, size=(7, 5, 3))
    x[:, 3:] *= rng.integers(0, 2, (7, 1, 1))
    x[2:5] = 0
    one, inner = twins(build)
    one(x, training=True)
    take_a_local_step(inner, x)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_local_statistics_of_a_layer_that_is_called_twice():
    """The moments of each call update the statistics, in order; the second call takes the slices' results of the first."""

    class Twice(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(momentum=0.5, epsilon=0.3)

        def call(self, x, training=None):
            return self.norm(2 * self.norm(x, training=training), training=training)

    x, model = rng.normal(2, 3, size=(7, 3)), Twice()
    take_a_local_step(model, x)
    second = np.concatenate([2 * (part - part.mean(0)) / np.sqrt(part.var(0) + 0.3) for part in (x[0:2], x[2:4], x[4:7])])
    np.testing.assert_allclose(model.norm.moving_mean, (0.5 * 0 + 0.5 * x.mean(0)) * 0.5 + 0.5 * second.mean(0), atol=1e-12)
    np.testing.assert_allclose(model.norm.moving_variance, (0.5 + 0.5 * x.var(0)) * 0.5 + 0.5 * second.var(0), atol=1e-12)


@pytest.mark.parametrize("mode", choices.values_of(choices.BatchNorm))
def test_gradients_of_every_mode_are_those_of_finite_differences(mode):
    """SGD(1) subtracts the gradient itself, and a step returns the loss before its update. Three towers have seven rows."""
    x, y = rng.normal(2, 3, size=(7, 3)), rng.normal(size=(7, 1))
    inner = small_network()
    parallel = keras_dp.DataParallelModel(inner, devices=3, batch_norm=mode)
    parallel.compile(keras.optimizers.SGD(1.0), "mse")
    weights = inner.get_weights()

    def step(values):
        inner.set_weights(values)
        parallel.reset_metrics()
        return parallel.train_on_batch(x, y)

    step(weights)
    trained = {id(v) for v in inner.trainable_variables}
    gradients = [before - after for before, after in zip(weights, inner.get_weights(), strict=True)]
    places = [(k, i) for k, v in enumerate(inner.weights) if id(v) in trained for i in np.ndindex(tuple(v.shape))]
    assert len(places) == inner.count_params() - 2 * (3 + 2)
    for k, index in places:
        losses = []
        for change in (1e-5, -1e-5):
            changed = [value.copy() for value in weights]
            changed[k][index] += change
            losses.append(step(changed))
        np.testing.assert_allclose(gradients[k][index], (losses[0] - losses[1]) / 2e-5, rtol=1e-6, atol=1e-8)


def test_other_layers_than_plain_batch_normalization_stay_as_they_are_in_local_mode():
    def build():
        normalized = [layers.BatchNormalization(synchronized=True), layers.LayerNormalization(), layers.GroupNormalization(2)]
        return keras.Sequential([keras.Input((4,)), *normalized, layers.Dense(1)])

    data = rng.normal(size=(15, 4)), rng.normal(size=(15, 1))
    assert_same_training(build, compile_arguments, [(data, 7)], 3, {"batch_norm": "local"})


class Prototypes(layers.Layer):
    """Multiplies the rows with weights that a batch normalization takes the moments of."""

    def __init__(self):
        super().__init__()
        self.normalization = layers.BatchNormalization()

    def build(self, shape):
        self.vectors = self.add_weight(shape=(6, shape[-1]), initializer="glorot_uniform", name="vectors")

    def call(self, x, training=None):
        return x @ keras.ops.transpose(self.normalization(3.0 * self.vectors, training=training))


class Ordered(layers.Layer):
    """Sorts the rows of the whole batch before a batch normalization."""

    def __init__(self):
        super().__init__()
        self.normalization = layers.BatchNormalization()

    def call(self, x, training=None):
        return self.normalization(keras.ops.sort(x, axis=0), training=training)


@pytest.mark.parametrize("layer", [Prototypes, Ordered])
@pytest.mark.parametrize("mode", ["local", "first"])
def test_moments_of_what_is_not_cut_are_those_of_one_device_in_all_modes(layer, mode):
    """A tower has no slice of these: neither their moments nor the gradients of these are its own."""

    def build():
        return keras.Sequential([keras.Input((5,)), layers.Dense(4), layer(), layers.Dense(3)])

    x, y = np.random.default_rng(5).normal(size=(9, 5)), np.random.default_rng(6).normal(size=(9, 3))
    assert_same_training(build, lambda: {"optimizer": "sgd", "loss": "mse"}, [((x, y), 9)], 3, {"batch_norm": mode})


def test_negative_control_local_moments_give_other_weights():
    data = rng.normal(size=(30, 3)), rng.normal(size=(30, 1))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_training(small_network, compile_arguments, [(data, 10)], 2, {"batch_norm": "local"})


def test_unknown_mode():
    with pytest.raises(ValueError, match="`batch_norm` must be one of 'sync', 'local', 'first'.*batch_norm='global'"):
        keras_dp.DataParallelModel(small_network(), batch_norm="global")


def test_a_layer_of_ones_own_across_the_towers():
    """Runs the worked example of docs/batch_normalization.md unchanged."""
    page = (Path(__file__).parents[2] / "docs" / "batch_normalization.md").read_text()
    (example,) = [block for block in page.split("```python\n") if "class BatchStandardDeviation" in block]
    namespace = {}
    exec(example.split("```")[0], namespace)

    def build():
        layer = namespace["BatchStandardDeviation"]()
        return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layer, layers.Dense(1)])

    data = rng.normal(size=(15, 3)), rng.normal(size=(15, 1))
    assert_same_training(build, compile_arguments, [(data, 7)], 3)
