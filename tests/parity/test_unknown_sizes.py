"""Programs whose tensors have sizes or axes that are not known while they are traced train as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script
from keras import layers, ops

rng = np.random.default_rng(0)

TOWERS = 3


def batches_of(shape, *rows):
    """Returns a dataset of batches of some numbers of rows, with all sizes of `shape` unknown except for the last."""
    x = rng.normal(size=(sum(rows), *shape))
    ends = np.cumsum(rows)
    parts = [x[end - count : end] for end, count in zip(ends, rows, strict=True)]
    specs = tf.TensorSpec([*[None] * len(shape), shape[-1]], x.dtype), tf.TensorSpec([None], x.dtype)
    dataset = tf.data.Dataset.from_generator(lambda: ((part, np.zeros(len(part))) for part in parts), output_signature=specs)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(rows)))


class Pyramid(keras.Model):
    """Predicts for each pixel of some levels of an image, and measures all of them together."""

    def __init__(self, loss, levels=2):
        super().__init__()
        inputs = x = keras.Input((None, None, 1))
        outputs = []
        for level in range(levels):
            x = layers.Conv2D(3, 3, 1 + (level > 0), padding="same")(x)
            outputs.append(x)
        self.net, self.measure = keras.Model(inputs, outputs), loss

    def call(self, x):
        return self.net(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.measure(y_pred)


def joined(levels):
    return ops.concatenate([ops.reshape(level, (-1, 3)) for level in levels], axis=0)


def mean_of_all(levels):
    return tf.reduce_mean(joined(levels) ** 2)


def within_each_row(levels):
    flat = [ops.reshape(level, (ops.shape(level)[0], -1, 3)) for level in levels]
    return ops.mean(ops.softmax(ops.concatenate(flat, axis=1), axis=1) ** 2)


def hardest(levels):
    return tf.reduce_mean(tf.sort(tf.reduce_sum(joined(levels) ** 2, -1), direction="DESCENDING")[:7])


def with_means_of_rows(levels):
    means = [tf.reduce_mean(level, [1, 2]) for level in levels]
    return tf.reduce_mean(tf.concat([means[0], joined(levels), means[1]], 0) ** 2)


LOSSES = [(mean_of_all, 3), (within_each_row, 2), (hardest, 3), (with_means_of_rows, 2)]


def trained_on_images(**compiled):
    batches = batches_of((4, 6, 1), 8, 8, 5, 2, 1)

    def script(model):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compiled)
        return model.fit(batches, shuffle=False, verbose=0).history

    return script


@pytest.mark.parametrize(("loss", "levels"), LOSSES)
def test_levels_of_a_pyramid(loss, levels):
    """Each tower convolves its own images, whatever the loss needs of all."""
    _, parallel = assert_same_script(lambda: Pyramid(loss, levels), trained_on_images(), TOWERS)
    explanation = parallel.explain((rng.normal(size=(8, 4, 6, 1)), np.zeros(8)))
    assert {once.type for once in explanation.once} == ({"TopKV2"} if loss is hardest else set())


def test_levels_compiled_by_xla():
    assert_same_script(lambda: Pyramid(hardest), trained_on_images(jit_compile=True), TOWERS)


class Words(keras.Model):
    """Encodes words and sentences with one layer, in one call."""

    def __init__(self):
        super().__init__()
        self.encode, self.last = layers.Dense(3, "tanh"), layers.Dense(1)
        self.encode.build((None, 2)), self.last.build((None, 3))

    def call(self, x):
        words, sentences = tf.reshape(x, [-1, 2]), tf.reduce_mean(x, 1)
        encoded = self.encode(tf.concat([words, sentences], 0))
        ends = tf.split(encoded, [tf.shape(words)[0], tf.shape(sentences)[0]])
        return self.last(ends[1] + tf.reduce_max(tf.reshape(ends[0], [tf.shape(x)[0], -1, 3]), 1))


def test_words_beside_sentences():
    batches = batches_of((5, 2), 8, 3, 1)

    def script(model):
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model.fit(batches, shuffle=False, verbose=0).history

    _, parallel = assert_same_script(Words, script, TOWERS)
    assert parallel.explain((rng.normal(size=(8, 5, 2)), np.zeros(8))).once == []


# Tensors with an unknown number of axes.


class Counts(layers.Layer):
    """Counts in a table how often a key was seen."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def call(self, x):
        keys = tf.cast(tf.round(x[:, 0]), tf.int64)
        self.table.insert(keys, self.table.lookup(keys) + 1)
        return tf.stack([x[:, 1], tf.cast(self.table.lookup(keys), x.dtype) / 100], 1)


def doubled(x):
    return tf.numpy_function(lambda array: array * 2, [x], tf.float64)


def stacked_with_numpy(y, p):
    return tf.reduce_mean(tf.stack([p, doubled(p)], 1))


def function_of_python(y, p):
    return tf.reduce_mean(tf.concat([p, tf.py_function(lambda a: tf.tanh(a) * 2, [p], tf.float64)], 0) ** 2)


def dense(*between):
    return keras.Sequential([keras.Input((3,)), *between, layers.Dense(4, "tanh"), layers.Dense(2)])


def trained_on_features(loss, **compiled):
    data = rng.normal(size=(21, 3)), rng.normal(size=(21, 2))

    def script(model):
        model.compile(keras.optimizers.SGD(0.05), loss, **compiled)
        return [model.fit(*data, batch_size=size, shuffle=False, verbose=0).history for size in (8, 2)]

    return script


@pytest.mark.parametrize("loss", [stacked_with_numpy, function_of_python])
def test_functions_of_python_in_a_loss(loss):
    _, parallel = assert_same_script(dense, trained_on_features(loss), TOWERS)
    explanation = parallel.explain((rng.normal(size=(8, 3)), rng.normal(size=(8, 2))))
    assert not {once.type for once in explanation.once} & {"TanhGrad", "BiasAddGrad"}
    assert all(once.reason and "test_unknown_sizes.py, line" in once.line for once in explanation.once)


def test_counts_in_a_table():
    _, parallel = assert_same_script(lambda: dense(Counts()), trained_on_features("mse"), TOWERS)
    once = {once.type: once for once in parallel.explain((rng.normal(size=(8, 3)), rng.normal(size=(8, 2)))).once}
    assert once["Pack"].reason == "it takes a tensor with an unknown number of axes, which cannot be cut"
    assert "test_unknown_sizes.py, line" in once["Pack"].line


def test_a_function_of_python_within_a_model():
    def within(x):
        known = ops.reshape(tf.py_function(lambda a: tf.tanh(a) * 2, [x], x.dtype), ops.shape(x))
        known.set_shape([None, 3])
        return known

    def build():
        return dense(layers.Dense(3), layers.Lambda(within, output_shape=(3,)))

    assert_same_script(build, trained_on_features("mse"), TOWERS)
