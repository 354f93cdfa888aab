"""Models whose call depends on `training` train on towers as in plain Keras, which calls them with `training=True` first."""

import keras
import pytest
import tensorflow as tf
from comparison import assert_same_run
from keras import layers, ops
from programs.catalogue import normal
from programs.steps import Learner, fits, mean_square

# Keras says so of layers that only the other mode calls.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

X, Y = normal(13, 3, seed=1), normal(13, 2, seed=2)
# Two batches of 5 rows, whose number plain Keras knows; and one more of 3 rows.
KNOWN, UNKNOWN = 10, 13


class TwoLayers(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.kept = layers.Dense(2), layers.Dense(2), None


def trains(build, rows, targets=lambda y: y, loss="mse", **arguments):
    """Returns (build, script), which evaluates and predicts where plain Keras does."""
    return build, fits(X[:rows], targets(Y[:rows]), loss=loss, **{"evaluates": True, "predicts": True, **arguments})


def model_with(call, **methods):
    """Makes a class of models with two dense layers, `a` and `b`, and this call and other methods."""
    return type("Model", (TwoLayers,), {"call": call, **methods})


def only_training_calls_b(self, x, training=False):
    return self.a(x) + (self.b(x) if training else 0.0)


def only_inference_calls_b(self, x, training=False):
    return self.a(x) if training else self.b(x)


def both_while_training(self, x, training=False):
    return (self.a(x), self.b(x)) if training else self.a(x)


def refuses_inference(self, x, training=False):
    if not training:
        raise NotImplementedError("for training only")
    return self.a(x)


def makes_a_layer_while_training(self, x, training=False):
    if training and not hasattr(self, "late"):
        self.late = layers.Dense(2, name="late")
    return self.a(x) + (self.late(x) if training else 0.0)


class NormalizationForEachMode(keras.Model):
    """Its last normalization takes the batch's moments in inference, and the moving ones in training."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.BatchNormalization(momentum=0.5), layers.LayerNormalization()
        self.a, self.last = layers.Dense(2), layers.BatchNormalization(momentum=0.5)

    def call(self, x, training=False):
        return self.last(self.a(self.one(x, training=True) if training else self.other(x)), training=not training)


def keeps_rows_while_training(self, x, training=False):
    self.kept = self.b(x) if training else None
    return self.a(x)


def loss_of_what_is_kept(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return ops.mean(((y if self.kept is None else 0.5 * (y + self.kept)) - y_pred) ** 2)


class OnlyWhileTraining(layers.Layer):
    """While training, adds a loss, and noise from a generator, through a dense layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.seed, self.mix = keras.random.SeedGenerator(3), layers.Dense(2)

    def call(self, x, training=None):
        if not training:
            return x
        self.add_loss(0.01 * ops.sum(ops.abs(x)))
        return x + self.mix(keras.random.normal(ops.shape(x), seed=self.seed))


class WithoutTheFlag(TwoLayers):
    """Its own call does not take `training`, on which a layer depends."""

    def __init__(self):
        super().__init__()
        self.between = OnlyWhileTraining()

    def call(self, x):
        return self.b(self.between(self.a(x)))


class StepInBothModes(Learner, TwoLayers):
    call = only_training_calls_b

    def loss_of(self, x, y):
        return mean_square(0.5 * (y + tf.stop_gradient(self(x, training=False))), self(x, training=True)), {}


def evaluation_in_training_mode(self, data):
    return {"loss": mean_square(data[1], self(data[0], training=True))}


def prediction_in_training_mode(self, data):
    """Monte Carlo dropout predicts so."""
    return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)


def metrics_of_the_first_output(self, x, y, y_pred, sample_weight=None):
    first = y_pred[0] if isinstance(y_pred, tuple) else y_pred
    return {"error": ops.mean(ops.abs(first - y)), "outputs": len(y_pred) if isinstance(y_pred, tuple) else 1}


def sum_over_outputs(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return sum(ops.mean((answers - y) ** 2) for answers in (y_pred if training else [y_pred]))


def makes_no_layer(self, shape):
    """The model counts as built before it has weights."""
    self.built = True


PROGRAMS = {
    "two outputs while training": trains(
        model_with(both_while_training), KNOWN, lambda y: (y, 2 * y), ["mse", "mae"], evaluates=False
    ),
    "a dictionary after training alone": trains(
        model_with(lambda self, x, training=False: self.a(x) if training else {"answer": self.a(x), "score": self.b(x)}),
        KNOWN,
        evaluates=False,
    ),
    "a model for training only": trains(model_with(refuses_inference), KNOWN, evaluates=False, predicts=False),
    "a flag by keyword only": trains(model_with(lambda self, x, *, training: only_training_calls_b(self, x, training)), KNOWN),
    "a layer that only inference calls": trains(model_with(only_inference_calls_b), UNKNOWN),
    "a layer that is made while training": trains(model_with(makes_a_layer_while_training), KNOWN),
    "a normalization for each mode": trains(NormalizationForEachMode, KNOWN),
    "rows that training keeps for the loss": trains(
        model_with(keeps_rows_while_training, compute_loss=loss_of_what_is_kept), UNKNOWN, loss=None
    ),
    "a model without the flag": trains(WithoutTheFlag, UNKNOWN, metrics=["mae"]),
    "a step that calls in both modes": trains(StepInBothModes, UNKNOWN, loss=None, evaluates=False),
    "an evaluation and a prediction in training mode": trains(
        model_with(only_training_calls_b, test_step=evaluation_in_training_mode, predict_step=prediction_in_training_mode),
        UNKNOWN,
    ),
    "metrics of the first output": trains(
        model_with(both_while_training, compute_metrics=metrics_of_the_first_output, compute_loss=sum_over_outputs),
        KNOWN,
        loss=None,
    ),
    "a build that calls nothing": trains(model_with(only_training_calls_b, build=makes_no_layer), UNKNOWN),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_model_trains_as_on_one_device(name):
    assert_same_run(*PROGRAMS[name])


@pytest.mark.parametrize(("call", "first"), [(only_training_calls_b, "evaluate"), (only_inference_calls_b, "predict")])
def test_model_that_another_call_builds_first(call, first):
    """Makes the variables that plain Keras makes by `evaluate` or `predict` before `fit`, and the others in `fit`."""
    build, script = trains(model_with(call), KNOWN)

    def begins(model):
        model.compile("sgd", "mse")
        data = (X, Y) if first == "evaluate" else (X,)
        results = [getattr(model, first)(*data, batch_size=6, verbose=0), [variable.path for variable in model.variables]]
        return [results, script(model)]

    assert_same_run(build, begins)
