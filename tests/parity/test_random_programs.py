"""Random programs, composed of models, losses and custom steps, give one device's result on towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, values
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers, ops

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


# Blocks for inputs of the shape (4 steps, channels).
BLOCKS = {
    "dense": lambda x: layers.Dense(3, "tanh")(x),
    "convolution": lambda x: layers.Conv1D(3, 2, padding="same", activation="gelu")(x),
    "pooling": lambda x: layers.UpSampling1D(2)(layers.MaxPooling1D(2)(x)),
    "recurrent": lambda x: layers.GRU(3, return_sequences=True)(x),
    "unrolled": lambda x: layers.SimpleRNN(3, return_sequences=True, unroll=True)(x),
    "attention": attention,
    "batch norm": lambda x: layers.BatchNormalization(momentum=0.7)(x),
    "layer norm": lambda x: layers.LayerNormalization()(x),
    "dropout": lambda x: layers.Dropout(0.3)(x),
    "noise": lambda x: layers.GaussianNoise(0.1)(x),
    "embedding": looked_up,
    "concatenate": lambda x: layers.Concatenate()([x, layers.Dense(2)(x)]),
    "center": lambda x: layers.Lambda(lambda x: x - ops.mean(x, axis=0))(x),
    "sort": lambda x: layers.Lambda(lambda x: x + 0.1 * ops.sort(x, axis=0))(x),
    "like others": lambda x: layers.Lambda(like_other_rows)(x),
    "next row": lambda x: layers.Lambda(lambda x: x - 0.1 * ops.roll(x, 1, axis=0))(x),
    "largest": lambda x: layers.Lambda(lambda x: x / (1.0 + ops.max(ops.abs(x), axis=(0, 1))))(x),
}


def contrastive(y_true, y_pred):
    """Compares each answer with the targets of all rows; its own target should be the most similar."""
    similarities = ops.matmul(y_pred, ops.transpose(y_true))
    labels = ops.arange(ops.shape(y_pred)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True))


def correlation(y_true, y_pred):
    """Adds the norm of the covariance: its gradient grows no faster than the answers, since divergence amplifies rounding."""
    centered = y_pred - ops.mean(y_pred, axis=0)
    covariance = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(y_pred)[0], "float64")
    return ops.mean((y_true - y_pred) ** 2) + 0.1 * ops.sqrt(ops.sum(covariance**2) + 1e-3)


def hardest(y_true, y_pred):
    """Returns the mean error of the half of the rows with the largest errors."""
    errors = ops.sum(ops.abs(y_true - y_pred), axis=-1)
    return tf.reduce_mean(tf.math.top_k(errors, (tf.shape(errors)[0] + 1) // 2).values)


LOSSES = {
    "mse": lambda y_true, y_pred: ops.mean((y_true - y_pred) ** 2),
    "huber": lambda y_true, y_pred: keras.losses.Huber(0.3, reduction="sum")(y_true, y_pred),
    "cosine": lambda y_true, y_pred: keras.losses.CosineSimilarity()(y_true, y_pred),
    "root": lambda y_true, y_pred: ops.sqrt(ops.mean((y_true - y_pred) ** 2)),
    "contrastive": contrastive,
    "correlation": correlation,
    "hardest": hardest,
}
GRADIENTS = ["plain", "penalty", "micro-batches", "two passes"]
INPUTS = ["as they are", "noise", "mixed", "masked"]
CLIPPING = ["none", "global norm", "by norm", "sign"]
UPDATES = ["one optimizer", "two optimizers", "accumulation", "if small", "moving average"]


class Program(keras.Model):
    """Trains by a step that is composed of pieces."""

    def set_up(self, pieces):
        """Makes the variables that the pieces need."""
        self.pieces = pieces
        self.seeds = keras.random.SeedGenerator(5)
        self.first, self.second = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)
        self.count = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="count")
        self.kept = [
            self.add_weight(shape=variable.shape, initializer="zeros", trainable=False, name=f"kept_{i}")
            for i, variable in enumerate(self.trainable_variables)
        ]
        variables = self.trainable_variables
        parts = (variables[::2], variables[1::2]) if pieces["update"] == "two optimizers" else (variables, variables)
        for optimizer, part in zip((self.first, self.second), parts, strict=True):
            optimizer.build(part)

    def train_step(self, data):
        x, y = data
        x, y = self._fed(x, y)
        gradients = {"penalty": self._penalized, "micro-batches": self._in_micro_batches, "two passes": self._twice}
        loss, found = gradients.get(self.pieces["gradients"], self._plain)(x, y)
        found = self._clipped(found)
        self._learn(found, loss)
        return {"loss": loss, "norm": tf.linalg.global_norm(found), "count": tf.cast(self.count, "float64")}

    def test_step(self, data):
        x, y = data
        answers = self(x, training=False)
        return {"loss": self._error(y, answers), "spread": ops.std(answers)}

    def _error(self, y, answers):
        return LOSSES[self.pieces["loss"]](y, answers)

    def _fed(self, x, y):
        if self.pieces["inputs"] == "noise":
            return x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds), y
        if self.pieces["inputs"] == "mixed":
            share = keras.random.uniform((ops.shape(x)[0], 1, 1), seed=self.seeds)
            return share * x + (1.0 - share) * x[::-1], share[:, 0] * y + (1.0 - share[:, 0]) * y[::-1]
        if self.pieces["inputs"] == "masked":
            keep = keras.random.uniform((ops.shape(x)[0], 4, 1), seed=self.seeds) < 0.8
            return ops.where(keep, x, ops.mean(x, axis=1, keepdims=True)), y
        return x, y

    def _plain(self, x, y):
        with tf.GradientTape() as tape:
            loss = self._error(y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables, unconnected_gradients="zero")

    def _penalized(self, x, y):
        """Adds a penalty that keeps the norm of the gradient by the inputs near one."""
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                answers = self(x, training=True)
            slopes = inner.gradient(answers, x)
            norms = tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2]) + 1e-3)
            loss = self._error(y, answers) + 0.1 * tf.reduce_mean((norms - 1.0) ** 2)
        return loss, tape.gradient(loss, self.trainable_variables, unconnected_gradients="zero")

    def _in_micro_batches(self, x, y):
        """Averages the gradients of three parts of the batch, one after the other."""
        rows = tf.shape(x)[0]

        def body(i, total, *sums):
            begin = rows * i // 3
            end = tf.maximum(rows * (i + 1) // 3, begin + 1)
            loss, gradients = self._plain(x[begin:end], y[begin:end])
            return i + 1, total + loss, *[a + b / 3.0 for a, b in zip(sums, gradients, strict=True)]

        zeros = [tf.zeros(variable.shape, "float64") for variable in self.trainable_variables]
        start = [tf.constant(0), tf.constant(0.0, "float64"), *zeros]
        _, loss, *gradients = tf.while_loop(lambda i, *_: i < 3, body, start)
        return loss, gradients

    def _twice(self, x, y):
        """Takes the gradient at the end of a trial step, which it then takes back."""
        _, gradients = self._plain(x, y)
        steps = [0.01 * gradient / (tf.norm(gradient) + 1e-3) for gradient in gradients]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        loss, gradients = self._plain(x, y)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        return loss, gradients

    def _clipped(self, gradients):
        if self.pieces["clipping"] == "global norm":
            return tf.clip_by_global_norm(gradients, 0.1)[0]
        if self.pieces["clipping"] == "by norm":
            return [tf.clip_by_norm(gradient, 0.05) for gradient in gradients]
        return gradients

    def _learn(self, gradients, loss):
        variables, update = self.trainable_variables, self.pieces["update"]
        if update == "two optimizers":
            self.first.apply(gradients[::2], variables[::2])
            self.second.apply(gradients[1::2], variables[1::2])
        elif update == "accumulation":
            for kept, gradient in zip(self.kept, gradients, strict=True):
                kept.assign_add(gradient)
            tf.cond(self.count.value % 2 == 1, self._apply_kept, lambda: tf.constant(0))
        elif update == "if small":
            tf.cond(loss < 1.0, lambda: self._descend(self.first, gradients), lambda: self._descend(self.second, gradients))
        else:
            self.second.apply(gradients, variables)
        if update == "moving average":
            for kept, variable in zip(self.kept, variables, strict=True):
                kept.assign(0.9 * kept + 0.1 * variable)
        self.count.assign_add(1)

    def _descend(self, optimizer, gradients):
        optimizer.apply(gradients, self.trainable_variables)
        return tf.constant(0)

    def _apply_kept(self):
        self._descend(self.first, [kept.value / 2.0 for kept in self.kept])
        for kept in self.kept:
            kept.assign(ops.zeros_like(kept))
        return tf.constant(0)


@st.composite
def programs(draw):
    """Draws the settings of one training."""
    rows = draw(st.integers(1, 19))
    return {
        "blocks": draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3)),
        "head": draw(st.sampled_from(["pooled", "flat"])),
        "loss": draw(st.sampled_from(sorted(LOSSES))),
        "gradients": draw(st.sampled_from(GRADIENTS)),
        "inputs": draw(st.sampled_from(INPUTS)),
        "clipping": draw(st.sampled_from(CLIPPING)),
        "update": draw(st.sampled_from(UPDATES)),
        "rows": rows,
        "batch_size": draw(st.integers(min(rows, 2), rows)),
        "towers": draw(st.integers(2, 4)),
        "seed": draw(st.integers(0, 99)),
    }


@settings(whole_trainings, max_examples=6, derandomize=True)
@given(program=programs())
def test_random_programs(program):
    assert_one_devices_result(program)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(whole_trainings, max_examples=200)
@given(program=programs())
def test_many_random_programs(program):
    """Each run draws different programs."""
    assert_one_devices_result(program)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01, weight_decay=0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}
COMPILED_LOSSES = {
    "mse": lambda: keras.losses.MeanSquaredError(),
    "huber": lambda: keras.losses.Huber(0.3, reduction="sum"),
    "weighted mean": lambda: keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    "root": lambda: LOSSES["root"],
}
# Blocks that take masks.
MASKED = ["batch norm", "dense", "dropout", "layer norm", "recurrent", "unrolled"]


@st.composite
def compiled_models(draw):
    """Draws the settings of one training by Keras's own step."""
    rows, is_masked, loss = draw(st.integers(1, 21)), draw(st.booleans()), draw(st.sampled_from(sorted(COMPILED_LOSSES)))
    return {
        "is_masked": is_masked,
        "blocks": draw(st.lists(st.sampled_from(MASKED if is_masked else sorted(BLOCKS)), min_size=1, max_size=3)),
        "head": draw(st.sampled_from(["pooled", "each step"])),
        "loss": loss,
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "rows": rows,
        "batch_size": draw(st.integers(min(rows, 2), rows)),
        "towers": draw(st.integers(1, 4)),
        "is_weighted": loss != "root" and draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(whole_trainings, max_examples=6, derandomize=True)
@given(program=compiled_models())
def test_random_models(program):
    """Masks, weights, reductions and options of optimizers meet in Keras's own step."""
    assert_one_devices_result(program)


def assert_one_devices_result(program):
    plain = train(program, lambda model: model)
    towers = train(program, lambda model: keras_dp.DataParallelModel(model, devices=program["towers"]))
    assert_same(plain, towers, 1e-9)


def drawn(program):
    """Returns inputs, targets and sample weights."""
    rng, rows = np.random.default_rng(program["seed"]), program["rows"]
    x = rng.normal(size=(rows, 4, 3))
    if program.get("is_masked"):
        x[np.arange(4) >= rng.integers(0, 5, rows)[:, None]] = 0.0
    y = rng.normal(size=(rows, 4, 2) if program["head"] == "each step" else (rows, 2))
    weights = rng.uniform(size=y.shape[:-1]) * (rng.uniform(size=y.shape[:-1]) > 0.3)
    return x, y, weights if program.get("is_weighted") else None


def train(program, wrap):
    """Trains and evaluates a program, and returns all results."""
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(program["seed"])
    x, y, weights = drawn(program)

    inputs = keras.Input((4, 3))
    hidden = layers.Masking()(inputs) if program.get("is_masked") else inputs
    for name in program["blocks"]:
        hidden = BLOCKS[name](hidden)
    heads = {"pooled": layers.GlobalAveragePooling1D, "flat": layers.Flatten, "each step": layers.Identity}
    outputs = layers.Dense(2)(heads[program["head"]]()(hidden))
    if "optimizer" in program:
        inner = keras.Model(inputs, outputs)
        model = wrap(inner)
        optimizer, loss = OPTIMIZERS[program["optimizer"]](), COMPILED_LOSSES[program["loss"]]()
        model.compile(optimizer, loss, metrics=["mae"], weighted_metrics=["mse"])
        optimizers = [optimizer]
    else:
        inner = Program(inputs, outputs)
        inner.set_up(program)
        model = wrap(inner)
        model.compile()
        optimizers = [inner.first, inner.second]
    arguments = {"sample_weight": weights, "batch_size": program["batch_size"], "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **arguments).history
    return {
        "history": history,
        "evaluation": model.evaluate(x, y, return_dict=True, **arguments),
        "variables": [variable.numpy() for variable in inner.variables],
        "optimizers": [values(optimizer) for optimizer in optimizers],
    }
