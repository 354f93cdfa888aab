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


def assert_exact(build, loss, x, *targets_and_weights, compared=assert_same_training, **arguments):
    """Trains with a loss and further arguments of `compile`, on batches of 9, 9 and 5 rows."""
    compared(build, lambda: {"optimizer": "sgd", "loss": loss, **arguments}, [((x, *targets_and_weights), 9)], 3)


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]


@pytest.mark.parametrize("weighted", [True, False])
def test_reductions(weighted):
    """Each of several outputs has the loss of one reduction. A loss that is not reduced stands alone.

    The weights of the first tower's rows are zero.
    """
    of_each = {name: losses.MeanSquaredError(reduction=name) for name in REDUCTIONS}
    weights = [np.r_[np.zeros(3), WEIGHTS[3:]]] if weighted else []
    of_outputs = [dict.fromkeys(REDUCTIONS, values) for values in (Y, *weights)]
    assert_exact(with_heads(**dict.fromkeys(REDUCTIONS, 3)), of_each, X, *of_outputs)
    assert_exact(dense, losses.MeanSquaredError(reduction="none"), X, Y, *weights)


def test_masked_losses():
    """Masks leave a tower or a batch nothing. tf.distribute averages masked means, and silently trains other weights."""

    def tagger():
        inputs = keras.Input((6,), dtype="int32")
        hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
        return keras.Model(inputs, {name: layers.Dense(4, name=name)(hidden) for name in REDUCTIONS})

    tokens = TOKENS.copy()
    tokens[:3] = 0  # Covers the first tower's slice.
    tokens[9:18] = 0  # Covers the second batch.
    of_each = {name: losses.SparseCategoricalCrossentropy(from_logits=True, reduction=name) for name in REDUCTIONS}
    metrics = {"metrics": {"sum": ["accuracy"]}, "weighted_metrics": {"sum": ["accuracy"]}}
    labels, weights = (dict.fromkeys(REDUCTIONS, values) for values in (rng.integers(0, 4, (23, 6)), rng.uniform(size=(23, 6))))
    assert_exact(tagger, of_each, tokens, labels, weights, **metrics)


def test_options_of_losses_in_a_list():
    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)])

    ignoring = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    smoothing = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    labels = rng.integers(-1, 3, 23)
    arguments = {"loss_weights": [0.3, 2.0], "metrics": [None, ["accuracy"]], "weighted_metrics": [["accuracy"], None]}
    assert_exact(build, [ignoring, smoothing], X, [labels, np.eye(3)[labels]], [WEIGHTS, WEIGHTS**2], **arguments)


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


def test_losses_of_ones_own():
    """They have a value for each row, or couple the rows: tf.distribute averages the replicas' losses."""
    loss = {"cubes": PerRow(), "squares": lambda a, b: (a - b) ** 2, "contrastive": contrastive, "rmse": rmse}
    weights = {"cubes": WEIGHTS, "squares": WEIGHTS, "contrastive": None, "rmse": None}
    compared = {"compared": assert_towers_match_one_device, "weighted_metrics": {"cubes": ["mae"], "rmse": ["mae"]}}
    units = {"cubes": 3, "squares": 1, "contrastive": 3, "rmse": 1}
    targets = {name: Y[:, :number] for name, number in units.items()}
    assert_exact(with_heads(**units), loss, X, targets, weights, **compared)


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
    targets, weights = {"a": Y, "b": Y[:, :1], "c": Y}, {"a": WEIGHTS, "b": WEIGHTS**2, "c": WEIGHTS}
    assert_exact(with_heads(a=3, b=1, c=3), {"a": "mse", "b": "mae", "c": None}, X, targets, weights, **of_each)


def test_regularizers():
    """Those of weights count once, not once for each tower. Keras divides those of activities by the number of rows."""

    def own(weight):
        return 0.01 * ops.sum(ops.abs(weight) ** 3)

    def build():
        of_weights = {"kernel_regularizer": keras.regularizers.L1L2(0.1, 0.1), "bias_regularizer": own}
        regularized = layers.Dense(3, **of_weights, activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((5,)), layers.ActivityRegularization(l1=0.05, l2=0.02), regularized])

    assert_exact(build, "mse", X, Y, WEIGHTS)


class Adding(layers.Layer):
    def call(self, y):
        self.add_loss(0.1 * ops.sum(y**2))
        for axis in (None, 0, -1):
            self.add_loss(0.1 * ops.mean(y**2, axis=axis))
        return y


def test_added_losses():
    """Sums and means over the rows, and values for each column or row, are added as in Keras. There is no other loss here."""
    assert_exact(lambda: keras.Sequential([keras.Input((5,)), layers.Dense(3), Adding()]), None, X)


class OwnComputeLoss(keras.Model):
    """Has a scalar among its outputs, and divides by the maximum over the whole batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.temperature = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.dense(x), ops.exp(self.temperature)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits, temperature = y_pred
        return ops.mean((logits * temperature - y) ** 2) / ops.max(ops.abs(x))


class OldComputeLoss(keras.Sequential):
    """Overrides compute_loss as before Keras 3.3, without `training`."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) * 2


@pytest.mark.parametrize(
    ("build", "loss"), [(OwnComputeLoss, None), (lambda: dense(OldComputeLoss), "mse")], ids=["own", "old"]
)
def test_overridden_compute_loss(build, loss):
    assert_exact(build, loss, X, Y)


def test_no_loss_at_all():
    """Keras's own error is raised."""
    parallel = keras_dp.DataParallelModel(dense(), devices=2)
    parallel.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        parallel.fit(X, Y, verbose=0)
