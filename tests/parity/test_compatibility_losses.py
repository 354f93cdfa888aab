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
ONE_HOT = np.eye(3)[rng.integers(0, 3, 23)]
WEIGHTS = rng.uniform(size=23)
TOKENS = np.where(np.arange(6) < rng.integers(1, 7, 23)[:, None], rng.integers(1, 9, (23, 6)), 0)


def dense(units=3, activation=None):
    return lambda: keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(units, activation)])


def tagger():
    """Builds a model with an output for each token, and a mask of the padding."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.Dense(5, "tanh"),
            layers.Dense(4),
        ]
    )


def two_headed():
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    return keras.Model(inputs, {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})


def targets():
    return {"a": rng.normal(size=(23, 3)), "b": rng.normal(size=(23, 1))}


def compiled(loss, **arguments):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss, **arguments}


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]


@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), "rows"])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "none"])
def test_reductions(reduction, weights):
    data = (X, Y, *([WEIGHTS] if weights else []))
    assert_same_training(dense(), compiled(losses.MeanSquaredError(reduction=reduction)), [(data, 9)], 3)


@pytest.mark.parametrize("weights", [pytest.param(None, marks=pytest.mark.slow), "tokens"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_losses(reduction, weights):
    """tf.distribute averages the replicas' masked means, and silently trains other weights."""
    data = (TOKENS, rng.integers(0, 4, (23, 6)), *([rng.uniform(size=(23, 6))] if weights else []))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    arguments = compiled(loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    assert_same_training(tagger, arguments, [(data, 9)], 3)


def test_masks_that_leave_a_tower_or_a_batch_nothing():
    tokens = TOKENS.copy()
    tokens[:4] = 0  # Covers the first tower's slice.
    tokens[9:18] = 0  # Covers the second batch.
    data = (tokens, rng.integers(0, 4, (23, 6)))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_towers_match_one_device(tagger, compiled(loss), [(data, 9)], (2, 4))


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum_over_batch_size"])
def test_weights_that_are_zero_for_a_tower(reduction):
    data = (X, Y, np.r_[np.zeros(3), WEIGHTS[3:]])
    assert_same_training(dense(), compiled(losses.MeanSquaredError(reduction=reduction)), [(data, 9)], 3)


def test_ignored_classes():
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    assert_same_training(dense(), compiled(loss), [((X, rng.integers(-1, 3, 23)), 9)], 3)


def test_label_smoothing():
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    assert_same_training(dense(), compiled(loss), [((X, ONE_HOT), 9)], 3)


def test_outputs_without_an_axis_of_their_own():
    """Keras's functions average over the last axis, which is the rows here. The result is a scalar."""

    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))

    assert_towers_match_one_device(build, compiled("mse", metrics=["mae"]), [((X, Y[:, 0]), 9)], 3)


def test_binary_labels_are_decided_by_the_whole_batch():
    """A hinge maps labels 0 and 1 to -1 and 1, unless the batch has a label -1 anywhere."""
    y = np.r_[np.zeros((8, 3)), np.ones((8, 3)), -np.ones((7, 3))]
    arguments = compiled("hinge", metrics=["hinge", "squared_hinge"])
    assert_same_training(dense(), arguments, [((X, y), 23)], 3)


def contrastive(y_true, y_pred):
    """Compares each row with all rows of the batch: the loss has a value for each row, but couples the rows."""
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return losses.sparse_categorical_crossentropy(ops.arange(ops.shape(y_pred)[0]), similarities, from_logits=True)


class PerRow(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) ** 3, axis=-1)


@pytest.mark.parametrize("own", [PerRow, lambda: lambda a, b: (a - b) ** 2], ids=["class", "function"])
def test_losses_of_ones_own_with_a_value_for_each_row(own):
    data = (X, Y, WEIGHTS)[: 3 if own is PerRow else 2]
    assert_same_training(dense(), compiled(own()), [(data, 9)], 3)


@pytest.mark.parametrize("loss", [rmse, contrastive])
def test_losses_that_couple_rows(loss):
    """tf.distribute averages the replicas' losses."""
    data = (X, Y, WEIGHTS)[: 3 if loss is contrastive else 2]
    assert_towers_match_one_device(dense(), compiled(loss), [(data, 9)], 3)


def test_losses_of_ones_own_for_several_rows_an_input():
    """Outputs with T rows for each row of the input keep their order."""

    def build():
        inputs = keras.Input((4, 5))
        return keras.Model(inputs, layers.Lambda(lambda x: ops.reshape(x, (-1, 3)))(layers.Dense(3)(inputs)))

    def loss(y_true, y_pred):
        places = ops.cast(ops.arange(ops.shape(y_pred)[0]), y_pred.dtype)
        return ops.mean((ops.reshape(y_true, (-1, 3)) - y_pred) ** 2 * ops.expand_dims(places, 1))

    x, y = rng.normal(size=(23, 4, 5)), rng.normal(size=(23, 4, 3))
    assert_same_training(build, compiled(loss), [((x, y), 5)], 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 0.3, "b": 2.0}, "metrics": {"b": ["mse"]}},
        {"loss": {"a": rmse, "b": "mse"}, "weighted_metrics": {"a": ["mae"], "b": ["mae"]}},
    ],
    ids=["each its own", "one couples rows"],
)
def test_several_outputs(arguments):
    assert_towers_match_one_device(two_headed, compiled(**arguments), [((X, targets()), 9)], 3)


def test_a_list_of_losses():
    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])

    arguments = compiled(["mse", losses.Huber(0.1)], loss_weights=[0.3, 2.0], metrics=[["mae"], None])
    assert_same_training(build, arguments, [((X, [Y, Y[:, :2]]), 9)], 3)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_an_output_without_a_loss():
    arguments = compiled({"a": losses.MeanSquaredError(reduction="sum"), "b": None})
    assert_towers_match_one_device(two_headed, arguments, [((X, targets()), 9)], 3)


def test_several_outputs_with_weights_of_their_own():
    weights = {"a": rng.uniform(size=23), "b": rng.uniform(size=23)}
    arguments = compiled({"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mae"], "b": ["mae"]})
    assert_same_training(two_headed, arguments, [((X, targets(), weights), 9)], 3)


def test_weight_regularizers():
    """Regularizers count once, not once for each tower."""

    def build():
        def own(weight):
            return 0.01 * ops.sum(ops.abs(weight) ** 3)

        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1), bias_regularizer="l1"),
                layers.Dense(3, kernel_regularizer="l2", bias_regularizer=own),
            ]
        )

    assert_same_training(build, compiled("mse"), [((X, Y, WEIGHTS), 9)], 3)
    assert_same_training(build, compiled(rmse), [((X, Y), 9)], 3)


def test_activity_regularizers():
    """Keras divides the penalties by the number of rows of the batch."""

    def build():
        regularized = layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))
        return keras.Sequential([keras.Input((5,)), layers.ActivityRegularization(l1=0.05, l2=0.02), regularized])

    assert_towers_match_one_device(build, compiled("mse"), [((X, Y), 9)], 3)


class Adding(keras.Model):
    """Adds a loss that is a function of the outputs."""

    def __init__(self, penalty):
        super().__init__()
        self.dense = layers.Dense(3)
        self.penalty = penalty

    def call(self, x):
        outputs = self.dense(x)
        self.add_loss(self.penalty(outputs))
        return outputs


PENALTIES = {
    "mean": lambda y: 0.1 * ops.mean(y**2),
    "mean of each column": lambda y: 0.1 * ops.mean(y**2, axis=0),
    "one for each row": lambda y: 0.1 * ops.sum(y**2, axis=-1),
    "one for each number": lambda y: 0.1 * y**2,
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_added_losses(penalty):
    """Scalars, and values for each column, row or number, are added as in Keras."""
    assert_same_training(lambda: Adding(PENALTIES[penalty]), compiled("mse"), [((X, Y), 9)], 3)
    assert_towers_match_one_device(lambda: Adding(PENALTIES[penalty]), compiled(None), [((X,), 9)], 3)


def test_sums_over_the_rows_as_added_losses():
    def build():
        return Adding(lambda y: 0.1 * ops.sum(y**2))

    assert_same_training(build, compiled("mse"), [((X, Y), 9)], 3)


class OwnComputeLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scale = ops.max(ops.abs(x))  # The maximum over the whole batch.
        self.largest.update_state(scale)
        return ops.mean((y - y_pred) ** 2) / scale


def test_overridden_compute_loss():
    assert_towers_match_one_device(OwnComputeLoss, compiled(None), [((X, Y), 9)], 3)


class OldComputeLoss(keras.Model):
    """Overrides compute_loss as before Keras 3.3, without `training`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) * 2


def test_overridden_compute_loss_without_training():
    assert_same_training(OldComputeLoss, compiled("mse"), [((X, Y), 9)], 3)


def test_no_loss_at_all():
    """Keras's own error is raised."""
    parallel = keras_dp.DataParallelModel(dense()(), devices=2)
    parallel.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        parallel.fit(X, Y, verbose=0)
