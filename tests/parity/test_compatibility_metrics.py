"""Every metric of Keras, and custom metrics, have the same values as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_training, assert_towers_match_one_device
from keras import layers, metrics, ops

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))
LABELS = rng.integers(0, 2, (23, 3)).astype("float64")
WEIGHTS = rng.uniform(size=23)


def build():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3, "sigmoid")])


def compiled(**arguments):
    """Returns a function that makes arguments of `compile`, and calls those that are functions for each model."""
    return lambda: {"optimizer": "sgd", "loss": "mse", **{k: v() if callable(v) else v for k, v in arguments.items()}}


def test_metrics_by_name():
    assert_same_training(build, compiled(metrics=["acc", "AUC"]), [((X, LABELS), 9)], 3, epochs=1)


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
    arguments = compiled(loss="sparse_categorical_crossentropy", metrics=lambda: ["accuracy", Gathering()])
    assert_towers_match_one_device(tagger, arguments, [((tokens, rng.integers(0, 4, (23, 6))), 9)], 3)


@pytest.mark.parametrize(
    ("name", "activation"), [("CategoricalCrossentropy", "softmax"), ("BinaryCrossentropy", tf.nn.sigmoid)]
)
def test_outputs_keep_the_logits_behind_them(name, activation):
    """Keras computes crossentropies from the logits behind an activation; saturated outputs no longer contain them."""

    class Own(getattr(metrics, name)):
        pass

    def build():
        return keras.Sequential([keras.Input((5,)), layers.Dense(3, kernel_initializer="ones"), layers.Activation(activation)])

    def loss(y_true, y_pred):
        return getattr(keras.losses, "categorical_crossentropy" if name[0] == "C" else "binary_crossentropy")(y_true, y_pred)

    y = np.eye(3)[rng.integers(0, 3, 23)]
    arguments = compiled(loss=lambda: loss, metrics=lambda: [Own(name="own")])
    assert_same_training(build, arguments, [((100 * X, y), 9)], 3, epochs=1)


def two_headed():
    inputs = keras.Input((5,))
    return keras.Model(inputs, {"a": layers.Dense(3, "sigmoid", name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)})


def test_metrics_of_each_output():
    """Metrics may be a dict, weighted or not; the logs also have the loss of each output."""
    arguments = compiled(
        loss={"a": "binary_crossentropy", "b": "mse"},
        metrics=lambda: {"a": ["accuracy", metrics.AUC(name="auc")], "b": "mae"},
        weighted_metrics=lambda: {"a": [metrics.Precision(name="precision")], "b": [Largest()]},
    )
    data = (X, {"a": LABELS, "b": X[:, :1]}, {"a": WEIGHTS, "b": 1 - WEIGHTS})
    assert_same_training(two_headed, arguments, [(data, 9)], 3)


class Largest(metrics.Metric):
    """Keeps the largest error, a state that does not add up."""

    def __init__(self, name="largest_error"):
        super().__init__(name=name)
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self):
        return self.largest


def spread_of_batch(y_true, y_pred):
    return ops.std(y_pred)


def test_metrics_of_ones_own():
    arguments = compiled(metrics=lambda: [Largest(), spread_of_batch, "mae"])
    assert_towers_match_one_device(build, arguments, [((X, LABELS), 9)], 3)


class OneLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


VALUES = {
    "one for each row": [lambda y: ops.mean(y, axis=-1)],
    "one for the batch": [ops.mean],
    "one for each column": [lambda y: ops.mean(y, axis=0)],
    "all of them": [ops.mean, lambda y: ops.mean(y, axis=-1), lambda y: ops.mean(y, axis=0)],
}


class WithMetricsInside(OneLayer):
    def __init__(self):
        super().__init__()
        kinds = [(kind, name) for kind in (metrics.Mean, metrics.Sum) for name in VALUES]
        self.inside = [kind(name=f"{kind.__name__}, {name}") for kind, name in kinds]

    def call(self, x):
        y = self.dense(x)
        for metric, values in zip(self.inside, [*VALUES.values()] * 2, strict=True):
            for value in values:
                metric.update_state(value(y))
        return y


def test_metrics_inside_a_model():
    """A mean over the rows counts as one value of the batch, not as one value for each tower."""
    assert_same_training(WithMetricsInside, compiled(), [((X, LABELS), 9)], 3)


class WithMetricsInLoss(OneLayer):
    """Tracks parts of its loss, one of them with a metric that does not add up over parts of a batch."""

    def __init__(self):
        super().__init__()
        self.tracker = metrics.Mean(name="tracker")
        self.largest = Largest()

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        self.tracker.update_state(loss)
        self.largest.update_state(y, y_pred)
        return loss


def test_metrics_in_an_overridden_compute_loss():
    assert_same_training(WithMetricsInLoss, compiled(), [((X, LABELS), 9)], 3)


def test_overridden_compute_metrics():
    class OwnMetrics(OneLayer):
        def __init__(self):
            super().__init__()
            self.largest_input = Largest()

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            self.largest_input.update_state(ops.zeros_like(x), x)
            return {**results, "own": self.largest_input.result() * 2}

    assert_same_training(OwnMetrics, compiled(metrics=["mae"]), [((X, LABELS), 9)], 3)


def test_metrics_inside_a_model_that_do_not_add_up():
    class Inside(OneLayer):
        def __init__(self):
            super().__init__()
            self.inside = Largest()

        def call(self, x):
            y = self.dense(x)
            self.inside.update_state(ops.zeros_like(y), y)
            return y

    assert_same_training(Inside, compiled(), [((X, LABELS), 9)], 3)
