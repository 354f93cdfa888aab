"""Every layer, loss, metric and optimizer of Keras has one device's result, and gathers rows only where it is listed."""

import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, numbers, run, training
from keras import layers, losses, metrics, ops, optimizers
from newest_keras import IS_NEWEST

import keras_dp

ROWS = 7  # On three towers: 2, 2 and 3.
rng = np.random.default_rng(11)


def random(*shape):
    return rng.normal(size=(ROWS, *shape))


def pixels():
    return rng.uniform(0, 255, (ROWS, 8, 8, 3)).astype("float32")


def strings():
    return np.array([[f"w{i % 4}"] for i in range(ROWS)], dtype=object)


def of(*makers):
    """Turns makers of layers into functions that call a new layer with one tensor."""
    return [lambda x, make=make: make()(x) for make in makers]


def of_pairs(*makers):
    """Turns makers of layers into functions that call a new layer with two tensors."""
    return [lambda x, make=make: make()([x, layers.Dense(4)(x)]) for make in makers]


def makers(names, *arguments):
    return [lambda name=name: getattr(layers, name)(*arguments) for name in names.split()]


def reshaped(shape, make):
    return lambda: layers.Pipeline([layers.Reshape(shape), make()])


# Some of them exist in float32 only.
RANDOM_LAYERS = [
    *makers("Dropout", 0.5),
    *makers("GaussianDropout AlphaDropout SpatialDropout2D", 0.3),
    *makers("GaussianNoise RandomRotation RandomZoom RandomContrast", 0.1),
    *makers("RandomFlip"),
    *makers("RandomTranslation", 0.1, 0.1),
    lambda: layers.RandomBrightness(0.1, value_range=(0, 1)),
    # The symbolic result of RandomCrop has its input's shape, so that it crops to the size of its input.
    *makers("RandomCrop", 8, 8),
]
# For each family, a maker of a batch and calls of layers. The layers train in one model, in the precision of the batch.
CALLS = {
    "vectors": (
        lambda: random(5),
        of(
            *makers("BatchNormalization Identity Softmax LeakyReLU ELU"),
            lambda: layers.Dense(4, kernel_constraint="unit_norm"),
            lambda: layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot"),
            lambda: layers.Normalization(mean=[1.0] * 5, variance=[2.0] * 5),
            lambda: layers.SpectralNormalization(layers.Dense(4)),
            lambda: layers.RepeatVector(2),
            lambda: layers.Lambda(lambda x: 2 * x),
            lambda: layers.Activation("gelu"),
            lambda: layers.ActivityRegularization(0.01),
            lambda: layers.ReLU(negative_slope=0.1),
            lambda: layers.Pipeline([layers.Rescaling(2.0)]),
        ),
    ),
    "sequences": (
        lambda: random(6, 4),
        [
            *of(
                *makers("LayerNormalization RMSNormalization UnitNormalization GlobalMaxPooling1D GlobalAveragePooling1D"),
                *makers("Cropping1D ZeroPadding1D", 1),
                *makers(
                    "DepthwiseConv1D MaxPooling1D AveragePooling1D AdaptiveAveragePooling1D AdaptiveMaxPooling1D UpSampling1D",
                    2,
                ),
                *makers("LSTM GRU", 3),
                lambda: layers.SimpleRNN(3, unroll=True),
                lambda: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)),
                lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2), layers.SimpleRNNCell(2)]),
                lambda: layers.TimeDistributed(layers.BatchNormalization()),
                lambda: layers.EinsumDense("abc,cd->abd", output_shape=(6, 5), bias_axes="d"),
                lambda: layers.Conv1D(3, 2, padding="causal"),
                lambda: layers.Conv1DTranspose(3, 2, 2),
                lambda: layers.SeparableConv1D(3, 2),
                lambda: layers.Permute((2, 1)),
                lambda: layers.Reshape((3, 8)),
                lambda: layers.SpatialDropout1D(0.3),
                lambda: layers.GRU(3, dropout=0.2, recurrent_dropout=0.2),
                lambda: layers.LSTM(3, return_sequences=True, go_backwards=True),
            ),
            lambda x: layers.GRU(2)(layers.Masking()(x)),
            lambda x: layers.MultiHeadAttention(2, 3, dropout=0.2)(x, x, use_causal_mask=True),
            lambda x: layers.GroupQueryAttention(3, 2, 1)(x, x),
            *of_pairs(
                *makers("Add Average Maximum Minimum Multiply Concatenate Subtract AdditiveAttention"),
                lambda: layers.Dot(2),
                lambda: layers.Attention(use_scale=True, dropout=0.2),
            ),
        ],
    ),
    "images": (
        lambda: random(8, 8, 3),
        of(
            *makers("GlobalMaxPooling2D GlobalAveragePooling2D Flatten"),
            *makers("Cropping2D ZeroPadding2D", 1),
            *makers("MaxPooling2D AveragePooling2D AdaptiveAveragePooling2D AdaptiveMaxPooling2D", 2),
            *makers("DepthwiseConv2D GroupNormalization", 3),
            *makers("Conv2D SeparableConv2D", 2, 3),
            *makers("Resizing CenterCrop", 5, 5),
            lambda: layers.Conv2DTranspose(2, 3, 2),
            lambda: layers.SpectralNormalization(layers.Conv2D(2, 3)),
            lambda: layers.PReLU(shared_axes=[1, 2]),
            lambda: layers.UpSampling2D(2, interpolation="bilinear"),
            lambda: layers.Rescaling(0.1, 0.2),
        ),
    ),
    "volumes": (
        lambda: random(4, 4, 4, 2),
        of(
            *makers("GlobalMaxPooling3D GlobalAveragePooling3D"),
            *makers("Cropping3D ZeroPadding3D", 1),
            *makers("UpSampling3D", 2),
            *makers("Conv3D Conv3DTranspose ConvLSTM2D", 2, 2),
        ),
    ),
    # Some kernels and constants exist in float32 only.
    "in float32": (
        lambda: random(4, 4, 4, 2).astype("float32"),
        of(
            *makers("MaxPooling3D AveragePooling3D AdaptiveMaxPooling3D AdaptiveAveragePooling3D", 2),
            lambda: layers.SpatialDropout3D(0.3),
            reshaped((2, 4, 4, 2, 2), lambda: layers.ConvLSTM3D(2, 2)),
            reshaped((4, 4, 8), lambda: layers.ConvLSTM1D(2, 2)),
            reshaped((128,), lambda: layers.MelSpectrogram(16, 8, num_mel_bins=4, sampling_rate=100, max_freq=50.0)),
            reshaped((128, 1), lambda: layers.STFTSpectrogram("log", 16, 8, 16)),
        ),
    ),
    "random layers": (
        lambda: rng.uniform(size=(ROWS, 8, 8, 3)).astype("float32"),
        # They draw in evaluations as well.
        [lambda x, make=make: make()(x, training=True) for make in RANDOM_LAYERS],
    ),
    "augmentations": (
        pixels,
        of(
            *makers("AutoContrast CutMix MixUp RandomErasing RandomGaussianBlur RandomGrayscale RandomInvert"),
            *makers("RandomPerspective Solarization"),
            *makers("RandomColorDegeneration RandomSaturation RandomSharpness", 0.4),
            lambda: layers.ContrastLimitedAdaptiveHistogramEqualization((0, 255), tile_grid_size=(2, 2)),
            lambda: layers.RandomHue(0.3, (0, 255)),
            lambda: layers.RandomPosterization(4),
            lambda: layers.RandomShear(0.2, 0.2),
            lambda: layers.RandomColorJitter((0, 255), 0.2, 0.2, 0.2, 0.2),
            # Equalization returns its symbolic input itself, so that it needs an input of its own.
            lambda: layers.Pipeline([layers.Rescaling(1.0), layers.Equalization()]),
        ),
    ),
    # Its result depends on whether Keras knows the number of rows.
    "elastic": (lambda: rng.uniform(size=(ROWS, 8, 8, 3)).astype("float32"), of(*makers("RandomElasticTransform"))),
    "all augmentations together": (
        pixels,
        of(lambda: layers.AugMix((0, 255), num_chains=1), lambda: layers.RandAugment((0, 255), num_ops=1)),
    ),
    "tokens": (
        lambda: rng.integers(0, 9, (ROWS, 6)),
        [
            *of(
                lambda: layers.CategoryEncoding(9, output_mode="count"),
                lambda: layers.Hashing(5, output_mode="multi_hot"),
                lambda: layers.IntegerLookup(vocabulary=[1, 2, 3], output_mode="multi_hot"),
            ),
            lambda x: layers.HashedCrossing(5, output_mode="one_hot")((x[:, :1], x[:, 1:2])),
        ],
    ),
    "strings": (
        strings,
        of(
            lambda: layers.StringLookup(vocabulary=["w1", "w2"], output_mode="one_hot"),
            lambda: layers.Hashing(5, output_mode="one_hot"),
        ),
    ),
    # Some of their operations are outside of all scopes: each of the next layers has its own model, to which they belong.
    "embedding": (lambda: rng.integers(0, 9, (ROWS, 6)), of(*makers("Embedding", 9, 4))),
    "reversible embedding": (lambda: rng.integers(0, 9, (ROWS, 6)), of(*makers("ReversibleEmbedding", 9, 4))),
    "texts": (strings, of(lambda: layers.TextVectorization(vocabulary=["w1", "b"], output_sequence_length=3))),
}
SLOW = {"all augmentations together"}

# Layers that cannot be in a model by themselves, need another framework, or take other inputs than batches of tensors.
NOT_IN_A_MODEL = {
    "Layer": "the base of all",
    "Wrapper": "the base of wrappers",
    "JaxLayer": "needs JAX",
    "FlaxLayer": "needs Flax",
    "TorchModuleWrapper": "needs PyTorch",
    "TFSMLayer": "wraps a SavedModel, which does not train",
    "MaxNumBoundingBoxes": "changes labels of images in an input pipeline",
}

# The operations for which rows are gathered, by class. Towers compute all other layers and losses on their own rows.
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "partition.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Which of Keras gathers rows")[2].partition("\n## ")[0]
GATHERED = {
    name: set(re.findall(r"`(\w+)`", types)) for name, types in re.findall(r"^\| `(\w+)` \| (.*?) \|", TABLE, re.MULTILINE)
}


def batch_of(family):
    x = CALLS[family][0]()
    keras.utils.clear_session()  # Keras remembers the precision of the last model.
    keras.config.set_floatx("float32" if x.dtype == np.float32 else "float64")
    return x


def model_of(family, x):
    """Builds a model with all layers of a family side by side, for batches like x."""
    inputs = keras.Input(x.shape[1:], dtype="string" if x.dtype == object else str(x.dtype))
    start = layers.Dense(x.shape[-1], name="rest_before")(inputs) if x.dtype.kind == "f" else inputs
    branches = []
    for i, call in enumerate(CALLS[family][1]):
        branch = ops.cast(call(start), keras.config.floatx())
        branches.append(layers.Dense(2, name=f"rest_{i}")(layers.Flatten(name=f"rest_flat_{i}")(branch)))
    return keras.Model(inputs, layers.Add(name="rest_sum")(branches) if len(branches) > 1 else branches[0])


def fitted(model, x, y, weights=None):
    """Trains with batches of 3, 3 and 1 rows. The last one leaves two towers none."""
    return model.fit(x, y, epochs=2, shuffle=False, batch_size=3, sample_weight=weights, verbose=0).history


def trained(model, x, y, weights=None):
    """Trains with one batch of all rows more, whose number is known while it is traced."""
    return [fitted(model, x, y, weights), model.train_on_batch(x, y, sample_weight=weights, return_dict=True)]


def trained_and_evaluated(model, x, y):
    return [*trained(model, x, y), model.evaluate(x, y, batch_size=3, return_dict=True, verbose=0)]


def assert_exact(build, compiled, batch, fits=trained):
    """Asserts that three towers have one device's result, and returns the model on towers."""
    wrappers = []

    def script(model):
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled()})
        # Plain Keras loses the initial state of ScheduleFreeAdamW unless the optimizer is built before the first step.
        model.optimizer.build(model.trainable_variables)
        return fits(model, *batch)

    def wrap(model):
        wrappers.append(keras_dp.DataParallelModel(model, devices=3))
        return wrappers[0]

    if keras.config.floatx() == "float64":
        return assert_same_script(build, script, 3)[1]
    one, other = (numbers(run(build, training(script), way)) for way in (lambda model: model, wrap))
    # Small entries have the rounding errors of large ones beside them, as in the gradients of images.
    sizes = {path: max(1, np.abs(leaf).max()) for path, leaf in one.items()}
    assert_same(*({path: leaf / sizes[path] for path, leaf in result.items()} for result in (one, other)), 1e-4)
    return wrappers[0]


def gathered(parallel, classes):
    """Returns the types of the operations for which the last step gathered rows, by the class to which they belong.

    `classes` has the names of classes by name scope. An operation outside of all scopes belongs to the only class, or to none.
    """
    found = {}
    for once in parallel.tower_steps.partition("train").gathered:
        scopes = [scope for part in once.name.split("/") for scope in classes if part == scope or part.startswith(f"{scope}_")]
        owner = classes[max(scopes, key=len)] if scopes else next(iter(classes.values())) if len(classes) == 1 else once.name
        found.setdefault(owner, set()).add(once.type)
    return found


def named(module, base):
    return {n: v for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base)}


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in CALLS])
def test_layers(family):
    x = batch_of(family)
    batch = tf.constant(x.tolist()) if x.dtype == object else x, random(2).astype(keras.config.floatx())

    def compiled():
        # Without a bound, the sum of so many layers diverges within four steps.
        return {"optimizer": optimizers.SGD(0.01, global_clipnorm=1.0)} if x.dtype.kind == "f" else {}

    parallel = assert_exact(lambda: model_of(family, x), compiled, batch, trained_and_evaluated)
    own = [layer for layer in parallel.inner_model.layers if not layer.name.startswith(("rest_", "input_"))]
    classes = {layer.name: type(layer).__name__ for layer in own}
    assert gathered(parallel, classes) == {k: types for k, types in GATHERED.items() if k in classes.values()}


def test_every_layer_of_keras_is_in_a_family():
    tested = set()
    for family in CALLS:
        tested |= {type(layer) for layer in model_of(family, batch_of(family))._flatten_layers()}
    missing = {name for name, layer in named(layers, layers.Layer).items() if layer not in tested}
    assert missing == set(NOT_IN_A_MODEL)
    assert GATHERED.keys() <= {layer.__name__ for layer in tested} | {*LOSSES, "CTC"}


# CTC has a separate test.
LOSSES = sorted(set(named(losses, losses.Loss)) - {"Loss", "CTC"})
REDUCTIONS = ["sum", "sum_over_batch_size", "mean_with_sample_weight"]
KINDS = [*REDUCTIONS, "by_name"]


def labels_for(name):
    """Returns an activation and labels that suit a loss."""
    if "Sparse" in name or name in ("Circle", "CategoricalGeneralizedCrossEntropy"):
        return "softmax", rng.integers(0, 3, ROWS)
    one_hot = np.eye(3)[rng.integers(0, 3, ROWS)]
    if name in ("Hinge", "SquaredHinge"):
        return "tanh", 2 * one_hot - 1
    probabilities = ("Crossentropy", "KLDivergence", "Poisson", "CategoricalHinge", "Dice", "Tversky")
    if any(part in name for part in probabilities):
        return "sigmoid" if name.startswith("Binary") else "softmax", one_hot
    return None, np.abs(random(3)) if name == "MeanSquaredLogarithmicError" else random(3)


def by_name(name):
    return "kl_divergence" if name == "KLDivergence" else re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# It pairs all labels with all rows, so that weights do not fit; and Keras does not know it by name.
WITHOUT_WEIGHTS = ["CategoricalGeneralizedCrossEntropy"]


@pytest.mark.parametrize("is_weighted", [True, False])
def test_losses(is_weighted):
    """Trains one model with an output for each loss, by its name or with one of the reductions. New losses are included."""
    chosen = [name for name in LOSSES if (name in WITHOUT_WEIGHTS) != is_weighted]
    kinds = {name: [KINDS[i % 4]] if is_weighted else REDUCTIONS for i, name in enumerate(chosen)}
    outputs = {f"{name}-{kind}": (name, kind) for name in chosen for kind in kinds[name]}
    labels = {name: labels_for(name) for name in chosen}

    def build():
        inputs = keras.Input((5,))
        made = {output: layers.Dense(3, labels[name][0], name=output)(inputs) for output, (name, _) in outputs.items()}
        return keras.Model(inputs, made)

    def compiled():
        made = {
            output: by_name(name) if kind == "by_name" else getattr(losses, name)(reduction=kind, name=f"loss_{name}")
            for output, (name, kind) in outputs.items()
        }
        return {"loss": made, "optimizer": optimizers.SGD(0.01)}

    batch = [random(5), {output: labels[name][1] for output, (name, _) in outputs.items()}]
    if is_weighted:
        batch.append(dict.fromkeys(outputs, rng.uniform(size=ROWS)))
    scopes = {f"loss_{name}": name for name in chosen} | {by_name(name): name for name in chosen}
    parallel = assert_exact(build, compiled, batch)
    assert gathered(parallel, scopes) == {name: types for name, types in GATHERED.items() if name in chosen}


def test_connectionist_temporal_classification():
    """TensorFlow computes CTC in float32."""
    keras.config.set_floatx("float32")
    batch = random(6, 4).astype("float32"), rng.integers(1, 5, (ROWS, 3))
    build, loss = lambda: keras.Sequential([keras.Input((6, 4)), layers.Dense(5)]), losses.CTC(name="loss_CTC")
    parallel = assert_exact(build, lambda: {"loss": loss}, batch)
    assert gathered(parallel, {"loss_CTC": "CTC"}) == {"CTC": GATHERED["CTC"]}


ARGUMENTS = {
    "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    "IoU": {"num_classes": 3, "target_class_ids": [0], "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "MeanMetricWrapper": {"fn": lambda y_true, y_pred: ops.max(ops.abs(y_true - y_pred), axis=-1)},
}
SPARSE = {"SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy", "SparseCategoricalCrossentropy", "IoU", "MeanIoU"}
WHOLE_WEIGHTS = {"OneHotIoU", "OneHotMeanIoU"}
FLOAT32 = {"TopKCategoricalAccuracy", "SparseTopKCategoricalAccuracy"}
# Mean and Sum take values, not labels and predictions.
METRICS = sorted(set(named(metrics, metrics.Metric)) - {"Metric", "Mean", "Sum"})
UNWEIGHTED = {"IoU", "MeanIoU", "BinaryIoU"}  # Keras fails on weights for these.


class Sums(keras.Model):
    """Updates the metrics that take values instead of labels and predictions."""

    def __init__(self, *args):
        super().__init__(*args)
        self.made = [scoped("Mean"), scoped("Sum")]

    def call(self, x):
        answers = super().call(x)
        for metric in self.made:
            metric.update_state(answers["labels"], sample_weight=ops.abs(answers["labels"]))
        return answers


def scoped(name):
    """Makes a metric, and puts its name in front of the names of its operations."""
    metric = getattr(metrics, name)(**ARGUMENTS.get(name, {}), name=f"metric_{name}")
    update = metric.update_state

    def update_state(*args, **kwargs):
        with tf.name_scope(metric.name):
            return update(*args, **kwargs)

    metric.update_state = update_state
    return metric


@pytest.mark.parametrize("floatx", ["float64", "float32"])
def test_metrics(floatx):
    """Trains one model with all metrics, weighted and not; float32 covers those that TensorFlow has in float32 only."""
    keras.config.set_floatx(floatx)
    chosen = [name for name in METRICS if (name in FLOAT32) == (floatx == "float32")]
    of_output = {"labels": [], "sparse": [], "whole": []}
    for name in chosen:
        of_output["sparse" if name in SPARSE else "whole" if name in WHOLE_WEIGHTS else "labels"].append(name)

    def build():
        inputs = keras.Input((5,))
        return Sums(inputs, {name: layers.Dense(3, "sigmoid", name=name)(inputs) for name in of_output})

    def made(is_weighted):
        return {
            output: [scoped(name) for name in names if not (is_weighted and name in UNWEIGHTED)]
            for output, names in of_output.items()
        }

    def compiled():
        return {"loss": dict.fromkeys(of_output, "mse"), "metrics": made(False), "weighted_metrics": made(True)}

    y = rng.integers(0, 2, (ROWS, 3)).astype(floatx)
    weights = rng.uniform(size=ROWS).astype(floatx)
    batch = (
        random(5).astype(floatx),
        {"labels": y, "sparse": y[:, :1], "whole": y},
        {"labels": weights, "sparse": weights, "whole": np.ones(ROWS, "int64")},
    )
    parallel = assert_exact(build, compiled, batch)
    assert gathered(parallel, {f"metric_{name}": name for name in [*chosen, "Mean", "Sum"]}) == {} or not IS_NEWEST


OPTIMIZERS = sorted(set(named(optimizers, optimizers.Optimizer)) - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"})
MOVING_AVERAGES = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3}
OPTIONS = {
    "clipped together, and overwritten with moving averages": {"global_clipnorm": 0.1, "weight_decay": 0.01, **MOVING_AVERAGES},
    "clipped each, and accumulated": {"clipnorm": 0.05, "gradient_accumulation_steps": 2},
}
OVERWRITTEN, ACCUMULATED = OPTIONS


@pytest.mark.parametrize(("floatx", "options"), [("float64", OVERWRITTEN), ("float64", ACCUMULATED), ("float32", OVERWRITTEN)])
def test_optimizers(floatx, options):
    """Each optimizer trains a layer. Gradients are sums, so that no rows are gathered. Muon's constants are float32."""
    keras.config.set_floatx(floatx)
    chosen = [name for name in OPTIMIZERS if (name == "Muon") == (floatx == "float32")]

    def build():
        inputs = keras.Input((5,))
        hidden = [layers.Dense(3, "tanh", name=f"of_{name}_hidden")(inputs) for name in chosen]
        made = [layers.Dense(2, name=f"of_{name}")(x) for name, x in zip(chosen, hidden, strict=True)]
        return keras.Model(inputs, layers.Add()([*made, layers.Dense(2)(inputs)]))

    def compiled():
        rate = optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        made = {f".*of_{name}(_hidden)?/.*": getattr(optimizers, name)(rate, **OPTIONS[options]) for name in chosen}
        return {"optimizer": optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.01), made))}

    batch = random(5).astype(floatx), random(2).astype(floatx)
    assert gathered(assert_exact(build, compiled, batch, fitted), {}) == {}
