"""Programs that use the number of rows while they are traced train on towers as in plain Keras.

Plain Keras knows this number while it traces, wherever all batches have as many rows. An idiom is a loss, a layer, a metric or
a step that asks for the number, or that names it as a constant. The idioms of a group train together, in one model.
tests/unit/partition/placing/test_readings.py shows that whatever is read as a number of rows, the result is right.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_run, plain_run
from keras import layers, ops, optimizers
from programs.catalogue import normal
from programs.steps import Learner

import keras_dp


def data(batches, rows):
    return normal(batches * rows, 3, seed=1), normal(batches * rows, 2, seed=2)


def trains(rows, metrics=(), loss="mse", make_data=data):
    """Returns a script whose batches all have as many rows: in `fit`, `evaluate` and `predict`.

    Without a loss, the step of the model has its own, and is not evaluated.
    """

    def script(model):
        model.compile(optimizers.SGD(0.02, 0.9), loss=loss, metrics=list(metrics) or None)
        x, y = make_data(3, rows)
        results = [model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history]
        if loss is not None:
            results.append(model.evaluate(x[rows:], y[rows:], batch_size=rows, verbose=0))
        return [*results, model.predict(x[rows:], batch_size=rows, verbose=0)]

    return script


class Calls(layers.Layer):
    """Calls a function of the rows and their number, and of a weight for each row if there is an initializer."""

    def __init__(self, function, rows, initializer=None):
        super().__init__()
        self.function, self.rows, self.state = function, rows, []
        if initializer:
            trained = initializer == "random_normal"
            self.state = [self.add_weight(shape=(rows, 4), initializer=initializer, trainable=trained, name="state")]

    def call(self, x):
        return self.function(x, self.rows, *self.state)


def together(idioms, rows):
    """Returns (build, script) of a model with these idioms: layers in a row, the mean of losses or of steps, and metrics.

    They are functions and classes, by kind and name: "loss" and "metric" have functions of (y, p, rows), "layer" of (x, rows),
    "step" of (model, x, y, rows), and the name of an initializer of (x, rows, state). Classes take the number of rows.
    """
    steps = idioms.get("step", {})

    def mean(functions, *arguments):
        return tf.add_n([function(*arguments, rows) for function in functions.values()]) / len(functions)

    class Steps(Learner, keras.Sequential):
        def loss_of(self, x, y):
            return mean(steps, self, x, y), {}

    def build():
        between = []
        for initializer in ("zeros", "ones", "random_normal"):
            between += [Calls(each, rows, initializer) for each in idioms.get(initializer, {}).values()]
        between += [each(rows) if isinstance(each, type) else Calls(each, rows) for each in idioms.get("layer", {}).values()]
        # With these layers, the model is not functional: no layer is called before a step is.
        inputs = [] if between else [keras.Input((3,))]
        return (Steps if steps else keras.Sequential)([*inputs, layers.Dense(4, "tanh"), *between, layers.Dense(2)])

    def metric(name, each):
        if isinstance(each, type):
            return each(rows)
        return keras.metrics.MeanMetricWrapper(lambda y, p: each(y, p, rows), name.replace(" ", "_"))

    loss = None if steps else (lambda y, p: mean(idioms["loss"], y, p)) if "loss" in idioms else "mse"
    return build, trains(rows, [metric(*each) for each in idioms.get("metric", {}).items()], loss)


def square(x):
    return tf.reduce_mean(tf.square(x))


# Losses that need more than one expression.


def constant_pairs(y, p, rows):
    first, second = np.triu_indices(p.shape[0], 1)
    return square(p - y) - 0.1 * square(tf.gather(p, first) - tf.gather(p, second))


def micro_batches_of_a_reshape(y, p, rows):
    parts = tf.reshape(p - y, (2, rows // 2, 2))
    return tf.reduce_max(tf.reduce_mean(parts**2, [1, 2])) + tf.reduce_sum(tf.reduce_mean(parts, 1) ** 2)


def two_views_of_each_row(y, p, rows):
    views = tf.math.l2_normalize(tf.concat([p, y], 0), 1)
    similar = views @ tf.transpose(views) / 0.5 - 1e9 * tf.eye(2 * rows, dtype=p.dtype)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits((np.arange(2 * rows) + rows) % (2 * rows), similar))


def a_list_with_a_place_for_each_row(y, p, rows):
    errors = tf.TensorArray(p.dtype, rows, element_shape=(2,))
    _, errors = tf.while_loop(lambda i, _: i < rows, lambda i, a: (i + 1, a.write(i, (p[i] - y[i]) ** 2)), (0, errors))
    return tf.reduce_mean(errors.stack())


def a_function_of_numpy_between(y, p, rows):
    target = tf.numpy_function(lambda a: np.sort(a, 0), [y], tf.float64)
    target.set_shape((rows, 2))
    return square(p - target)


# Layers.


def deviations_in_groups(x, rows):
    groups = tf.reshape(x, (min(4, x.shape[0]), -1, 4))
    deviation = tf.reduce_mean(tf.math.reduce_std(groups, 0) + 1e-3, 1)
    return tf.concat([x, tf.tile(deviation[:, None], (min(4, x.shape[0]), 1))], 1)


def another_path_for_unknown_rows(x, rows):
    """Decodes as a layer for conditional random fields does: by one path if the number of rows is unknown."""
    if x.shape[0] is None:
        return tf.reverse(x, [1])
    best = tf.scan(lambda best, score: tf.maximum(best + 0.1, score), tf.transpose(x), tf.zeros(x.shape[0], x.dtype))
    return tf.transpose(best)


def assigned_by_row(x, rows, state):
    mixed = 0.5 * x + 0.5 * state
    state.assign(mixed)
    return mixed


def updated_in_parts(x, rows, state):
    half = (rows + 1) // 2
    before = ops.convert_to_tensor(state)
    state.assign(ops.slice_update(before, (rows - half, 0), x[:half]))
    return x * before


class StatefulRecurrence(layers.Layer):
    def __init__(self, rows):
        super().__init__()
        self.rows, self.cell = rows, layers.GRU(3, stateful=True)

    def build(self, shape):
        self.cell.build((self.rows, 2, 2))

    def call(self, x):
        return self.cell(tf.reshape(x, (self.rows, 2, 2)))


class Places(keras.metrics.Metric):
    def __init__(self, rows):
        super().__init__(name="places")
        self.sums = self.add_variable((rows,), initializer="zeros", name="sums")

    def update_state(self, y, p, sample_weight=None):
        self.sums.assign_add(tf.reduce_sum(tf.abs(p - y), 1))

    def result(self):
        return tf.reduce_max(self.sums)


# Steps.


def shuffled_rows_mixed(model, x, y, rows):
    order = tf.random.shuffle(tf.range(rows))
    part = tf.random.uniform((rows, 1), dtype=x.dtype)
    mix = lambda a: part * a + (1 - part) * tf.gather(a, order)  # noqa: E731
    return square(model(mix(x), training=True) - mix(y))


def jacobians_by_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        tape.watch(x)
        p = model(x, training=True)
    return square(p - y) + square(tape.batch_jacobian(p, x))


def clipped_gradients_of_each_row(model, x, y, rows):
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum((model(x, training=True) - y) ** 2, 1)
    jacobians = tape.jacobian(losses, model.trainable_variables)
    norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.reshape(j, (rows, -1)) ** 2, 1) for j in jacobians]))
    return tf.reduce_sum(losses * tf.stop_gradient(tf.minimum(1.0 / norms, tf.ones(rows, x.dtype)))) / rows


def noise_at_a_time(model, x, y, rows):
    time = tf.random.uniform((rows, 1), dtype=x.dtype)
    noise = tf.random.normal((rows, 3), dtype=x.dtype)
    p = model(tf.cos(time) * x + tf.sin(time) * noise, training=True)
    return square(p - noise[:, :2])


NOISES = {
    "noise of a constant shape": lambda x, rows: x + 0.1 * tf.random.normal((rows, 4), dtype=x.dtype),
    "noise without state": lambda x, rows: x + 0.1 * tf.random.stateless_normal((rows, 4), seed=[1, 2], dtype=x.dtype),
}
# By group and kind; the kinds are those of `together`.
IDIOMS = {
    "asking": {
        "loss": {
            "a sum by the rows or one": lambda y, p, rows: tf.reduce_sum(tf.square(p - y)) / (p.shape[0] or 1),
            "another loss for unknown rows": lambda y, p, rows: (
                square(p - y) if p.shape[0] is None else 2.0 * tf.reduce_mean(tf.abs(p - y))
            ),
            "the length of a text": lambda y, p, rows: square(p - y) * len(f"{p.shape}"),
            "a batch shape of Keras": lambda y, p, rows: (
                square(p - y) * (ops.shape(p)[0] if isinstance(ops.shape(p)[0], int) else 0.5)
            ),
            "a branch by the shape": lambda y, p, rows: tf.cond(
                tf.shape(p)[0] > 3, lambda: square(p - y), lambda: 3.0 * tf.reduce_mean(tf.abs(p - y))
            ),
        },
        "layer": {"another path for unknown rows": another_path_for_unknown_rows},
        "metric": {
            "another metric for unknown rows": lambda y, p, rows: tf.abs(p - y) if p.shape[0] is None else tf.square(p - y)
        },
    },
    "constants": {
        "loss": {
            "rows unstacked": lambda y, p, rows: tf.add_n([tf.reduce_sum(row**2) for row in tf.unstack(p - y)]) / rows,
            "weights of NumPy by row": lambda y, p, rows: tf.reduce_mean(
                np.linspace(0.5, 1.5, rows * 2).reshape(rows, 2) * (p - y) ** 2
            ),
            "constant pairs": constant_pairs,
        },
        "metric": {"places": Places},
    },
    "shapes": {
        "loss": {
            "micro-batches of a reshape": micro_batches_of_a_reshape,
            "a shape that is ensured": lambda y, p, rows: square(tf.ensure_shape(p - y, (rows, 2))),
            "two views of each row": two_views_of_each_row,
        },
        "layer": {**NOISES, "deviations in groups": deviations_in_groups},
    },
    "loops": {
        "loss": {
            "a list with a place for each row": a_list_with_a_place_for_each_row,
            "a scan over rows": lambda y, p, rows: square(
                tf.scan(lambda state, e: 0.5 * state + e, p - y, tf.zeros((2,), p.dtype))
            ),
            "a function of NumPy between": a_function_of_numpy_between,
        },
    },
    "state": {
        "zeros": {"assigned by row": assigned_by_row},
        "ones": {"updated in parts": updated_in_parts},
        "random_normal": {"read by row": lambda x, rows, state: x + state},
        "layer": {"stateful recurrence": StatefulRecurrence},
    },
    "steps": {
        "step": {
            "shuffled rows mixed": shuffled_rows_mixed,
            "Jacobians by row": jacobians_by_row,
            "clipped gradients of each row": clipped_gradients_of_each_row,
            "noise at a time": noise_at_a_time,
        }
    },
}


# Models whose other widths are as many as the rows of a batch.


def squares(*shape):
    return lambda batches, rows: (normal(batches * rows, *shape, seed=1), normal(batches * rows, shape[0], seed=2))


def all_widths_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows,))
        for _ in range(2):
            x = layers.BatchNormalization()(layers.Dense(rows, "tanh")(x))
        return keras.Model(inputs, layers.Dropout(0.3)(x))

    def compared(y, p):
        return square(p - y) + square(p @ tf.transpose(p)) + square(tf.transpose(p) @ p) + square(tf.transpose(p) - p)

    return build, trains(rows, loss=compared, make_data=squares(rows))


def sequences_as_long_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows))
        x = x + layers.MultiHeadAttention(2, rows // 2)(x, x)
        x = layers.LSTM(rows, return_sequences=True)(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.GRU(rows)(x))

    return build, trains(rows, make_data=squares(rows, rows))


def images_as_high_as_rows(rows):
    def build():
        x = inputs = keras.Input((rows, rows, rows))
        x = layers.Conv2D(rows, 3, padding="same", activation="tanh")(x)
        x = layers.Permute((2, 3, 1))(layers.BatchNormalization()(x))
        x = layers.Conv2D(rows, rows, activation="tanh")(layers.MaxPooling2D(2, 1, "same")(x))
        return keras.Model(inputs, layers.Flatten()(x))

    return build, trains(rows, make_data=squares(rows, rows, rows))


def classes_as_rows(rows):
    def make_data(batches, of_batch):
        return normal(batches * of_batch, 3, seed=1), np.random.default_rng(2).integers(0, rows, batches * of_batch)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return lambda: keras.Sequential([layers.Dense(rows)]), trains(rows, ["accuracy"], loss, make_data)


def a_batch_shape_of_the_input(rows):
    return lambda: keras.Sequential([keras.Input(batch_shape=(rows, 3)), layers.Dense(4), layers.Dense(2)]), trains(rows)


# By name, a function of the number of rows that returns (build, script), and the numbers of rows and towers. Towers have
# several rows each, one, and none.
PROGRAMS = {
    f"{group}, batches of {rows}": (functools.partial(together, idioms), rows, towers)
    for group, idioms in IDIOMS.items()
    for rows, towers in ((8, 3), (1, 4) if group == "state" else (2, 4))
} | {
    "a batch shape of the input": (a_batch_shape_of_the_input, 6, 4),
    "all widths as rows": (all_widths_as_rows, 8, 2),
    "sequences as long as rows": (sequences_as_long_as_rows, 2, 3),
    "images as high as rows": (images_as_high_as_rows, 6, 4),
    "classes as rows": (classes_as_rows, 2, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_idiom_trains_as_on_one_device(name):
    make, rows, towers = PROGRAMS[name]
    # Metrics belong to one model.
    assert_same_run(*make(rows), towers, plain_run(*make(rows)))


# Nothing is lost where the number of rows is known: what towers share of these models when it is unknown, they share then.


def transformer():
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(8)(layers.GlobalAveragePooling1D()(x)))


TOKENS = np.random.default_rng(0).integers(0, 20, (8, 8)), np.arange(8)
# A diffusion model's noise is cut into slices, as the batch is.
NOISE_AT_A_TIME = {"step": {"noise at a time": noise_at_a_time}}
SHARED = {
    "convolutions": (images_as_high_as_rows(8)[0], "mse", squares(8, 8, 8)(1, 8)),
    "dense layers": (all_widths_as_rows(8)[0], "mse", squares(8)(1, 8)),
    "attention": (transformer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), TOKENS),
    "layers with noise": (together({"layer": NOISES}, 8)[0], "mse", data(1, 8)),
    "a step with noise": (together(NOISE_AT_A_TIME, 8)[0], "mse", data(1, 8)),
}


@pytest.mark.parametrize("name", SHARED)
def test_towers_share_the_work_of_known_rows(name):
    """Nothing that has rows is computed once, and only predictions are gathered, whatever widths are as many as the rows."""
    build, loss, batch = SHARED[name]
    parallel = keras_dp.DataParallelModel(build(), devices=3, slices_per_device=1)
    parallel.compile("adam", loss, metrics=["accuracy"])
    for step in ("train", "predict"):
        explanation = parallel.explain(batch, step)
        assert explanation.once == []
        assert sum(meeting.kind == "gather" for meeting in explanation.meetings) == (step == "predict")
