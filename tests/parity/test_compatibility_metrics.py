"""Every metric of Keras, and custom metrics, have the same values as on one device."""

import keras
import numpy as np
import tensorflow as tf
from comparison import assert_same_training, assert_towers_match_one_device
from keras import layers, metrics, ops

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))
LABELS = rng.integers(0, 2, (23, 3)).astype("float64")
WEIGHTS = rng.uniform(size=23)


def build(kind=keras.Sequential):
    return kind([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3, "sigmoid")])


def assert_exact(build, x, y, *weights, compared=assert_same_training, **compiled):
    """Trains on batches of 9, 9 and 5 rows. Further arguments are functions that make arguments of `compile`."""

    def arguments():
        return {"optimizer": "sgd", "loss": "mse", **{name: make() for name, make in compiled.items()}}

    compared(build, arguments, [((x, y, *weights), 9)], 3)


class Largest(metrics.Metric):
    """Keeps the largest error, a state that does not add up."""

    def __init__(self, name="largest_error"):
        super().__init__(name=name)
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self):
        return self.largest


def test_metrics_of_masked_outputs():
    """Gathered predictions keep their mask: without it, accuracy would count the padding."""

    def tagger():
        embedding = layers.Embedding(9, 4, mask_zero=True)
        return keras.Sequential([keras.Input((6,), dtype="int32"), embedding, layers.Dense(4, "softmax")])

    class Gathering(Largest):
        """Asks for all rows, and does nothing with them."""

        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

    tokens = np.where(np.arange(6) < rng.integers(1, 7, 23)[:, None], rng.integers(1, 9, (23, 6)), 0)
    compiled = {"loss": lambda: "sparse_categorical_crossentropy", "metrics": lambda: ["accuracy", Gathering()]}
    assert_exact(tagger, tokens, rng.integers(0, 4, (23, 6)), compared=assert_towers_match_one_device, **compiled)


def test_outputs_keep_the_logits_behind_them():
    """Keras computes crossentropies from the logits behind an activation; saturated outputs no longer contain them."""

    def build():
        inputs = keras.Input((5,))
        logits = layers.Dense(3, kernel_initializer="ones")(inputs)
        return keras.Model(inputs, [layers.Activation("softmax")(logits), layers.Activation(tf.nn.sigmoid)(logits)])

    def loss():
        functions = keras.losses.categorical_crossentropy, keras.losses.binary_crossentropy
        return [lambda *answers, function=function: function(*answers) for function in functions]

    def own_metrics():
        return [[type("Own", (kind,), {})()] for kind in (metrics.CategoricalCrossentropy, metrics.BinaryCrossentropy)]

    y = np.eye(3)[rng.integers(0, 3, 23)]
    assert_exact(build, 100 * X, [y, y], loss=loss, metrics=own_metrics)


def test_metrics_of_each_output():
    """Metrics may be a dict, weighted or not; the logs also have the loss of each output."""

    def build():
        inputs = keras.Input((5,))
        outputs = {name: layers.Dense(units, "sigmoid", name=name)(inputs) for name, units in (("a", 3), ("b", 1))}
        return keras.Model(inputs, outputs)

    compiled = {
        "loss": lambda: {"a": "binary_crossentropy", "b": "mse"},
        "metrics": lambda: {"a": ["accuracy", metrics.AUC(name="auc")], "b": ["mae", "AUC"]},
        "weighted_metrics": lambda: {"a": [metrics.Precision(name="precision")], "b": [Largest()]},
    }
    assert_exact(build, X, {"a": LABELS, "b": LABELS[:, :1]}, {"a": WEIGHTS, "b": 1 - WEIGHTS}, **compiled)


VALUES = {
    "one for each row": [lambda y: ops.mean(y, axis=-1)],
    "one for the batch": [ops.mean],
    "one for each column": [lambda y: ops.mean(y, axis=0)],
    "all of them": [ops.mean, lambda y: ops.mean(y, axis=-1), lambda y: ops.mean(y, axis=0)],
}


class WithMetricsInside(keras.Sequential):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.inside = [kind(name=f"{kind.__name__}, {name}") for kind in (metrics.Mean, metrics.Sum) for name in VALUES]

    def call(self, x):
        y = super().call(x)
        for metric, values in zip(self.inside, [*VALUES.values()] * 2, strict=True):
            for value in values:
                metric.update_state(value(y))
        return y


def test_metrics_inside_a_model():
    """A mean over the rows counts as one value of the batch, not as one value for each tower."""
    assert_exact(lambda: build(WithMetricsInside), X, LABELS)


class WithMethods(keras.Sequential):
    """Updates metrics, most of which do not add up over parts of a batch, in each method that it has in place of Keras's."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tracker = metrics.Mean(name="tracker")
        self.of_outputs, self.of_errors, self.of_inputs = (Largest(name) for name in ("outputs", "errors", "inputs"))

    def call(self, x):
        y = super().call(x)
        self.of_outputs.update_state(0.0, y)
        return y

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        self.tracker.update_state(loss)
        self.of_errors.update_state(y, y_pred)
        return loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.of_inputs.update_state(0.0, x)
        return {**results, "own": self.of_inputs.result() * 2}


def test_metrics_of_ones_own():
    """Those that the model is compiled with, and those of its methods."""

    def spread_of_batch(y_true, y_pred):
        return ops.std(y_pred)

    compared = {"compared": assert_towers_match_one_device, "metrics": lambda: [Largest(), spread_of_batch, "mae"]}
    assert_exact(lambda: build(WithMethods), X, LABELS, **compared)
