"""Programs that use the number of rows while they are traced train on towers as in plain Keras.

Plain Keras knows this number while it traces, wherever all batches have as many rows. An idiom is a loss, a layer, a metric, a
step or a model that asks for the number, or that names it as a constant. Each is a function of the number of rows of a batch.
"""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from fresh_runs import assert_same_run, plain_run
from keras import layers, ops, optimizers

import keras_dp

IDIOMS = {}
# The sizes of batches of most idioms.
SIZES = (8, 2, 6)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def mlp():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def around(layer):
    """Builds a layer between two dense ones, in a model that is not functional: no layer is called before a step is."""
    return keras.Sequential([layers.Dense(4, "tanh"), layer, layers.Dense(2)])


def data(batches, rows):
    return normal(batches * rows, 3, seed=1), normal(batches * rows, 2, seed=2)


def trains(rows, others=False, metrics=(), loss="mse", make_data=data):
    """Returns a script whose batches all have as many rows: in `fit`, `evaluate` and `predict`.

    Args:
        rows: the number of rows of a batch.
        others: whether it also calls `*_on_batch`, evaluates and predicts with batches of other sizes, and fits with a last
            batch that is smaller.
        metrics: the metrics to compile.
        loss: the loss to compile; None for a model whose step has its own, which is not evaluated.
        make_data: a function of the numbers of batches and of rows that returns inputs and targets.
    """

    def script(model):
        model.compile(optimizers.SGD(0.02, 0.9), loss=loss, metrics=list(metrics) or None)
        fit = functools.partial(model.fit, batch_size=rows, shuffle=False, verbose=0)
        x, y = make_data(3, rows)
        results = [fit(x, y, epochs=2).history]
        if loss is not None:
            results.append(model.evaluate(x[rows:], y[rows:], batch_size=rows, verbose=0))
        results.append(model.predict(x[rows:], batch_size=rows, verbose=0))
        if others:
            results += [model.train_on_batch(x[:rows], y[:rows]), model.test_on_batch(x[:rows], y[:rows])]
            x, y = make_data(2, rows + 1)
            results += [
                model.evaluate(x, y, batch_size=rows + 1, verbose=0),
                model.predict(x[1:], batch_size=rows, verbose=0),
                fit(x[:-1], y[:-1]).history,
            ]
        return results

    return script


def idiom(make, sizes=SIZES):
    """Registers a function of the number of rows that returns (build, script)."""
    assert make.__name__ not in IDIOMS
    IDIOMS[make.__name__] = make, sizes
    return make


def of(make_program):
    """Returns a decorator for a kind of idioms; its options are `sizes`, and `others` as in `trains`."""

    def decorator(function=None, *, sizes=SIZES, others=False):
        if function is None:
            return functools.partial(decorator, sizes=sizes, others=others)

        def make(rows):
            return make_program(function, rows, others)

        make.__name__ = function.__name__
        idiom(make, sizes)
        return function

    return decorator


@of
def loss(function, rows, others):
    return mlp, trains(rows, others, loss=lambda y, p: function(y, p, rows))


@of
def metric(function, rows, others):
    return mlp, trains(rows, others, [keras.metrics.MeanMetricWrapper(lambda y, p: function(y, p, rows), "metric")])


@of
def layer(function, rows, others):
    class Idiom(layers.Layer):
        def call(self, x):
            return function(x, rows)

    return lambda: around(Idiom()), trains(rows, others)


@of
def stateful_layer(cls, rows, others):
    return lambda: around(cls(rows)), trains(rows, others)


@of
def step(function, rows, others):
    """Makes a step of its own, which descends along what the function returns, of a loss of (model, x, y, rows)."""

    class Step(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                value = function(self, *data[:2], rows)
            gradients = tape.gradient(value, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": value}

    return lambda: Step([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)]), trains(rows, others, loss=None)


def square(x):
    return tf.reduce_mean(tf.square(x))


def float64(x):
    return tf.cast(x, "float64")


# Losses that ask for the number.


@loss(others=True)
def a_sum_by_the_rows_or_one(y, p, rows):
    return tf.reduce_sum(tf.square(p - y)) / (p.shape[0] or 1)


@loss(others=True)
def another_loss_for_unknown_rows(y, p, rows):
    return square(p - y) if p.shape[0] is None else 2.0 * tf.reduce_mean(tf.abs(p - y))


@loss(others=True)
def the_length_of_a_text(y, p, rows):
    return square(p - y) * len(f"{p.shape}")


@loss(others=True)
def rows_as_a_key(y, p, rows):
    return square(p - y) * {rows: 3.0, None: 2.0}.get(p.shape[0], 1.0)


@loss(others=True)
def a_truth_of_known_entries(y, p, rows):
    entries = p.shape.num_elements()
    return square(p - y) * (entries if p.shape.is_fully_defined() else 0.5)


@loss(others=True)
def a_product_of_the_shape(y, p, rows):
    return tf.reduce_sum(tf.square(p - y)) / math.prod(size or 5 for size in p.shape)


@loss(others=True)
def a_batch_shape_of_keras(y, p, rows):
    size = ops.shape(p)[0]
    return square(p - y) * (size if isinstance(size, int) else 0.5)


@loss
def an_assertion_on_rows(y, p, rows):
    assert p.shape[0] == rows, p.shape
    assert y.shape == (rows, 2), y.shape
    return square(p - y)


@loss
def rows_unstacked(y, p, rows):
    return tf.add_n([tf.reduce_sum(row**2) for row in tf.unstack(p - y)]) / rows


@loss
def rows_in_pairs_of_a_zip(y, p, rows):
    pairs = zip(tf.unstack(y), tf.unstack(p), strict=True)
    return sum(tf.reduce_sum(tf.abs(one - other)) * (i + 1) for i, (one, other) in enumerate(pairs))


@loss
def a_loop_over_neighbours(y, p, rows):
    total = square(p - y)
    for i in range(1, p.shape[0]):
        total += square(p[i] - p[i - 1]) / rows
    return total


@loss
def an_identity_matrix_of_the_rows(y, p, rows):
    return square((tf.eye(p.shape[0], dtype=p.dtype) + 0.1) @ (p - y))


@loss
def a_qr_of_rows(y, p, rows):
    return tf.reduce_sum(tf.abs(tf.linalg.qr(p - y)[1]))


@loss
def singular_values_and_vectors(y, p, rows):
    s, u, v = tf.linalg.svd(p - y)
    return tf.reduce_sum(s) + tf.reduce_sum(u**4) + tf.reduce_sum(v**4)


@loss
def a_determinant_of_the_rows(y, p, rows):
    e = p - y
    gram = e @ tf.transpose(e) + tf.eye(rows, dtype=e.dtype)
    return tf.linalg.logdet(gram) + tf.reduce_sum(tf.linalg.solve(gram, e) ** 2)


@loss(others=True)
def a_permutation_of_numpy(y, p, rows):
    if p.shape[0] is None:
        return square(p - y)
    return square(p - y) + 0.1 * square(p - tf.gather(p, np.random.RandomState(0).permutation(p.shape[0])))


@loss
def a_permutation_of_numpys_own_state(y, p, rows):
    return square(p - tf.gather(y, np.random.permutation(p.shape[0])))


@loss
def constant_indices(y, p, rows):
    return square(p - y) + square(p - tf.gather(p, list(range(rows))[::-1]))


@loss
def weights_of_numpy_by_row(y, p, rows):
    return tf.reduce_mean(np.linspace(0.5, 1.5, rows * 2).reshape(rows, 2) * (p - y) ** 2)


@loss
def constant_pairs(y, p, rows):
    first, second = np.triu_indices(p.shape[0], 1)
    return square(p - y) - 0.1 * square(tf.gather(p, first) - tf.gather(p, second))


@loss
def constant_segments(y, p, rows):
    return square(tf.math.segment_sum(p - y, np.arange(rows) // 2))


@loss(sizes=(8, 4, 12))
def micro_batches_of_a_split(y, p, rows):
    return tf.add_n([tf.sqrt(square(part)) for part in tf.split(p - y, 4)])


@loss
def micro_batches_of_a_reshape(y, p, rows):
    parts = tf.reshape(p - y, (2, rows // 2, 2))
    return tf.reduce_max(tf.reduce_mean(parts**2, [1, 2])) + tf.reduce_sum(tf.reduce_mean(parts, 1) ** 2)


@loss
def a_reshape_to_all_entries(y, p, rows):
    return tf.reduce_mean(tf.reshape(p - y, (rows * 2,)) ** 2 * np.linspace(1, 2, rows * 2))


@loss
def a_shape_that_is_ensured(y, p, rows):
    e = tf.ensure_shape(p - y, (rows, 2))
    e.set_shape((rows, 2))
    return square(e)


@loss
def tiled_and_repeated_rows(y, p, rows):
    return square(tf.tile(p, (rows, 1)) - tf.repeat(y, rows, axis=0))


@loss
def broadcast_and_filled_rows(y, p, rows):
    target = tf.fill((rows, 2), float64(0.5)) + tf.broadcast_to(float64(tf.constant([1.0, -1.0])), (rows, 2))
    return square(p - y * target) + square(p - tf.zeros((rows, 2), p.dtype))


@loss
def a_class_for_each_row(y, p, rows):
    similar = p @ tf.transpose(y)
    labels = tf.one_hot(tf.range(rows), depth=rows, dtype=p.dtype)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, similar))


@loss
def two_views_of_each_row(y, p, rows):
    views = tf.math.l2_normalize(tf.concat([p, y], 0), 1)
    similar = views @ tf.transpose(views) / 0.5 - 1e9 * tf.eye(2 * rows, dtype=p.dtype)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits((np.arange(2 * rows) + rows) % (2 * rows), similar))


@loss
def a_shape_as_numbers(y, p, rows):
    return tf.reduce_sum((p - y) ** 2) / float64(tf.shape(p, out_type=tf.float32)[0])


@loss
def the_worst_half_of_the_rows(y, p, rows):
    return tf.reduce_mean(tf.math.top_k(tf.reduce_sum((p - y) ** 2, 1), rows // 2).values)


@loss(others=True)
def a_branch_by_the_shape(y, p, rows):
    return tf.cond(tf.shape(p)[0] > 3, lambda: square(p - y), lambda: 3.0 * tf.reduce_mean(tf.abs(p - y)))


@loss
def a_list_with_a_place_for_each_row(y, p, rows):
    errors = tf.TensorArray(p.dtype, rows, element_shape=(2,))
    _, errors = tf.while_loop(lambda i, _: i < rows, lambda i, a: (i + 1, a.write(i, (p[i] - y[i]) ** 2)), (0, errors))
    return tf.reduce_mean(errors.stack())


@loss
def a_scan_over_rows(y, p, rows):
    return square(tf.scan(lambda state, e: 0.5 * state + e, p - y, tf.zeros((2,), p.dtype)))


@loss
def a_map_over_rows(y, p, rows):
    each = tf.map_fn(lambda pair: tf.reduce_sum((pair[0] - pair[1]) ** 2), (y, p), fn_output_signature=tf.float64)
    return tf.reduce_sum(tf.reshape(each, (rows,))) / rows


@loss
def balanced_assignments(y, p, rows):
    weights = tf.exp(p - tf.reduce_max(p))
    for _ in range(3):
        weights = weights / tf.reduce_sum(weights, 0) / 2
        weights = weights / tf.reduce_sum(weights, 1, keepdims=True) / p.shape[0]
    return square(p - y) - tf.reduce_sum(weights * tf.math.log_softmax(p)) / rows


@loss
def distances_without_a_diagonal(y, p, rows):
    distances = tf.reduce_sum((p[:, None] - y[None]) ** 2, -1)
    return tf.reduce_mean(tf.linalg.set_diag(distances, tf.zeros(rows, p.dtype))) + tf.linalg.trace(distances) / rows


@loss
def entries_at_the_labels(y, p, rows):
    places = tf.stack([tf.range(rows), tf.argmax(y, 1, output_type=tf.int32)], 1)
    return square(tf.tensor_scatter_nd_add(p, places, tf.ones(rows, p.dtype)) - y)


@loss
def a_function_of_numpy_between(y, p, rows):
    target = tf.numpy_function(lambda a: np.sort(a, 0), [y], tf.float64)
    target.set_shape((rows, 2))
    return square(p - target)


@loss
def a_triangle_over_rows(y, p, rows):
    return square(tf.linalg.band_part(tf.ones((rows, rows), p.dtype), -1, 0) @ (p - y) / rows)


@loss
def rolled_and_reversed_rows(y, p, rows):
    return square(p - y) + 0.1 * square(p - tf.roll(p, p.shape[0] // 2, 0)) + 0.1 * square(p - p[::-1])


@loss
def frequencies_over_rows(y, p, rows):
    waves = tf.signal.rfft(tf.cast(tf.transpose(p - y), tf.float64), [2 * p.shape[0]])
    return float64(tf.reduce_sum(tf.abs(waves) ** 2)) / rows


# Layers.


@layer
def noise_of_a_constant_shape(x, rows):
    return x + 0.1 * tf.random.normal((rows, 4), dtype=x.dtype)


@layer
def noise_without_state(x, rows):
    return x + 0.1 * tf.random.stateless_normal((rows, 4), seed=[1, 2], dtype=x.dtype)


@layer(others=True)
def noise_for_known_rows(x, rows):
    return x + 0.1 * tf.random.normal((x.shape[0], 4), dtype=x.dtype) if x.shape[0] else 2.0 * x


@layer(sizes=(8, 4, 12))
def deviations_in_groups(x, rows):
    groups = tf.reshape(x, (min(4, x.shape[0]), -1, 4))
    deviation = tf.reduce_mean(tf.math.reduce_std(groups, 0) + 1e-3, 1)
    return tf.concat([x, tf.tile(deviation[:, None], (min(4, x.shape[0]), 1))], 1)


@layer
def a_dense_layer_over_rows(x, rows):
    mixing = np.random.RandomState(0).normal(size=(rows, rows)) / rows
    return x + tf.transpose(tf.tensordot(tf.transpose(x), mixing, 1))


@layer
def a_loop_from_zeros(x, rows):
    zeros = tf.zeros((rows, 4), x.dtype)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(0.5 * h + x)), (0, zeros))[1]


@layer
def a_list_of_states(x, rows):
    states = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=(rows, 4))
    state = tf.zeros((rows, 4), x.dtype)
    for i in range(3):
        state = tf.tanh(0.5 * state + x)
        states = states.write(i, state)
    return tf.reduce_mean(states.stack(), 0)


@layer(others=True)
def another_path_for_unknown_rows(x, rows):
    """Decodes as a layer for conditional random fields does: by one path if the number of rows is unknown."""
    if x.shape[0] is None:
        return tf.reverse(x, [1])
    best = tf.scan(lambda best, score: tf.maximum(best + 0.1, score), tf.transpose(x), tf.zeros(x.shape[0], x.dtype))
    return tf.transpose(best)


@layer
def each_row_with_its_own_matrix(x, rows):
    matrices = np.random.RandomState(1).normal(size=(rows, 4, 4))
    return tf.squeeze(tf.linalg.matmul(matrices, x[..., None]), -1)


@layer
def as_many_features_as_rows(x, rows):
    """Compares rows with features where both are as many."""
    wide = tf.tile(x, (1, rows))[:, :rows]
    return wide + wide @ tf.transpose(wide) / rows + tf.eye(rows, dtype=x.dtype) + tf.transpose(wide)


class WithState(layers.Layer):
    """A layer that is made for a number of rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows


@stateful_layer
class ReadByRow(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="random_normal")

    def call(self, x):
        return x + self.state


@stateful_layer
class AssignedByRow(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="zeros", trainable=False)

    def call(self, x):
        mixed = 0.5 * x + 0.5 * self.state
        self.state.assign(mixed)
        return mixed


@stateful_layer(sizes=(8, 4, 6))
class UpdatedInParts(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="ones", trainable=False)

    def call(self, x):
        half = self.rows // 2
        before = ops.convert_to_tensor(self.state)
        self.state.assign(ops.slice_update(before, (half, 0), x[:half]))
        return x * before


@stateful_layer
class Queue(WithState):
    def build(self, shape):
        self.queue = self.add_weight(shape=(2 * self.rows, 4), initializer="random_normal", trainable=False)

    def call(self, x):
        queue = ops.convert_to_tensor(self.queue)
        self.queue.assign(tf.concat([x, queue[: -self.rows]], 0))
        return x + tf.nn.softmax(x @ tf.transpose(queue)) @ queue


@stateful_layer
class WeightNoise(WithState):
    """Draws one noise for the weights of all rows."""

    def build(self, shape):
        self.seed = keras.random.SeedGenerator(4)
        self.kernel = self.add_weight(shape=(4, 4), initializer="random_normal")

    def call(self, x):
        noise = keras.random.normal((self.rows * 4, 4), seed=self.seed)
        kernels = self.kernel + 0.1 * tf.reshape(noise, (self.rows, 4, 4))
        return tf.einsum("bi,bij->bj", x, kernels)


@stateful_layer
class NoiseOfKeras(WithState):
    def build(self, shape):
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x, training=False):
        return x + keras.random.normal((self.rows, 4), seed=self.seed) if training else x


@stateful_layer
class StatefulRecurrence(WithState):
    """Carries a state for each row from one batch to the next."""

    def build(self, shape):
        self.cell = layers.GRU(3, stateful=True)
        self.cell.build((self.rows, 2, 2))

    def call(self, x):
        return self.cell(tf.reshape(x, (self.rows, 2, 2)))


# Metrics.


@metric(others=True)
def a_metric_by_the_rows(y, p, rows):
    return tf.reduce_sum(tf.abs(p - y)) / (p.shape[0] or 1)


@metric(others=True)
def another_metric_for_unknown_rows(y, p, rows):
    return tf.abs(p - y) if p.shape[0] is None else tf.square(p - y)


@metric
def a_metric_of_rows_unstacked(y, p, rows):
    return tf.stack([tf.reduce_max(row) for row in tf.unstack(p - y)])


@idiom
def a_metric_with_a_place_for_each_row(rows):
    class Places(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="places")
            self.sums = self.add_variable((rows,), initializer="zeros", name="sums")

        def update_state(self, y, p, sample_weight=None):
            self.sums.assign_add(tf.reduce_sum(tf.abs(p - y), 1))

        def result(self):
            return tf.reduce_max(self.sums)

    return mlp, trains(rows, metrics=[Places()])


# Steps.


@step
def shuffled_rows_mixed(model, x, y, rows):
    order = tf.random.shuffle(tf.range(rows))
    part = tf.random.uniform((rows, 1), dtype=x.dtype)
    mix = lambda a: part * a + (1 - part) * tf.gather(a, order)  # noqa: E731
    return square(model(mix(x), training=True) - mix(y))


@step
def jacobians_by_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        tape.watch(x)
        p = model(x, training=True)
    return square(p - y) + square(tape.batch_jacobian(p, x))


@step(sizes=(8, 2))
def a_jacobian_of_all_rows(model, x, y, rows):
    with tf.GradientTape() as tape:
        tape.watch(x)
        p = model(x, training=True)
    return square(p - y) + tf.reduce_sum(tf.reshape(tape.jacobian(p, x), (rows * 2, rows * 3)) ** 2) / rows


@step
def a_penalty_of_gradients_between(model, x, y, rows):
    part = tf.random.uniform((rows, 1), dtype=x.dtype)
    between = part * x + (1 - part) * x[::-1]
    with tf.GradientTape() as tape:
        tape.watch(between)
        p = model(between, training=True)
    norms = tf.sqrt(tf.reduce_sum(tape.gradient(p, between) ** 2, 1) + 1e-6)
    return square(model(x, training=True) - y) + square(norms - tf.ones((rows,), x.dtype))


@step
def second_gradients_of_each_row(model, x, y, rows):
    total = square(model(x, training=True) - y)
    for i in range(x.shape[0]):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                p = model(x[i : i + 1], training=True)
            slope = inner.gradient(p, x)
        total += square(outer.gradient(slope, x)) / rows
    return total


@step
def clipped_gradients_of_each_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum((model(x, training=True) - y) ** 2, 1)
    jacobians = tape.jacobian(losses, model.trainable_variables)
    norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.reshape(j, (rows, -1)) ** 2, 1) for j in jacobians]))
    return tf.reduce_sum(losses * tf.stop_gradient(tf.minimum(1.0 / norms, tf.ones(rows, x.dtype)))) / rows


@step
def noise_at_a_time(model, x, y, rows):
    time = tf.random.uniform((rows, 1), dtype=x.dtype)
    noise = tf.random.normal((rows, 3), dtype=x.dtype)
    p = model(tf.cos(time) * x + tf.sin(time) * noise, training=True)
    return square(p - noise[:, :2])


@step
def a_code_of_constant_shape(model, x, y, rows):
    mean, spread = tf.split(model(x, training=True), 2, 1)
    return square(mean + tf.exp(spread) * tf.random.normal((rows, 1), dtype=x.dtype) - y)


@idiom
def labels_of_ones_and_zeros(rows):
    """Trains a generator against a discriminator, with labels and noise of a constant number of rows."""

    class Adversarial(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = layers.Dense(3), layers.Dense(1)
            self.second = optimizers.SGD(0.05)

        def call(self, x):
            return self.discriminator(self.generator(x))

        def train_step(self, data):
            bce = keras.losses.BinaryCrossentropy(from_logits=True)
            noise = tf.random.normal((rows, 3), dtype="float64")
            with tf.GradientTape() as tape:
                both = tf.concat([keras.utils.unpack_x_y_sample_weight(data)[0], self.generator(noise)], 0)
                labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
                found = bce(labels + 0.05 * tf.random.uniform(tf.shape(labels)), self.discriminator(both))
            variables = self.discriminator.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(found, variables), variables, strict=True))
            with tf.GradientTape() as tape:
                fooled = bce(tf.ones((rows, 1)), self(noise))
            variables = self.generator.trainable_variables
            self.second.apply_gradients(zip(tape.gradient(fooled, variables), variables, strict=True))
            return {"found": found, "fooled": fooled}

    def script(model):
        model.compile(optimizers.SGD(0.05))
        x = normal(3 * rows, 3)
        return [model.fit(x, batch_size=rows, epochs=2, verbose=0).history, model.predict(x, batch_size=rows, verbose=0)]

    return Adversarial, script


@idiom
def micro_batches_in_a_loop(rows):
    """Sums the gradients of single rows in a loop of Python, and applies them once."""

    class Accumulating(keras.Sequential):
        def train_step(self, data):
            x, y = data[:2]
            sums = [tf.zeros_like(variable) for variable in self.trainable_variables]
            for i in range(x.shape[0]):
                with tf.GradientTape() as tape:
                    value = square(self(x[i : i + 1], training=True) - y[i : i + 1])
                gradients = tape.gradient(value, self.trainable_variables)
                sums = [one + other / rows for one, other in zip(sums, gradients, strict=True)]
            self.optimizer.apply_gradients(zip(sums, self.trainable_variables, strict=True))
            return {"last": value}

    return lambda: Accumulating([keras.Input((3,)), layers.Dense(2)]), trains(rows, loss=None)


# Models whose other widths are as many as the rows of a batch.


@idiom
def a_batch_shape_of_the_input(rows):
    return lambda: keras.Sequential([keras.Input(batch_shape=(rows, 3)), layers.Dense(4), layers.Dense(2)]), trains(rows)


def squares(*shape):
    """Returns a function that makes inputs of this shape, and targets with the first of its sizes."""
    return lambda batches, rows: (normal(batches * rows, *shape, seed=1), normal(batches * rows, shape[0], seed=2))


@idiom
def all_widths_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows,))
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Dense(rows, "tanh")(x))
        return keras.Model(inputs, layers.Dropout(0.3)(x))

    def compared(y, p):
        return square(p - y) + square(p @ tf.transpose(p)) + square(tf.transpose(p) @ p) + square(tf.transpose(p) - p)

    return build, trains(rows, loss=compared, make_data=squares(rows))


@functools.partial(idiom, sizes=(8, 2))
def sequences_as_long_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows))
        x = x + layers.MultiHeadAttention(2, rows // 2)(x, x)
        x = layers.LSTM(rows, return_sequences=True)(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.GRU(rows)(x))

    return build, trains(rows, make_data=squares(rows, rows))


@functools.partial(idiom, sizes=(8, 6))
def images_as_high_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows, rows))
        x = layers.Conv2D(rows, 3, padding="same", activation="tanh")(x)
        x = layers.Permute((2, 3, 1))(layers.BatchNormalization()(x))
        x = layers.Conv2D(rows, rows, activation="tanh")(layers.MaxPooling2D(2, 1, "same")(x))
        return keras.Model(inputs, layers.Flatten()(x))

    return build, trains(rows, make_data=squares(rows, rows, rows))


@idiom
def classes_as_rows(rows):
    def make_data(batches, of_batch):
        return normal(batches * of_batch, 3, seed=1), np.random.default_rng(2).integers(0, rows, batches * of_batch)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return lambda: keras.Sequential([layers.Dense(rows)]), trains(rows, True, ["accuracy"], loss, make_data)


# What else feeds a batch.


def by_the_rows(y, p):
    """Depends on whether the number of rows is known, by row."""
    return tf.reduce_mean((p - y) ** 2, -1) * (p.shape[0] or 0.5)


def fits(fit):
    """Registers a function that fits a compiled model, and returns nested numbers."""

    def make(rows):
        def script(model):
            model.compile(optimizers.SGD(0.002), by_the_rows, metrics=["mae"], weighted_metrics=[])
            return fit(functools.partial(model.fit, epochs=2, verbose=0, shuffle=False), *data(4, rows), rows)

        return mlp, script

    make.__name__ = fit.__name__
    return idiom(make)


@fits
def sample_weights(fit, x, y, rows):
    return fit(x, y, batch_size=rows, sample_weight=np.linspace(0, 2, len(x))).history


@fits
def another_number_in_the_validation(fit, x, y, rows):
    return fit(
        x, y, batch_size=rows, validation_data=(x[: 2 * rows + 2], y[: 2 * rows + 2]), validation_batch_size=rows + 1
    ).history


@fits
def unknown_rows_in_the_validation(fit, x, y, rows):
    return fit(x, y, batch_size=rows, validation_data=(x[1:], y[1:]), validation_batch_size=rows + 1).history


@fits
def a_dataset_that_drops_the_remainder(fit, x, y, rows):
    return fit(tf.data.Dataset.from_tensor_slices((x[1:], y[1:])).batch(rows, drop_remainder=True)).history


@fits
def a_dataset_that_keeps_the_remainder(fit, x, y, rows):
    return fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)).history


@fits
def a_dataset_of_a_known_cardinality(fit, x, y, rows):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=3).repeat().batch(rows, drop_remainder=True)
    return fit(dataset, steps_per_epoch=3).history


@fits
def a_generator_of_arrays(fit, x, y, rows):
    return fit(((x[:rows], y[:rows]) for _ in range(6)), steps_per_epoch=3).history


@fits
def a_shuffle_before_each_epoch(fit, x, y, rows):
    return fit(x, y, batch_size=rows, shuffle=True).history


@fits
def a_share_for_validation(fit, x, y, rows):
    return fit(x, y, batch_size=rows, validation_split=0.5).history


@idiom
def three_steps_in_one_execution(rows):
    def script(model):
        model.compile(optimizers.SGD(0.002), by_the_rows, metrics=["mae"], steps_per_execution=3)
        x, y = data(7, rows)
        return [
            model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history,
            model.evaluate(x, y, batch_size=rows, verbose=0),
            model.predict(x, batch_size=rows, verbose=0),
        ]

    return mlp, script


@idiom
def class_weights(rows):
    def script(model):
        model.compile(optimizers.SGD(0.01), lambda y, p: by_the_rows(tf.one_hot(tf.cast(y, "int32"), 2, dtype=p.dtype), p))
        x, y = normal(3 * rows, 3), np.random.default_rng(2).integers(0, 2, 3 * rows)
        return model.fit(x, y, batch_size=rows, class_weight={0: 0.5, 1: 2.0}, shuffle=False, verbose=0).history

    return mlp, script


@idiom
def a_mask_of_constant_rows(rows):
    def build():
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(inputs)
        return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3, return_sequences=True)(x)))

    def masked(y, p):
        weights = tf.constant(np.arange(rows * 5).reshape(rows, 5) % 3, p.dtype)
        return tf.reduce_sum(tf.reduce_sum((p - y) ** 2, -1) * weights) / (p.shape[0] or 1)

    def make_data(batches, rows):
        return np.random.default_rng(1).integers(0, 9, (batches * rows, 5)), normal(batches * rows, 5, 2, seed=2)

    return build, trains(rows, loss=masked, make_data=make_data)


# Each idiom once. The sizes take turns with the numbers of towers, so that slices are even, uneven and empty.
CASES = [(name, sizes[i // 3 % len(sizes)], (3, 4, 2)[i % 3], make) for i, (name, (make, sizes)) in enumerate(IDIOMS.items())]
CASES += [(name, 1, 4, IDIOMS[name][0]) for name in ("the_length_of_a_text", "ReadByRow", "three_steps_in_one_execution")]


@pytest.mark.parametrize(
    ("name", "rows", "towers", "make"), [pytest.param(*case, id="{}-{}-{}".format(*case)) for case in CASES]
)
def test_idiom_trains_as_on_one_device(name, rows, towers, make):
    assert_same_run(*make(rows), towers, plain_run(*make(rows)))


# Nothing is lost where the number of rows is known: what towers share of these models when it is unknown, they share then.


def convolutional():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.MaxPooling2D(),
            layers.SpatialDropout2D(0.2),
            layers.Conv2D(4, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8),
        ]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(20, 5, mask_zero=True),
            layers.LSTM(6, return_sequences=True, dropout=0.1),
            layers.Bidirectional(layers.GRU(4)),
            layers.Dense(8),
        ]
    )


def transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(8)(layers.GlobalAveragePooling1D()(x)))


def dense():
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dropout(0.5), layers.Dense(8)])


def tokens(rows):
    return np.random.default_rng(0).integers(0, 20, (rows, 8))


MODELS = {
    "dense": (dense, lambda rows: normal(rows, 8)),
    "convolutional": (convolutional, lambda rows: normal(rows, 8, 8, 3)),
    "recurrent": (recurrent, tokens),
    "transformer": (transformer, tokens),
}
LOSSES = {
    "mean square": ("mse", lambda rows: normal(rows, 8, seed=1)),
    "classes": (keras.losses.SparseCategoricalCrossentropy(from_logits=True), lambda rows: np.arange(rows) % 8),
}
SHARED = [
    *((name, "mean square", 8) for name in MODELS),
    *((name, "classes", 9) for name in MODELS),
]


@pytest.mark.parametrize(("model", "loss", "rows"), SHARED)
def test_towers_share_the_work_of_known_rows(model, loss, rows):
    """Nothing that has rows is computed once, and only predictions are gathered, whatever widths are as many as the rows."""
    build, inputs = MODELS[model]
    parallel = keras_dp.DataParallelModel(build(), devices=3)
    loss, targets = LOSSES[loss]
    parallel.compile("adam", loss, metrics=["accuracy"])
    batch = inputs(rows), targets(rows)
    for step in ("train", "predict"):
        explanation = parallel.explain(batch, step)
        assert explanation.once == []
        assert sum(meeting.kind == "gather" for meeting in explanation.meetings) == (step == "predict")


@pytest.mark.parametrize(
    "name", ["labels_of_ones_and_zeros", "noise_of_a_constant_shape", "noise_without_state", "noise_at_a_time"]
)
def test_towers_share_noise_of_a_constant_number_of_rows(name):
    """A diffusion model's noise and a GAN's labels are cut into slices, as the batch is."""
    build, script = IDIOMS[name][0](8)
    parallel = keras_dp.DataParallelModel(build(), devices=3)
    script(parallel)
    assert parallel.explain(data(1, 8)).once == []
