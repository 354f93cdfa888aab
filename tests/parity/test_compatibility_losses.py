"""Every loss of Keras, and custom losses, give one device's loss and weights."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training, assert_towers_match_one_device
from keras import layers, losses, ops

import keras_dp

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))
Y = rng.normal(size=(23, 3))
WEIGHTS = rng.uniform(size=23)
TOKENS = np.where(np.arange(6) < rng.integers(1, 7, 23)[:, None], rng.integers(1, 9, (23, 6)), 0)


def dense(kind=keras.Sequential):
    return kind([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])


def with_heads(**units):
    """Returns a function that builds a model with an output of each name, of so many units."""

    def build():
        inputs = keras.Input((5,))
        hidden = layers.Dense(6, "tanh")(inputs)
        return keras.Model(inputs, {name: layers.Dense(number, name=name)(hidden) for name, number in units.items()})

    return build


two_headed = with_heads(a=3, b=1)


def tagger(names=("out",)):
    """Builds a model with outputs for each token, and a mask of the padding."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, {name: layers.Dense(4, name=name)(hidden) for name in names})


def targets():
    return {"a": Y, "b": rng.normal(size=(23, 1))}


def assert_exact(build, loss, x, *targets_and_weights, compared=assert_same_training, **arguments):
    """Trains with a loss and further arguments of `compile`, on batches of 9, 9 and 5 rows."""
    compared(build, lambda: {"optimizer": "sgd", "loss": loss, **arguments}, [((x, *targets_and_weights), 9)], 3)


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]


@pytest.mark.parametrize("weighted", [True, False])
def test_reductions(weighted):
    """Each of several outputs has the loss of one reduction. A loss that is not reduced stands alone."""
    of_each = {name: losses.MeanSquaredError(reduction=name) for name in REDUCTIONS}
    weights = [dict.fromkeys(REDUCTIONS, WEIGHTS)] if weighted else []
    assert_exact(with_heads(**dict.fromkeys(REDUCTIONS, 3)), of_each, X, dict.fromkeys(REDUCTIONS, Y), *weights)
    assert_exact(dense, losses.MeanSquaredError(reduction="none"), X, Y, *([WEIGHTS] if weighted else []))


def test_masked_losses():
    """tf.distribute averages the replicas' masked means, and silently trains other weights."""
    of_each = {name: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=name) for name in REDUCTIONS}
    metrics = {"metrics": {"sum": ["accuracy"]}, "weighted_metrics": {"sum": ["accuracy"]}}
    labels, weights = (dict.fromkeys(REDUCTIONS, values) for values in (rng.integers(0, 4, (23, 6)), rng.uniform(size=(23, 6))))
    assert_exact(lambda: tagger(REDUCTIONS), of_each, TOKENS, labels, weights, **metrics)


def test_masks_that_leave_a_tower_or_a_batch_nothing():
    tokens = TOKENS.copy()
    tokens[:4] = 0  # Covers the first tower's slice.
    tokens[9:18] = 0  # Covers the second batch.
    assert_exact(tagger, losses.SparseCategoricalCrossentropy(from_logits=True), tokens, {"out": rng.integers(0, 4, (23, 6))})


def test_weights_that_are_zero_for_a_tower():
    assert_exact(dense, losses.MeanSquaredError(reduction="mean_with_sample_weight"), X, Y, np.r_[np.zeros(3), WEIGHTS[3:]])


def test_ignored_classes():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    assert_exact(dense, loss, X, rng.integers(-1, 3, 23))


def test_label_smoothing():
    one_hot = np.eye(3)[rng.integers(0, 3, 23)]
    assert_exact(dense, losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), X, one_hot)


def test_outputs_without_an_axis_of_their_own():
    """Keras's functions average over the last axis, which is the rows here. The result is a scalar."""

    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))

    assert_exact(build, "mse", X, Y[:, 0], metrics=["mae"])


def test_binary_labels_are_decided_by_the_whole_batch():
    """A hinge maps labels 0 and 1 to -1 and 1, unless the batch has a label -1 anywhere: here in the last tower's rows."""
    labels = np.r_[np.zeros((4, 3)), np.ones((4, 3)), -np.ones((15, 3))]
    assert_exact(dense, "hinge", X, labels, metrics=["squared_hinge"])


def contrastive(y_true, y_pred):
    """Compares each row with all rows of the batch: the loss has a value for each row, but couples the rows."""
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return losses.sparse_categorical_crossentropy(ops.arange(ops.shape(y_pred)[0]), similarities, from_logits=True)


class PerRow(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) ** 3, axis=-1)


def test_losses_of_ones_own_with_a_value_for_each_row():
    loss = {"a": PerRow(), "b": lambda a, b: (a - b) ** 2}
    assert_exact(two_headed, loss, X, targets(), {"a": WEIGHTS, "b": WEIGHTS})


def test_losses_that_couple_rows():
    """tf.distribute averages the replicas' losses."""
    compared = {"compared": assert_towers_match_one_device, "weighted_metrics": {"a": ["mae"], "b": ["mae"]}}
    assert_exact(two_headed, {"a": contrastive, "b": rmse}, X, targets(), **compared)


def test_losses_of_ones_own_for_several_rows_an_input():
    """Outputs with T rows for each row of the input keep their order."""

    def build():
        inputs = keras.Input((4, 5))
        return keras.Model(inputs, layers.Lambda(lambda x: ops.reshape(x, (-1, 3)))(layers.Dense(3)(inputs)))

    def loss(y_true, y_pred):
        places = ops.cast(ops.arange(ops.shape(y_pred)[0]), y_pred.dtype)
        return ops.mean((ops.reshape(y_true, (-1, 3)) - y_pred) ** 2 * ops.expand_dims(places, 1))

    assert_exact(build, loss, rng.normal(size=(23, 4, 5)), rng.normal(size=(23, 4, 3)))


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_several_outputs():
    """Each has weights of its own, for its loss and for its rows; one has no loss."""
    of_each = {
        "loss_weights": {"a": 0.3, "b": 2.0, "c": 1.0},
        "metrics": {"b": ["mse"]},
        "weighted_metrics": {"a": ["mae"], "b": ["mae"]},
        "compared": assert_towers_match_one_device,
    }
    weights = {"a": WEIGHTS, "b": WEIGHTS**2, "c": WEIGHTS}
    assert_exact(with_heads(a=3, b=1, c=3), {"a": "mse", "b": "mae", "c": None}, X, targets() | {"c": Y}, weights, **of_each)


def test_a_list_of_losses():
    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])

    arguments = {"loss_weights": [0.3, 2.0], "metrics": [["mae"], None]}
    assert_exact(build, ["mse", losses.Huber(0.1)], X, [Y, Y[:, :2]], **arguments)


def test_weight_regularizers():
    """They count once, not once for each tower."""

    def build():
        def own(weight):
            return 0.01 * ops.sum(ops.abs(weight) ** 3)

        regularized = layers.Dense(3, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1), bias_regularizer=own)
        return keras.Sequential([keras.Input((5,)), regularized])

    assert_exact(build, "mse", X, Y, WEIGHTS)


def test_activity_regularizers():
    """Keras divides the penalties by the number of rows of the batch."""

    def build():
        regularized = layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((5,)), layers.ActivityRegularization(l1=0.05, l2=0.02), regularized])

    assert_exact(build, "mse", X, Y)


class Adding(layers.Layer):
    """Adds losses that are functions of the outputs."""

    def __init__(self, *penalties):
        super().__init__()
        self.penalties = penalties

    def call(self, x):
        for penalty in self.penalties:
            self.add_loss(penalty(x))
        return x


def adding(*penalties):
    return lambda: keras.Sequential([keras.Input((5,)), layers.Dense(3), Adding(*penalties)])


def test_added_losses():
    """Scalars, and values for each column or row, are added as in Keras."""
    each_column, each_row = (lambda y, axis=axis: 0.1 * ops.mean(y**2, axis=axis) for axis in (0, -1))
    assert_exact(adding(lambda y: 0.1 * ops.mean(y**2), each_column, each_row), "mse", X, Y)


def test_sums_over_the_rows_as_added_losses():
    """There is no other loss here."""
    assert_exact(adding(lambda y: 0.1 * ops.sum(y**2)), None, X)


class OwnComputeLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) / ops.max(ops.abs(x))  # The maximum over the whole batch.


def test_overridden_compute_loss():
    assert_exact(lambda: dense(OwnComputeLoss), None, X, Y)


class OldComputeLoss(keras.Sequential):
    """Overrides compute_loss as before Keras 3.3, without `training`."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) * 2


def test_overridden_compute_loss_without_training():
    assert_exact(lambda: dense(OldComputeLoss), "mse", X, Y)


def test_no_loss_at_all():
    """Keras's own error is raised."""
    parallel = keras_dp.DataParallelModel(dense(), devices=2)
    parallel.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        parallel.fit(X, Y, verbose=0)
