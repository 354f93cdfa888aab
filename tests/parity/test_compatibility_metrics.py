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


@pytest.mark.parametrize("metric", ["acc", "AUC"])
def test_metrics_by_name(metric):
    assert_same_training(build, compiled(metrics=[metric]), [((X, LABELS), 9)], 3, epochs=1)


def test_metrics_of_masked_outputs():
    """Gathered predictions keep their mask: without it, accuracy would count the padding."""

    def tagger():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 4, mask_zero=True),
                layers.LSTM(5, return_sequences=True),
                layers.Dense(4, "softmax"),
            ]
        )

    tokens = np.where(np.arange(6) < rng.integers(1, 7, 23)[:, None], rng.integers(1, 9, (23, 6)), 0)
    data = (tokens, rng.integers(0, 4, (23, 6)))
    for own in ([], [LargestError()]):
        arguments = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy", *own]}
        if own:
            own[0].update_state = lambda *args, **kwargs: None
        assert_towers_match_one_device(tagger, lambda arguments=arguments: arguments, [(data, 9)], 3)


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
    assert_towers_match_one_device(build, arguments, [((100 * X, y), 9)], 3)


def two_headed():
    inputs = keras.Input((5,))
    return keras.Model(inputs, {"a": layers.Dense(3, "sigmoid", name="a")(inputs), "b": layers.Dense(1, name="b")(inputs)})


def test_metrics_of_each_output():
    """Metrics may be a dict, weighted or not; the logs also have the loss of each output."""
    arguments = compiled(
        loss={"a": "binary_crossentropy", "b": "mse"},
        metrics=lambda: {"a": ["accuracy", metrics.AUC(name="auc")], "b": "mae"},
        weighted_metrics=lambda: {"a": [metrics.Precision(name="precision")], "b": [LargestError()]},
    )
    data = (X, {"a": LABELS, "b": X[:, :1]}, {"a": WEIGHTS, "b": 1 - WEIGHTS})
    assert_towers_match_one_device(two_headed, arguments, [(data, 9)], 3)


class LargestError(metrics.Metric):
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
    arguments = compiled(metrics=lambda: [LargestError(), spread_of_batch, "mae"])
    assert_towers_match_one_device(build, arguments, [((X, LABELS), 9)], 3)


class WithMetricsInside(keras.Model):
    def __init__(self, metric, *values):
        super().__init__()
        self.dense = layers.Dense(3)
        self.inside = metric
        self.values = values

    def call(self, x):
        y = self.dense(x)
        for value in self.values:
            self.inside.update_state(value(y))
        return y


VALUES = {
    "one for each row": [lambda y: ops.mean(y, axis=-1)],
    "one for the batch": [ops.mean],
    "one for each column": [lambda y: ops.mean(y, axis=0)],
    "all of them": [ops.mean, lambda y: ops.mean(y, axis=-1), lambda y: ops.mean(y, axis=0)],
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("metric", [metrics.Mean, metrics.Sum])
def test_metrics_inside_a_model(metric, values):
    """A mean over the rows counts as one value of the batch, not as one value for each tower."""
    assert_same_training(lambda: WithMetricsInside(metric(name="inside"), *VALUES[values]), compiled(), [((X, LABELS), 9)], 3)


class WithMetricsInLoss(keras.Model):
    """Tracks parts of its loss, one of them with a metric that does not add up over parts of a batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.tracker = metrics.Mean(name="tracker")
        self.largest = LargestError()

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y - y_pred) ** 2)
        self.tracker.update_state(loss)
        self.largest.update_state(y, y_pred)
        return loss


def test_metrics_in_an_overridden_compute_loss():
    assert_towers_match_one_device(WithMetricsInLoss, compiled(), [((X, LABELS), 9)], 3)


def test_overridden_compute_metrics():
    class OwnMetrics(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.largest_input = LargestError()

        def call(self, x):
            return self.dense(x)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            self.largest_input.update_state(ops.zeros_like(x), x)
            return {**results, "own": self.largest_input.result() * 2}

    arguments = compiled(metrics=["mae"])
    assert_towers_match_one_device(OwnMetrics, arguments, [((X, LABELS), 9)], 3)


def test_metrics_inside_a_model_that_do_not_add_up():
    class Inside(WithMetricsInside):
        def call(self, x):
            y = self.dense(x)
            self.inside.update_state(ops.zeros_like(y), y)
            return y

    assert_same_training(lambda: Inside(LargestError()), compiled(), [((X, LABELS), 9)], 3)
