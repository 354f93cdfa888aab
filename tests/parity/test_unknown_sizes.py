"""Programs whose tensors have sizes or axes that are not known while they are traced train as on one device.

tests/unit/partition/building/test_meetings.py has more of them, without a model.
"""

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


def hardest(levels):
    return tf.reduce_mean(tf.sort(tf.reduce_sum(joined(levels) ** 2, -1), direction="DESCENDING")[:7])


def with_means_of_rows(levels):
    means = [tf.reduce_mean(level, [1, 2]) for level in levels]
    return tf.reduce_mean(tf.concat([means[0], joined(levels), means[1]], 0) ** 2)


LOSSES = [(hardest, 3, False), (hardest, 2, True), (with_means_of_rows, 2, False)]


def fits(data, loss=None, sizes=(None,), **compiled):
    """Returns a script that fits a dataset, or arrays in batches of some sizes."""

    def script(model):
        model.compile(keras.optimizers.SGD(0.05), loss, **compiled)
        return [model.fit(*data, batch_size=size, shuffle=False, verbose=0).history for size in sizes]

    return script


@pytest.mark.parametrize(("loss", "levels", "jit_compile"), LOSSES)
def test_levels_of_a_pyramid(loss, levels, jit_compile):
    """Each tower convolves its own images, whatever the loss needs of all."""
    script = fits([batches_of((4, 6, 1), 8, 8, 5, 2, 1)], jit_compile=jit_compile)
    _, parallel = assert_same_script(lambda: Pyramid(loss, levels), script, TOWERS)
    explanation = parallel.explain((rng.normal(size=(8, 4, 6, 1)), np.zeros(8)))
    assert {once.type for once in explanation.once} == ({"TopKV2"} if loss is hardest else set())


def function_of_python(y, p):
    return tf.reduce_mean(tf.concat([p, tf.py_function(lambda a: tf.tanh(a) * 2, [p], tf.float64)], 0) ** 2)


def test_a_function_of_python_in_a_loss():
    """Its result has an unknown number of axes."""
    data = rng.normal(size=(21, 3)), rng.normal(size=(21, 2))

    def build():
        return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])

    _, parallel = assert_same_script(build, fits(data, function_of_python, (8, 2)), TOWERS)
    once = parallel.explain((data[0][:8], data[1][:8])).once
    assert not {known.type for known in once} & {"TanhGrad", "BiasAddGrad"}
    assert all(known.reason and "test_unknown_sizes.py, line" in known.line for known in once)
