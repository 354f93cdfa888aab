"""Random models that Keras's own step trains give one device's result on towers.

Random steps of one's own are in tests/fuzz, and published ones in tests/programs.
"""

import keras
import numpy as np
import pytest
from comparison import assert_same, values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers, losses, ops, optimizers

import keras_dp

# No deadline: an example traces two programs. No shrinking: it takes minutes, and tells no more than the failed example.
whole_trainings = settings(
    deadline=None, database=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)


def attention(x):
    return layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x)


def looked_up(x):
    """Embeds the bin of each number, so that layers in front have gradients of zero."""
    tokens = layers.Discretization([-0.5, 0.0, 0.5])(x)
    return layers.Reshape((4, 9))(layers.Embedding(4, 3)(tokens))


def like_other_rows(x):
    """Replaces each row by a mean of all rows, weighted by their likeness to it."""
    flat = ops.reshape(x, (ops.shape(x)[0], -1))
    return ops.reshape(ops.softmax(flat @ ops.transpose(flat) / 10.0, axis=-1) @ flat, ops.shape(x))


# Blocks for inputs of the shape (4 steps, channels). The first ones take masks.
MASKED = {
    "dense": lambda x: layers.Dense(3, "tanh")(x),
    "recurrent": lambda x: layers.GRU(3, return_sequences=True)(x),
    "unrolled": lambda x: layers.SimpleRNN(3, return_sequences=True, unroll=True)(x),
    "batch norm": lambda x: layers.BatchNormalization(momentum=0.7)(x),
    "layer norm": lambda x: layers.LayerNormalization()(x),
    "dropout": lambda x: layers.Dropout(0.3)(x),
}
BLOCKS = {
    **MASKED,
    "convolution": lambda x: layers.Conv1D(3, 2, padding="same", activation="gelu")(x),
    "pooling": lambda x: layers.UpSampling1D(2)(layers.MaxPooling1D(2)(x)),
    "attention": attention,
    "noise": lambda x: layers.GaussianNoise(0.1)(x),
    "embedding": looked_up,
    "concatenate": lambda x: layers.Concatenate()([x, layers.Dense(2)(x)]),
    "center": lambda x: layers.Lambda(lambda x: x - ops.mean(x, axis=0))(x),
    "sort": lambda x: layers.Lambda(lambda x: x + 0.1 * ops.sort(x, axis=0))(x),
    "like others": lambda x: layers.Lambda(like_other_rows)(x),
    "next row": lambda x: layers.Lambda(lambda x: x - 0.1 * ops.roll(x, 1, axis=0))(x),
    "largest": lambda x: layers.Lambda(lambda x: x / (1.0 + ops.max(ops.abs(x), axis=(0, 1))))(x),
}
HEADS = {"pooled": layers.GlobalAveragePooling1D, "each step": layers.Identity}
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped": lambda: optimizers.RMSprop(0.01, clipvalue=0.01, weight_decay=0.01),
    "accumulating": lambda: optimizers.Adam(0.01, clipnorm=0.05, gradient_accumulation_steps=2),
    "averaging": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}
LOSSES = {
    "mse": lambda: losses.MeanSquaredError(),
    "huber": lambda: losses.Huber(0.3, reduction="sum"),
    "weighted mean": lambda: losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    "root": lambda: lambda y, p: ops.sqrt(ops.mean((y - p) ** 2)),
}


@st.composite
def programs(draw):
    """Draws the settings of one training."""
    rows, is_masked, loss = draw(st.integers(1, 21)), draw(st.booleans()), draw(st.sampled_from(sorted(LOSSES)))
    return {
        "is_masked": is_masked,
        "blocks": draw(st.lists(st.sampled_from(sorted(MASKED if is_masked else BLOCKS)), min_size=1, max_size=3)),
        "head": draw(st.sampled_from(sorted(HEADS))),
        "loss": loss,
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "rows": rows,
        "batch_size": draw(st.integers(min(rows, 2), rows)),
        "towers": draw(st.integers(1, 4)),
        "is_weighted": loss != "root" and draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(whole_trainings, max_examples=6, derandomize=True)
@given(program=programs())
def test_random_models(program):
    """Masks, weights, reductions and options of optimizers meet in Keras's own step."""
    assert_one_devices_result(program)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(whole_trainings, max_examples=200)
@given(program=programs())
def test_many_random_models(program):
    """Each run draws different models."""
    assert_one_devices_result(program)


def assert_one_devices_result(program):
    plain = train(program, lambda model: model)
    towers = train(program, lambda model: keras_dp.DataParallelModel(model, devices=program["towers"]))
    assert_same(plain, towers, 1e-9)


def drawn(program):
    """Returns inputs, targets and sample weights."""
    rng, rows = np.random.default_rng(program["seed"]), program["rows"]
    x = rng.normal(size=(rows, 4, 3))
    if program["is_masked"]:
        x[np.arange(4) >= rng.integers(0, 5, rows)[:, None]] = 0.0
    y = rng.normal(size=(rows, 4, 2) if program["head"] == "each step" else (rows, 2))
    weights = rng.uniform(size=y.shape[:-1]) * (rng.uniform(size=y.shape[:-1]) > 0.3)
    return x, y, weights if program["is_weighted"] else None


def train(program, wrap):
    """Trains and evaluates a program, and returns all results."""
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(program["seed"])
    x, y, weights = drawn(program)
    inputs = keras.Input((4, 3))
    hidden = layers.Masking()(inputs) if program["is_masked"] else inputs
    for name in program["blocks"]:
        hidden = BLOCKS[name](hidden)
    inner = keras.Model(inputs, layers.Dense(2)(HEADS[program["head"]]()(hidden)))
    model, optimizer = wrap(inner), OPTIMIZERS[program["optimizer"]]()
    model.compile(optimizer, LOSSES[program["loss"]](), metrics=["mae"], weighted_metrics=["mse"])
    arguments = {"sample_weight": weights, "batch_size": program["batch_size"], "verbose": 0}
    return {
        "history": model.fit(x, y, epochs=2, shuffle=False, **arguments).history,
        "evaluation": model.evaluate(x, y, return_dict=True, **arguments),
        "variables": [variable.numpy() for variable in inner.variables],
        "optimizer": values(optimizer),
    }
