"""Every layer, loss, metric and optimizer of Keras has one device's result, and gathers rows only where it is listed."""

import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, largest_change, values
from keras import layers, losses, metrics, ops, optimizers
from test_compatibility_losses import ALL as LOSSES
from test_compatibility_losses import labels_for
from test_compatibility_metrics import ALL as METRICS
from test_compatibility_metrics import FLOAT32, SPARSE, WHOLE_WEIGHTS, make
from test_compatibility_models import FAMILIES, random_layers

import keras_dp

ROWS = 7  # On three towers: 2, 2 and 3.
rng = np.random.default_rng(11)


def random(*shape):
    return rng.normal(size=(ROWS, *shape))


def pixels():
    return rng.uniform(0, 255, (ROWS, 8, 8, 3)).astype("float32")


def of(*makers):
    """Turns makers of layers into functions that call a new layer with one tensor."""
    return [lambda x, make=make: make()(x) for make in makers]


def of_pairs(*makers):
    """Turns makers of layers into functions that call a new layer with two tensors."""
    return [lambda x, make=make: make()([x, layers.Dense(4)(x)]) for make in makers]


# For each family, a maker of a batch and calls of layers. The layers train in one model, in the precision of the batch.
CALLS = {name: (lambda make=make: make()[:ROWS], of(*makers)) for name, (make, makers) in FAMILIES.items() if name != "tokens"}
CALLS |= {
    "more sequences": (
        lambda: random(6, 4),
        [
            *of(
                lambda: layers.SpatialDropout1D(0.3),
                lambda: layers.GRU(3, dropout=0.2, recurrent_dropout=0.2),
                lambda: layers.LSTM(3, return_sequences=True, go_backwards=True),
            ),
            lambda x: layers.GRU(2)(layers.Masking()(x)),
            lambda x: layers.MultiHeadAttention(2, 3, dropout=0.2)(x, x, use_causal_mask=True),
            lambda x: layers.GroupQueryAttention(3, 2, 1)(x, x),
        ],
    ),
    "pairs": (
        lambda: random(6, 4),
        of_pairs(
            layers.Add,
            layers.Average,
            layers.Maximum,
            layers.Minimum,
            layers.Multiply,
            layers.Concatenate,
            layers.Subtract,
            lambda: layers.Dot(2),
            lambda: layers.Attention(use_scale=True, dropout=0.2),
            lambda: layers.AdditiveAttention(),
        ),
    ),
    # Some kernels and constants exist in float32 only.
    "volumes in float32": (
        lambda: random(4, 4, 4, 2).astype("float32"),
        of(
            lambda: layers.MaxPooling3D(2),
            lambda: layers.AveragePooling3D(2),
            lambda: layers.AdaptiveMaxPooling3D(2),
            lambda: layers.AdaptiveAveragePooling3D(2),
            lambda: layers.SpatialDropout3D(0.3),
        ),
    ),
    "films": (
        lambda: random(3, 4, 4, 3, 2).astype("float32"),
        of(
            lambda: layers.ConvLSTM3D(2, 2),
            lambda: layers.Pipeline([layers.Reshape((3, 4, 24)), layers.ConvLSTM1D(2, 2)]),
        ),
    ),
    "waves": (
        lambda: random(64).astype("float32"),
        of(
            lambda: layers.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4, sampling_rate=100, max_freq=50.0),
            lambda: layers.Pipeline([layers.Reshape((64, 1)), layers.STFTSpectrogram("log", 16, 8, 16)]),
        ),
    ),
    "random layers": (
        lambda: rng.uniform(size=(ROWS, 8, 8, 3)).astype("float32"),
        # The symbolic result of RandomCrop has its input's shape, so that the last layer crops to the size of its input.
        of(*[lambda i=i: random_layers()[i] for i in range(len(random_layers()) - 1)], lambda: layers.RandomCrop(8, 8)),
    ),
    "augmentations": (
        pixels,
        of(
            lambda: layers.AutoContrast(),
            lambda: layers.ContrastLimitedAdaptiveHistogramEqualization((0, 255), tile_grid_size=(2, 2)),
            lambda: layers.CutMix(),
            lambda: layers.MixUp(),
            lambda: layers.RandomColorDegeneration(0.5),
            lambda: layers.RandomErasing(),
            lambda: layers.RandomGaussianBlur(),
            lambda: layers.RandomGrayscale(),
            lambda: layers.RandomHue(0.3, (0, 255)),
            lambda: layers.RandomInvert(),
            lambda: layers.RandomPerspective(),
            lambda: layers.RandomPosterization(4),
            lambda: layers.RandomSaturation(0.3),
            lambda: layers.RandomSharpness(0.4),
            lambda: layers.RandomShear(0.2, 0.2),
            lambda: layers.Solarization(),
            lambda: layers.RandomColorJitter((0, 255), 0.2, 0.2, 0.2, 0.2),
            # Equalization returns its symbolic input itself, so that it needs an input of its own.
            lambda: layers.Pipeline([layers.Rescaling(1.0), layers.Equalization()]),
        ),
    ),
    # Its result depends on whether Keras knows the number of rows, as in `fit` if the rows are a multiple of the batch size.
    "elastic": (lambda: rng.uniform(size=(ROWS, 8, 8, 3)).astype("float32"), of(lambda: layers.RandomElasticTransform())),
    "all augmentations together": (
        pixels,
        of(lambda: layers.AugMix((0, 255), num_chains=1), lambda: layers.RandAugment((0, 255), num_ops=1)),
    ),
    "crosses": (
        lambda: rng.integers(0, 9, (ROWS, 1)),
        [lambda x: layers.HashedCrossing(5, output_mode="one_hot")((x, x + 1))],
    ),
}
# Each of these layers has its own model, so that operations that are computed once can be assigned to it.
TOKENS, OF_TOKENS = FAMILIES["tokens"]
CALLS |= {f"tokens, {i}": (lambda: TOKENS()[:ROWS], of(make)) for i, make in enumerate(OF_TOKENS)}
OF_STRINGS = [
    lambda: layers.StringLookup(vocabulary=["w1", "w2"], output_mode="one_hot"),
    lambda: layers.TextVectorization(vocabulary=["w1", "b"], output_sequence_length=3),
    lambda: layers.Hashing(5, output_mode="one_hot"),
]
STRINGS = np.array([[f"w{i % 4}"] for i in range(ROWS)], dtype=object)
CALLS |= {f"strings, {i}": (lambda: STRINGS, of(make)) for i, make in enumerate(OF_STRINGS)}
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

# The operations for which rows are gathered, by layer. Towers compute all other layers on their own rows.
GATHERED_BY_LAYERS = {
    # Rows meet rows: images are mixed with each other, looked up in a table of all images, or use the first image's values.
    "CutMix": {"GatherV2", "StatelessRandomGammaV3", "TopKV2"},
    "MixUp": {"GatherV2", "StatelessRandomGammaV3", "TopKV2"},
    "ContrastLimitedAdaptiveHistogramEqualization": {"GatherV2"},
    "RandomElasticTransform": {"StridedSlice", "Unpack"},
    # Tables are updated in place, at the indices of all rows.
    "Embedding": {"ResourceScatterSub"},
    "ReversibleEmbedding": {"ResourceScatterSub"},
    # Lookup tables and crosses are on one device, and their results have a number of rows that is known only there.
    "IntegerLookup": {"LookupTableFindV2"},
    "StringLookup": {"LookupTableFindV2"},
    "TextVectorization": {"StringSplitV2", "Sum"},
    "HashedCrossing": {"SparseCross"},
}


def model_of(family, x):
    """Builds a model with all layers of a family side by side, for batches like x."""
    inputs = keras.Input(x.shape[1:], dtype="string" if x.dtype == object else str(x.dtype))
    start = layers.Dense(x.shape[-1], name="rest_before")(inputs) if x.dtype.kind == "f" else inputs
    branches = []
    for i, call in enumerate(CALLS[family][1]):
        branch = ops.cast(call(start), keras.config.floatx())
        branches.append(layers.Dense(2, name=f"rest_{i}")(layers.Flatten(name=f"rest_flat_{i}")(branch)))
    return keras.Model(inputs, layers.Add(name="rest_sum")(branches) if len(branches) > 1 else branches[0])


def assert_exact(build, compiled, batch, steps=1, batch_size=ROWS):
    """Trains on one device and on three towers, asserts that the results are the same, and returns the model on towers.

    Args:
        build: a function that makes the model.
        compiled: a function that makes the arguments of `compile`.
        batch: the data to train on.
        steps: the number of epochs.
        batch_size: the number of rows of each step.
    """
    results = []
    for wrap in (lambda model: model, lambda model: keras_dp.DataParallelModel(model, devices=3)):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        model = build()
        trained = wrap(model)
        trained.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled()})
        # Plain Keras loses the initial state of ScheduleFreeAdamW unless the optimizer is built before the first step.
        trained.optimizer.build(model.trainable_variables)
        before = model.get_weights()
        x, y, weights = [*batch, None][:3]
        logs = trained.fit(x, y, batch_size=batch_size, epochs=steps, sample_weight=weights, shuffle=False, verbose=0).history
        assert largest_change(before, model.get_weights()) > 1e-6, "nothing was trained"
        results.append((logs, [variable.numpy() for variable in model.variables], values(model.optimizer)))
    if keras.config.floatx() == "float64":
        assert_same(*results, 1e-9)
    else:
        # Small entries have the rounding errors of large ones beside them, as in the gradients of images.
        sizes = keras.tree.map_structure(lambda leaf: max(1, np.abs(leaf).max()), results[0])
        one, other = (keras.tree.map_structure(lambda leaf, size: leaf / size, result, sizes) for result in results)
        assert_same(one, other, 1e-4)
    return trained


def gathered(parallel, batch, classes):
    """Returns the types of the operations for which rows are gathered, by the class to which they belong.

    Args:
        parallel: the model.
        batch: a batch of data for the model.
        classes: the names of classes by name scope. An operation outside of all scopes belongs to the only class, or to none.
    """
    found = {}
    for once in parallel.explain(batch).once:
        scopes = [scope for part in once.name.split("/") for scope in classes if part == scope or part.startswith(f"{scope}_")]
        owner = classes[max(scopes, key=len)] if scopes else next(iter(classes.values())) if len(classes) == 1 else once.name
        found.setdefault(owner, set()).add(once.type)
    return found


def named(module, base):
    """Returns the public classes of a module of Keras, by name."""
    return {n: v for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base)}


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in CALLS])
def test_layers(family):
    x = CALLS[family][0]()
    keras.config.set_floatx("float32" if x.dtype == np.float32 else "float64")
    batch = tf.constant(x.tolist()) if x.dtype == object else x, random(2).astype(keras.config.floatx())
    parallel = assert_exact(lambda: model_of(family, x), dict, batch, batch_size=4 if family == "elastic" else ROWS)
    own = [layer for layer in parallel.inner_model.layers if not layer.name.startswith(("rest_", "input_"))]
    classes = {layer.name: type(layer).__name__ for layer in own}
    received = gathered(parallel, batch, classes)
    assert received == {name: types for name, types in GATHERED_BY_LAYERS.items() if name in classes.values()}


def test_every_layer_of_keras_is_in_a_family():
    tested = set()
    for family, (make_batch, _) in CALLS.items():
        tested |= {type(layer) for layer in model_of(family, make_batch())._flatten_layers()}
    missing = {name for name, layer in named(layers, layers.Layer).items() if layer not in tested}
    assert missing == set(NOT_IN_A_MODEL)


# Circle compares all rows with each other.
GATHERED_BY_LOSSES = {"Circle": {"Equal", "MatMul"}}


def test_losses():
    """Trains one model with an output for each loss."""
    activations, targets = zip(*[labels_for(name) for name in LOSSES], strict=True)

    def build():
        inputs = keras.Input((5,))
        named = zip(LOSSES, activations, strict=True)
        return keras.Model(inputs, {name: layers.Dense(3, activation, name=name)(inputs) for name, activation in named})

    def compiled():
        return {"loss": {name: getattr(losses, name)(name=f"loss_{name}") for name in LOSSES}}

    batch = random(5), {name: y[:ROWS] for name, y in zip(LOSSES, targets, strict=True)}
    parallel = assert_exact(build, compiled, batch)
    assert gathered(parallel, batch, {f"loss_{name}": name for name in LOSSES}) == GATHERED_BY_LOSSES
    # "CTC" has a separate test.
    assert set(named(losses, losses.Loss)) == {*LOSSES, "CTC", "Loss"}


# CTC keeps the steps of all rows in tensors that it updates in place.
GATHERED_BY_CTC = {"CTC": {"TensorScatterAdd", "While"}}


def test_connectionist_temporal_classification():
    """TensorFlow computes CTC in float32."""
    keras.config.set_floatx("float32")
    batch = random(6, 4).astype("float32"), rng.integers(1, 5, (ROWS, 3))
    parallel = assert_exact(
        lambda: keras.Sequential([keras.Input((6, 4)), layers.Dense(5)]), lambda: {"loss": losses.CTC(name="loss_CTC")}, batch
    )
    assert gathered(parallel, batch, {"loss_CTC": "CTC"}) == GATHERED_BY_CTC


GATHERED_BY_METRICS = {}
UNWEIGHTED = {"IoU", "MeanIoU", "BinaryIoU"}  # Keras fails on weights for these.


class Sums(keras.Model):
    """Updates the metrics that take values instead of labels and predictions."""

    def __init__(self, *args):
        super().__init__(*args)
        self.made = [scoped(metric(name=f"metric_{metric.__name__}")) for metric in (metrics.Mean, metrics.Sum)]

    def call(self, x):
        answers = super().call(x)
        for metric in self.made:
            metric.update_state(answers["labels"], sample_weight=ops.abs(answers["labels"]))
        return answers


def scoped(metric):
    """Puts the metric's name in front of the names of its operations, and returns the metric."""
    update = metric.update_state

    def update_state(*args, **kwargs):
        with tf.name_scope(metric.name):
            return update(*args, **kwargs)

    metric.update_state = update_state
    return metric


@pytest.mark.parametrize("floatx", ["float64", "float32"])
def test_metrics(floatx):
    """Trains one model with all metrics, weighted if Keras allows; float32 covers those that TensorFlow has in float32 only."""
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
            output: [scoped(make(name, f"metric_{name}")) for name in names if (name not in UNWEIGHTED) == is_weighted]
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
    parallel = assert_exact(build, compiled, batch, steps=2)
    classes = {f"metric_{name}": name for name in [*chosen, "Mean", "Sum"]}
    received = gathered(parallel, batch, classes)
    assert received == {name: types for name, types in GATHERED_BY_METRICS.items() if name in classes.values()}
    assert set(named(metrics, metrics.Metric)) == {*METRICS, "Mean", "Sum", "Metric"}


OPTIMIZERS = sorted(set(named(optimizers, optimizers.Optimizer)) - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"})


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("floatx", ["float64", "float32"])
def test_optimizers(floatx, scaled):
    """Each optimizer trains a layer. Gradients are sums, so that no rows are gathered. Muon's constants are float32."""
    keras.config.set_floatx(floatx)
    chosen = [name for name in OPTIMIZERS if (name == "Muon") == (floatx == "float32")]

    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Add()([layers.Dense(2, name=f"of_{name}")(inputs) for name in chosen]))

    def compiled():
        made = {f".*of_{name}/.*": getattr(optimizers, name)(0.01) for name in chosen}
        optimizer = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.01), made))
        if scaled:
            optimizer = optimizers.LossScaleOptimizer(optimizers.Adam(0.01, global_clipnorm=0.1), initial_scale=8.0)
        return {"optimizer": optimizer}

    batch = random(5).astype(floatx), random(2).astype(floatx)
    parallel = assert_exact(build, compiled, batch, steps=3)
    assert not parallel.explain(batch).once


def test_the_table_of_the_documentation():
    """The table lists every class that gathers rows, and the operations for which it does."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "partition.md").read_text()
    _, _, section = page.partition("## Which of Keras gathers rows")
    section, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    listed = {name: set(re.findall(r"`(\w+)`", types)) for name, types in rows}
    assert listed == {**GATHERED_BY_LAYERS, **GATHERED_BY_LOSSES, **GATHERED_BY_CTC, **GATHERED_BY_METRICS}
