"""Losses of all kinds are those of the global batch."""

import keras
import numpy as np
import pytest
from comparison import assert_same, assert_towers_match_one_device, fit_evaluate_predict, twins
from keras import layers, losses, ops

import keras_dp
from keras_dp.losses import split_by_rows

rng = np.random.default_rng(0)
X = rng.normal(size=(23, 5))
TOKENS = np.where(np.arange(6) < rng.integers(1, 7, 23)[:, None], rng.integers(1, 9, (23, 6)), 0)


def dense(units=3):
    return lambda: keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(units)])


def tagger():
    """One output for each token, with the mask of the padding."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.GRU(5, return_sequences=True),
            layers.Dense(4),
        ]
    )


def compiled(loss, **arguments):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss, **arguments}


REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight", "none"]


@pytest.mark.parametrize("weights", [None, "rows"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(reduction, weights):
    data = (X, rng.normal(size=(23, 3)), *([rng.uniform(size=23)] if weights else []))
    assert_towers_match_one_device(dense(), compiled(losses.MeanSquaredError(reduction=reduction)), [(data, 9)], 3)


@pytest.mark.parametrize("weights", [None, "tokens"])
@pytest.mark.parametrize("reduction", REDUCTIONS[:4])
def test_reductions_under_a_mask(reduction, weights):
    """MirroredStrategy takes the mean of the replicas' masked means."""
    data = (TOKENS, rng.integers(0, 4, (23, 6)), *([rng.uniform(size=(23, 6))] if weights else []))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    arguments = compiled(loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    assert_towers_match_one_device(tagger, arguments, [(data, 9)], 3)


@pytest.mark.parametrize("num_towers", [2, 4])
def test_masks_that_leave_a_tower_or_a_batch_nothing(num_towers):
    tokens = TOKENS.copy()
    tokens[:4] = 0  # The first tower's.
    tokens[9:18] = 0  # The second batch.
    data = (tokens, rng.integers(0, 4, (23, 6)))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_towers_match_one_device(tagger, compiled(loss), [(data, 9)], num_towers)


def test_weights_that_are_zero_for_a_tower():
    weights = np.r_[np.zeros(3), rng.uniform(size=20)]
    for reduction in ("mean_with_sample_weight", "sum_over_batch_size"):
        data = (X, rng.normal(size=(23, 3)), weights)
        assert_towers_match_one_device(dense(), compiled(losses.MeanSquaredError(reduction=reduction)), [(data, 9)], 3)


def test_ignored_class_and_label_smoothing():
    labels = rng.integers(-1, 3, 23)
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    assert_towers_match_one_device(dense(), compiled(loss), [((X, labels), 9)], 3)
    loss = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    assert_towers_match_one_device(dense(), compiled(loss), [((X, np.eye(3)[np.abs(labels)]), 9)], 3)


def test_outputs_without_an_axis_of_their_own():
    """A function of Keras takes the mean over the last axis, here the rows: a bare scalar, so the batch is gathered."""

    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(inputs)))

    assert_towers_match_one_device(build, compiled("mse", metrics=["mae"]), [((X, rng.normal(size=23)), 9)], 3)


def rmse(y_true, y_pred):
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


def contrastive(y_true, y_pred):
    """Each row should be most like itself among all rows of the batch: one value for each row, and yet they are coupled."""
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return losses.sparse_categorical_crossentropy(ops.arange(ops.shape(y_pred)[0]), similarities, from_logits=True)


class PerRow(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.sum(ops.abs(y_true - y_pred) ** 3, axis=-1)


CUSTOM = {"bare scalar": rmse, "couples rows": contrastive, "function": lambda a, b: (a - b) ** 2, "class": PerRow}


@pytest.mark.parametrize("scope", ["auto", "batch"])
@pytest.mark.parametrize("loss", CUSTOM)
def test_losses_of_ones_own(loss, scope):
    data = (X, rng.normal(size=(23, 3)), rng.uniform(size=23))
    data = data if loss in ("couples rows", "class") else data[:2]
    own = PerRow() if loss == "class" else CUSTOM[loss]
    assert_towers_match_one_device(dense(), compiled(own), [(data, 9)], 3, {"loss_scope": scope})


def test_row_by_row_losses_of_ones_own_are_exact_in_the_tower_scope_too():
    data = (X, rng.normal(size=(23, 3)), rng.uniform(size=23))
    assert_towers_match_one_device(dense(), compiled(PerRow()), [(data, 9)], 3, {"loss_scope": "tower"})


def test_negative_control_coupled_rows_in_the_tower_scope():
    data = (X, rng.normal(size=(23, 3)))
    one, inner = twins(dense())
    expected = fit_evaluate_predict(one, compiled(rmse), [(data, 9)])
    received = fit_evaluate_predict(
        keras_dp.DataParallelModel(inner, devices=3, loss_scope="tower"), compiled(rmse), [(data, 9)]
    )
    with pytest.raises(AssertionError):
        assert_same(expected, received, 1e-4)


class OwnComputeLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scale = ops.max(ops.abs(x))  # Of the whole batch.
        self.largest.update_state(scale)
        return ops.mean((y - y_pred) ** 2) / scale


def test_overridden_compute_loss():
    assert_towers_match_one_device(OwnComputeLoss, compiled(None), [((X, rng.normal(size=(23, 3))), 9)], 3)


class OldComputeLoss(keras.Model):
    """Written before Keras 3.3, without `training`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight):
        return super().compute_loss(x, y, y_pred, sample_weight) * 2


def test_overridden_compute_loss_without_training():
    assert_towers_match_one_device(OldComputeLoss, compiled("mse"), [((X, rng.normal(size=(23, 3))), 9)], 3)


class MeanOfSquares(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(x**2))
        return x


def test_regularizers_and_added_losses():
    def build():
        regularizer = keras.regularizers.L2(0.1)
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, kernel_regularizer=regularizer, bias_regularizer="l1"),
                layers.ActivityRegularization(l1=0.05, l2=0.02),
                MeanOfSquares(),
                layers.Dense(3, activity_regularizer=regularizer),
            ]
        )

    data = (X, rng.normal(size=(23, 3)), rng.uniform(size=23))
    for loss in ("mse", rmse):
        assert_towers_match_one_device(build, compiled(loss), [(data[: 3 if loss == "mse" else 2], 9)], 3)
    assert_towers_match_one_device(build, compiled(None), [((X,), 9)], 3)


def two_headed():
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    return keras.Model(inputs, {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 0.3, "b": 2.0}, "metrics": {"b": ["mse"]}},
        {"loss": {"a": rmse, "b": "mse"}, "weighted_metrics": {"a": ["mae"], "b": ["mae"]}},
    ],
)
def test_several_outputs(arguments):
    y = {"a": rng.normal(size=(23, 3)), "b": rng.normal(size=(23, 1))}
    assert_towers_match_one_device(two_headed, compiled(**arguments), [((X, y), 9)], 3)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_an_output_without_a_loss():
    arguments = compiled({"a": losses.MeanSquaredError(reduction="sum"), "b": None})
    y = {"a": rng.normal(size=(23, 3)), "b": rng.normal(size=(23, 1))}
    assert_towers_match_one_device(two_headed, arguments, [((X, y), 9)], 3)


def test_several_outputs_with_weights_of_their_own():
    y = {"a": rng.normal(size=(23, 3)), "b": rng.normal(size=(23, 1))}
    weights = {"a": rng.uniform(size=23), "b": rng.uniform(size=23)}
    arguments = compiled({"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mae"], "b": ["mae"]})
    assert_towers_match_one_device(two_headed, arguments, [((X, y, weights), 9)], 3)


def test_which_losses_are_split_by_rows():
    def split(loss):
        model = dense()()
        model.compile("sgd", loss)
        return split_by_rows(model)

    assert all(split(loss) for loss in ("mse", "ce", losses.Huber(), losses.mean_absolute_error, losses.CosineSimilarity()))
    coupled = [rmse, PerRow(), losses.Dice(), losses.Circle(), "hinge", losses.CosineSimilarity(axis=0)]
    assert not any(split(loss) for loss in [*coupled, losses.MeanSquaredError(reduction=None)])


def test_hinge_decides_by_the_whole_batch_whether_labels_are_binary():
    """A slice of labels 0 and 1 is read as -1 and 1, unless there is a -1 elsewhere in the batch."""
    y = np.r_[np.zeros((8, 3)), np.ones((8, 3)), -np.ones((7, 3))]
    arguments = compiled("hinge", metrics=["hinge", keras.metrics.SquaredHinge()])
    assert_towers_match_one_device(dense(), arguments, [((X, y), 23)], 3)


def test_the_tower_scope_needs_a_reduction():
    parallel = keras_dp.DataParallelModel(dense()(), devices=2, loss_scope="tower")
    parallel.compile("sgd", losses.MeanSquaredError(reduction=None))
    with pytest.raises(ValueError, match="Give the loss a reduction"):
        parallel.fit(X, rng.normal(size=(23, 3)), verbose=0)


def test_losses_of_ones_own_for_several_rows_an_input():
    """Outputs with T rows for each row of the input are gathered in their order."""

    def build():
        inputs = keras.Input((4, 5))
        return keras.Model(inputs, layers.Lambda(lambda x: ops.reshape(x, (-1, 3)))(layers.Dense(3)(inputs)))

    def loss(y_true, y_pred):
        places = ops.cast(ops.arange(ops.shape(y_pred)[0]), y_pred.dtype)
        return ops.mean((ops.reshape(y_true, (-1, 3)) - y_pred) ** 2 * ops.expand_dims(places, 1))

    one, inner = twins(build)
    x, y = rng.normal(size=(23, 4, 5)), rng.normal(size=(23, 4, 3))
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile("sgd", loss)
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
    assert_same(one.get_weights(), inner.get_weights(), 1e-9)


def test_unknown_scope():
    with pytest.raises(ValueError, match="`loss_scope` must be one of 'auto', 'tower', 'batch'.*loss_scope='rows'"):
        keras_dp.DataParallelModel(dense()(), loss_scope="rows")
