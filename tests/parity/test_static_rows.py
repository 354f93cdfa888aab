"""Programs that use the number of rows while they are traced train on towers as in plain Keras.

Plain Keras knows this number while it traces, wherever all batches have as many rows. An idiom is a loss, a layer, a metric or
a step that asks for the number, or that names it as a constant. The idioms of a group train together, in one model.
"""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_run, plain_run
from keras import layers, ops, optimizers

import keras_dp
from keras_dp.error_notes import add_note

GROUPS = collections.defaultdict(dict)
PROGRAMS = {}
# These groups also call `*_on_batch`, and use batches of other sizes.
WITH_OTHER_SIZES = {"asking"}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def mlp():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])


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


def idiom(kind, group):
    """Returns a decorator for a function of the number of rows, in a group of idioms.

    Args:
        kind: "loss" or "metric" for a function of (y, p, rows), "layer" of (x, rows), and "step" of (model, x, y, rows), which
            returns a loss. Classes of layers and of metrics take the number of rows alone.
        group: the name of the group.
    """

    def register(function):
        GROUPS[group][function.__name__] = kind, function
        return function

    return register


loss, metric, layer, step = (functools.partial(idiom, kind) for kind in ("loss", "metric", "layer", "step"))


def together(idioms, rows, others=False):
    """Returns (build, script) of a model with these idioms: layers in a row, the mean of losses or of steps, and metrics."""
    functions = collections.defaultdict(list)
    for kind, function in idioms:
        functions[kind].append(function)

    def mean(kind, *arguments):
        return tf.add_n([function(*arguments, rows) for function in functions[kind]]) / len(functions[kind])

    class Calls(layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x, rows)

    class Steps(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                value = mean("step", self, *data[:2])
            gradients = tape.gradient(value, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": value}

    def build():
        between = [each(rows) if isinstance(each, type) else Calls(each) for each in functions["layer"]]
        # With these layers, the model is not functional: no layer is called before a step is.
        inputs = [] if between else [keras.Input((3,))]
        stack = [*inputs, layers.Dense(4, "tanh"), *between, layers.Dense(2)]
        return (Steps if functions["step"] else keras.Sequential)(stack)

    def named(each):
        if isinstance(each, type):
            return each(rows)
        return keras.metrics.MeanMetricWrapper(lambda y, p: each(y, p, rows), each.__name__)

    compiled = None if functions["step"] else (lambda y, p: mean("loss", y, p)) if functions["loss"] else "mse"
    return build, trains(rows, others, [named(each) for each in functions["metric"]], compiled)


def program(rows, towers):
    """Registers a function of the number of rows that returns (build, script), with the numbers of its test."""

    def register(function):
        PROGRAMS[function.__name__] = function, rows, towers
        return function

    return register


def square(x):
    return tf.reduce_mean(tf.square(x))


def float64(x):
    return tf.cast(x, "float64")


# Losses that ask for the number.


@loss("asking")
def a_sum_by_the_rows_or_one(y, p, rows):
    return tf.reduce_sum(tf.square(p - y)) / (p.shape[0] or 1)


@loss("asking")
def another_loss_for_unknown_rows(y, p, rows):
    return square(p - y) if p.shape[0] is None else 2.0 * tf.reduce_mean(tf.abs(p - y))


@loss("asking")
def the_length_of_a_text(y, p, rows):
    return square(p - y) * len(f"{p.shape}")


@loss("asking")
def a_batch_shape_of_keras(y, p, rows):
    size = ops.shape(p)[0]
    return square(p - y) * (size if isinstance(size, int) else 0.5)


@loss("constants")
def rows_unstacked(y, p, rows):
    return tf.add_n([tf.reduce_sum(row**2) for row in tf.unstack(p - y)]) / rows


@loss("matrices and loops")
def singular_values_and_vectors(y, p, rows):
    s, u, v = tf.linalg.svd(p - y)
    return tf.reduce_sum(s) + tf.reduce_sum(u**4) + tf.reduce_sum(v**4)


@loss("matrices and loops")
def a_determinant_of_the_rows(y, p, rows):
    e = p - y
    gram = e @ tf.transpose(e) + tf.eye(rows, dtype=e.dtype)
    return tf.linalg.logdet(gram) + tf.reduce_sum(tf.linalg.solve(gram, e) ** 2)


@loss("constants")
def a_permutation_of_numpys_own_state(y, p, rows):
    return square(p - tf.gather(y, np.random.permutation(p.shape[0])))


@loss("constants")
def weights_of_numpy_by_row(y, p, rows):
    return tf.reduce_mean(np.linspace(0.5, 1.5, rows * 2).reshape(rows, 2) * (p - y) ** 2)


@loss("constants")
def constant_pairs(y, p, rows):
    first, second = np.triu_indices(p.shape[0], 1)
    return square(p - y) - 0.1 * square(tf.gather(p, first) - tf.gather(p, second))


@loss("constants")
def constant_segments(y, p, rows):
    return square(tf.math.segment_sum(p - y, np.arange(rows) // 2))


@loss("shapes")
def micro_batches_of_a_split(y, p, rows):
    return tf.add_n([tf.sqrt(square(part)) for part in tf.split(p - y, 2)])


@loss("shapes")
def micro_batches_of_a_reshape(y, p, rows):
    parts = tf.reshape(p - y, (2, rows // 2, 2))
    return tf.reduce_max(tf.reduce_mean(parts**2, [1, 2])) + tf.reduce_sum(tf.reduce_mean(parts, 1) ** 2)


@loss("shapes")
def a_shape_that_is_ensured(y, p, rows):
    e = tf.ensure_shape(p - y, (rows, 2))
    e.set_shape((rows, 2))
    return square(e)


@loss("shapes")
def tiled_and_repeated_rows(y, p, rows):
    return square(tf.tile(p, (rows, 1)) - tf.repeat(y, rows, axis=0))


@loss("shapes")
def broadcast_and_filled_rows(y, p, rows):
    target = tf.fill((rows, 2), float64(0.5)) + tf.broadcast_to(float64(tf.constant([1.0, -1.0])), (rows, 2))
    return square(p - y * target) + square(p - tf.zeros((rows, 2), p.dtype))


@loss("shapes")
def two_views_of_each_row(y, p, rows):
    views = tf.math.l2_normalize(tf.concat([p, y], 0), 1)
    similar = views @ tf.transpose(views) / 0.5 - 1e9 * tf.eye(2 * rows, dtype=p.dtype)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits((np.arange(2 * rows) + rows) % (2 * rows), similar))


@loss("shapes")
def the_worst_half_of_the_rows(y, p, rows):
    return tf.reduce_mean(tf.math.top_k(tf.reduce_sum((p - y) ** 2, 1), rows // 2).values)


@loss("asking")
def a_branch_by_the_shape(y, p, rows):
    return tf.cond(tf.shape(p)[0] > 3, lambda: square(p - y), lambda: 3.0 * tf.reduce_mean(tf.abs(p - y)))


@loss("matrices and loops")
def a_list_with_a_place_for_each_row(y, p, rows):
    errors = tf.TensorArray(p.dtype, rows, element_shape=(2,))
    _, errors = tf.while_loop(lambda i, _: i < rows, lambda i, a: (i + 1, a.write(i, (p[i] - y[i]) ** 2)), (0, errors))
    return tf.reduce_mean(errors.stack())


@loss("matrices and loops")
def a_scan_over_rows(y, p, rows):
    return square(tf.scan(lambda state, e: 0.5 * state + e, p - y, tf.zeros((2,), p.dtype)))


@loss("shapes")
def entries_at_the_labels(y, p, rows):
    places = tf.stack([tf.range(rows), tf.argmax(y, 1, output_type=tf.int32)], 1)
    return square(tf.tensor_scatter_nd_add(p, places, tf.ones(rows, p.dtype)) - y)


@loss("matrices and loops")
def a_function_of_numpy_between(y, p, rows):
    target = tf.numpy_function(lambda a: np.sort(a, 0), [y], tf.float64)
    target.set_shape((rows, 2))
    return square(p - target)


@loss("shapes")
def rolled_and_reversed_rows(y, p, rows):
    return square(p - y) + 0.1 * square(p - tf.roll(p, p.shape[0] // 2, 0)) + 0.1 * square(p - p[::-1])


# Layers.


@layer("shapes")
def noise_of_a_constant_shape(x, rows):
    return x + 0.1 * tf.random.normal((rows, 4), dtype=x.dtype)


@layer("shapes")
def noise_without_state(x, rows):
    return x + 0.1 * tf.random.stateless_normal((rows, 4), seed=[1, 2], dtype=x.dtype)


@layer("shapes")
def deviations_in_groups(x, rows):
    groups = tf.reshape(x, (min(4, x.shape[0]), -1, 4))
    deviation = tf.reduce_mean(tf.math.reduce_std(groups, 0) + 1e-3, 1)
    return tf.concat([x, tf.tile(deviation[:, None], (min(4, x.shape[0]), 1))], 1)


@layer("constants")
def a_dense_layer_over_rows(x, rows):
    mixing = np.random.RandomState(0).normal(size=(rows, rows)) / rows
    return x + tf.transpose(tf.tensordot(tf.transpose(x), mixing, 1))


@layer("matrices and loops")
def a_loop_from_zeros(x, rows):
    zeros = tf.zeros((rows, 4), x.dtype)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(0.5 * h + x)), (0, zeros))[1]


@layer("asking")
def another_path_for_unknown_rows(x, rows):
    """Decodes as a layer for conditional random fields does: by one path if the number of rows is unknown."""
    if x.shape[0] is None:
        return tf.reverse(x, [1])
    best = tf.scan(lambda best, score: tf.maximum(best + 0.1, score), tf.transpose(x), tf.zeros(x.shape[0], x.dtype))
    return tf.transpose(best)


@layer("constants")
def each_row_with_its_own_matrix(x, rows):
    matrices = np.random.RandomState(1).normal(size=(rows, 4, 4))
    return tf.squeeze(tf.linalg.matmul(matrices, x[..., None]), -1)


@layer("shapes")
def as_many_features_as_rows(x, rows):
    """Compares rows with features where both are as many."""
    wide = tf.tile(x, (1, rows))[:, :rows]
    return wide + wide @ tf.transpose(wide) / rows + tf.eye(rows, dtype=x.dtype) + tf.transpose(wide)


class WithState(layers.Layer):
    """A layer that is made for a number of rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows


@layer("state")
class ReadByRow(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="random_normal")

    def call(self, x):
        return x + self.state


@layer("state")
class AssignedByRow(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="zeros", trainable=False)

    def call(self, x):
        mixed = 0.5 * x + 0.5 * self.state
        self.state.assign(mixed)
        return mixed


@layer("state")
class UpdatedInParts(WithState):
    def build(self, shape):
        self.state = self.add_weight(shape=(self.rows, 4), initializer="ones", trainable=False)

    def call(self, x):
        half = (self.rows + 1) // 2
        before = ops.convert_to_tensor(self.state)
        self.state.assign(ops.slice_update(before, (self.rows - half, 0), x[:half]))
        return x * before


@layer("state")
class Queue(WithState):
    def build(self, shape):
        self.queue = self.add_weight(shape=(2 * self.rows, 4), initializer="random_normal", trainable=False)

    def call(self, x):
        queue = ops.convert_to_tensor(self.queue)
        self.queue.assign(tf.concat([x, queue[: -self.rows]], 0))
        return x + tf.nn.softmax(x @ tf.transpose(queue)) @ queue


@layer("state")
class WeightNoise(WithState):
    """Draws one noise for the weights of all rows."""

    def build(self, shape):
        self.seed = keras.random.SeedGenerator(4)
        self.kernel = self.add_weight(shape=(4, 4), initializer="random_normal")

    def call(self, x):
        noise = keras.random.normal((self.rows * 4, 4), seed=self.seed)
        kernels = self.kernel + 0.1 * tf.reshape(noise, (self.rows, 4, 4))
        return tf.einsum("bi,bij->bj", x, kernels)


@layer("state")
class StatefulRecurrence(WithState):
    """Carries a state for each row from one batch to the next."""

    def build(self, shape):
        self.cell = layers.GRU(3, stateful=True)
        self.cell.build((self.rows, 2, 2))

    def call(self, x):
        return self.cell(tf.reshape(x, (self.rows, 2, 2)))


# Metrics.


@metric("asking")
def another_metric_for_unknown_rows(y, p, rows):
    return tf.abs(p - y) if p.shape[0] is None else tf.square(p - y)


@metric("constants")
class Places(keras.metrics.Metric):
    """Has a place for each row."""

    def __init__(self, rows):
        super().__init__(name="places")
        self.sums = self.add_variable((rows,), initializer="zeros", name="sums")

    def update_state(self, y, p, sample_weight=None):
        self.sums.assign_add(tf.reduce_sum(tf.abs(p - y), 1))

    def result(self):
        return tf.reduce_max(self.sums)


# Steps.


@step("steps")
def shuffled_rows_mixed(model, x, y, rows):
    order = tf.random.shuffle(tf.range(rows))
    part = tf.random.uniform((rows, 1), dtype=x.dtype)
    mix = lambda a: part * a + (1 - part) * tf.gather(a, order)  # noqa: E731
    return square(model(mix(x), training=True) - mix(y))


@step("steps")
def jacobians_by_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        tape.watch(x)
        p = model(x, training=True)
    return square(p - y) + square(tape.batch_jacobian(p, x))


@step("steps")
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


@step("steps")
def clipped_gradients_of_each_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum((model(x, training=True) - y) ** 2, 1)
    jacobians = tape.jacobian(losses, model.trainable_variables)
    norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.reshape(j, (rows, -1)) ** 2, 1) for j in jacobians]))
    return tf.reduce_sum(losses * tf.stop_gradient(tf.minimum(1.0 / norms, tf.ones(rows, x.dtype)))) / rows


@step("steps")
def noise_at_a_time(model, x, y, rows):
    time = tf.random.uniform((rows, 1), dtype=x.dtype)
    noise = tf.random.normal((rows, 3), dtype=x.dtype)
    p = model(tf.cos(time) * x + tf.sin(time) * noise, training=True)
    return square(p - noise[:, :2])


# Models whose other widths are as many as the rows of a batch.


@program(6, 4)
def a_batch_shape_of_the_input(rows):
    return lambda: keras.Sequential([keras.Input(batch_shape=(rows, 3)), layers.Dense(4), layers.Dense(2)]), trains(rows)


def squares(*shape):
    """Returns a function that makes inputs of this shape, and targets with the first of its sizes."""
    return lambda batches, rows: (normal(batches * rows, *shape, seed=1), normal(batches * rows, shape[0], seed=2))


@program(8, 2)
def all_widths_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows,))
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Dense(rows, "tanh")(x))
        return keras.Model(inputs, layers.Dropout(0.3)(x))

    def compared(y, p):
        return square(p - y) + square(p @ tf.transpose(p)) + square(tf.transpose(p) @ p) + square(tf.transpose(p) - p)

    return build, trains(rows, loss=compared, make_data=squares(rows))


@program(2, 3)
def sequences_as_long_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows))
        x = x + layers.MultiHeadAttention(2, rows // 2)(x, x)
        x = layers.LSTM(rows, return_sequences=True)(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.GRU(rows)(x))

    return build, trains(rows, make_data=squares(rows, rows))


@program(6, 4)
def images_as_high_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows, rows))
        x = layers.Conv2D(rows, 3, padding="same", activation="tanh")(x)
        x = layers.Permute((2, 3, 1))(layers.BatchNormalization()(x))
        x = layers.Conv2D(rows, rows, activation="tanh")(layers.MaxPooling2D(2, 1, "same")(x))
        return keras.Model(inputs, layers.Flatten()(x))

    return build, trains(rows, make_data=squares(rows, rows, rows))


@program(2, 2)
def classes_as_rows(rows):
    def make_data(batches, of_batch):
        return normal(batches * of_batch, 3, seed=1), np.random.default_rng(2).integers(0, rows, batches * of_batch)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return lambda: keras.Sequential([layers.Dense(rows)]), trains(rows, True, ["accuracy"], loss, make_data)


# What else feeds a batch.


def by_the_rows(y, p):
    """Depends on whether the number of rows is known, by row."""
    return tf.reduce_mean((p - y) ** 2, -1) * (p.shape[0] or 0.5)


def fits_in_turn(fit_all):
    """Returns a function of the number of rows, of a function of (fit, x, y, dataset, rows) that returns histories."""

    def make(rows):
        def script(model):
            model.compile(optimizers.SGD(0.002), by_the_rows, metrics=["mae"], weighted_metrics=[])
            x, y = data(4, rows)
            dataset = tf.data.Dataset.from_tensor_slices((x, y))
            fit = functools.partial(model.fit, verbose=0, shuffle=False)
            return fit_all(lambda *given, **named: fit(*given, **named).history, x, y, dataset, rows)

        return mlp, script

    make.__name__ = fit_all.__name__
    return make


@program(8, 3)
@fits_in_turn
def batches_of_one_size(fit, x, y, dataset, rows):
    return [
        fit(x, y, batch_size=rows, shuffle=True),
        fit(x, y, batch_size=rows, validation_split=0.5),
        fit(dataset.shuffle(len(x), seed=3).repeat().batch(rows, drop_remainder=True), steps_per_epoch=3),
        fit(((x[:rows], y[:rows]) for _ in range(3)), steps_per_epoch=3),
    ]


@program(6, 4)
@fits_in_turn
def batches_of_several_sizes(fit, x, y, dataset, rows):
    validation = {"validation_batch_size": rows + 1}
    return [
        fit(x, y, batch_size=rows, validation_data=(x[: 2 * rows + 2], y[: 2 * rows + 2]), **validation),
        fit(x, y, batch_size=rows, validation_data=(x[1:], y[1:]), **validation),
        fit(dataset.batch(rows)),
        fit(x, y, batch_size=rows, sample_weight=np.linspace(0, 2, len(x))),
    ]


@program(1, 4)
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


# Towers with several rows each, with one, and with none.
CASES = [(group, rows, towers) for group in GROUPS for rows, towers in ((8, 3), (2, 4))]
CASES += [("asking", 1, 4), ("state", 1, 4)]
CASES += [(name, rows, towers) for name, (_, rows, towers) in PROGRAMS.items()]


@pytest.mark.parametrize(("name", "rows", "towers"), CASES)
def test_idiom_trains_as_on_one_device(name, rows, towers):
    if name in PROGRAMS:
        make, *_ = PROGRAMS[name]
        assert_same_run(*make(rows), towers, plain_run(*make(rows)))
    else:
        assert_same_together(name, GROUPS[name], rows, towers)


def assert_same_together(name, idioms, rows, towers):
    """Asserts that a group of idioms trains as on one device. If not, the error says which idioms do not do so alone."""
    others = name in WITH_OTHER_SIZES
    try:
        expected = plain_run(*together(idioms.values(), rows, others))
        assert_same_run(*together(idioms.values(), rows, others), towers, expected)
    except Exception as error:
        for alone, known in idioms.items() if len(idioms) > 1 else ():
            try:
                assert_same_together(name, {alone: known}, rows, towers)
            except Exception as reason:
                add_note(error, f"{alone} fails alone: {reason}")
        raise


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


def transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(8)(layers.GlobalAveragePooling1D()(x)))


SHARED = {
    convolutional: ((8, 8, 3), None, "mse"),
    transformer: ((8,), 20, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
}


@pytest.mark.parametrize("build", SHARED)
def test_towers_share_the_work_of_known_rows(build):
    """Nothing that has rows is computed once, and only predictions are gathered, whatever widths are as many as the rows."""
    shape, words, loss = SHARED[build]
    x = np.random.default_rng(0).integers(0, words, (8, *shape)) if words else normal(8, *shape)
    parallel = keras_dp.DataParallelModel(build(), devices=3)
    parallel.compile("adam", loss, metrics=["accuracy"])
    for step in ("train", "predict"):
        explanation = parallel.explain((x, np.arange(8) if words else normal(8, 8)), step)
        assert explanation.once == []
        assert sum(meeting.kind == "gather" for meeting in explanation.meetings) == (step == "predict")


NOISES = [GROUPS["shapes"][name] for name in ("noise_of_a_constant_shape", "noise_without_state")]
SHARING_NOISE = {"layers": NOISES, "a step": [GROUPS["steps"]["noise_at_a_time"]]}


@pytest.mark.parametrize("name", SHARING_NOISE)
def test_towers_share_noise_of_a_constant_number_of_rows(name):
    """A diffusion model's noise is cut into slices, as the batch is."""
    build, _ = together(SHARING_NOISE[name], 8)
    parallel = keras_dp.DataParallelModel(build(), devices=3)
    parallel.compile("sgd", "mse")
    assert parallel.explain(data(1, 8)).once == []
