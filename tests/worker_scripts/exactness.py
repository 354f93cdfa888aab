"""Train a plain model on one device and its twin on the towers of all workers, and compare them on every worker.

exactness.py WORKERS TOWERS [CASE ...]    TOWERS is "12" for one tower and for two, or "alternate" for one or two in turn

Prints "passed <case>" for each case, and "done" at the end.
"""

import itertools
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, fit, fit_evaluate_predict, values

import keras_dp
from keras_dp.workers.collectives import Collectives

keras_dp.use_logical_cpus(2)
workers = keras_dp.connect_workers(timeout=15, start_timeout=120)
assert workers.count == int(sys.argv[1])
assert workers.is_chief == (workers.index == 0)

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def numbers(rows, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, *shape))


def labels(rows, classes, seed=1):
    return np.random.default_rng(seed).integers(0, classes, rows)


def dataset_of(batches, signature, known=True):
    """Returns a dataset of batches, whose number is known or not."""
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else data


def given(model, own, together):
    """Returns what a model is given, and further arguments: a wrapper gets this worker's shard, plain Keras all batches."""
    return (own, {"sharded": True}) if isinstance(model, keras_dp.DataParallelModel) else (together, {})


def assert_same_everywhere(arrays):
    """Asserts that all workers have the same bits."""
    own = np.concatenate([array.astype("float64").reshape(-1) for array in arrays]).tobytes()
    assert set(workers.collectives.exchange(own)) == {own}


def mlp():
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3, activation="softmax")]
    )


def classifier(optimizer=lambda: keras.optimizers.Adam(0.01), metrics=("accuracy",)):
    return lambda: {"optimizer": optimizer(), "loss": "sparse_categorical_crossentropy", "metrics": list(metrics)}


@case
def even_and_uneven_batches(towers):
    """Trains on even batches, uneven batches, a last batch of one row, which leaves a worker none, and a single row."""
    datasets = [((numbers(25, 5), labels(25, 3)), 8), ((numbers(14, 5), labels(14, 3)), 5), ((numbers(1, 5), labels(1, 3)), 1)]
    assert_same_script(mlp, lambda model: fit_evaluate_predict(model, classifier(), datasets, epochs=1), towers)


@case
def synchronized_batch_norm(towers):
    """Trains convolutions with batch normalization over all workers, momentum, and each gradient clipped."""

    def build():
        layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
        return keras.Sequential(
            [keras.Input((6, 6, 2)), *layers, keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
        )

    data = (numbers(9, 6, 6, 2), labels(9, 3))
    compiled = classifier(lambda: keras.optimizers.SGD(0.1, momentum=0.875, nesterov=True, clipnorm=0.05))
    assert_same_script(build, lambda model: fit_evaluate_predict(model, compiled, [(data, 4)]), towers)


@case
def masks_dropout_and_sample_weights(towers):
    """Trains with a masked batch normalization and loss, sample weights, and dropout, which draws one device's numbers."""

    def build():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
        hidden = keras.layers.LSTM(3, return_sequences=True)(keras.layers.BatchNormalization()(hidden))
        hidden = keras.layers.Dropout(0.5, seed=3)(hidden)
        return keras.Model(tokens, keras.layers.TimeDistributed(keras.layers.Dense(1))(hidden))

    rng = np.random.default_rng(4)
    tokens = rng.integers(1, 9, (9, 6)) * (np.arange(6) < rng.integers(1, 7, (9, 1)))
    data = (tokens, numbers(9, 6, 1), rng.uniform(0.1, 2.0, (9, 6)))

    def compiled():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return {"optimizer": keras.optimizers.Adam(0.01), "loss": loss, "weighted_metrics": ["mae"]}

    assert_same_script(build, lambda model: fit_evaluate_predict(model, compiled, [(data, 4)]), towers)


@case
def sparse_gradients(towers):
    """Trains embeddings, whose gradients are sparse, with a global norm over all workers' gradients."""

    def build():
        tokens = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Embedding(50, 3)(tokens)
        bags = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(500, 3, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(keras.ops.concatenate([keras.layers.Flatten()(hidden), bags], -1)))

    data = (np.random.default_rng(5).integers(0, 12, (9, 4)), numbers(9, 1))
    compiled = lambda: {"optimizer": keras.optimizers.Adam(0.1, global_clipnorm=0.1), "loss": "mse"}  # noqa: E731
    assert_same_script(build, lambda model: fit(model, compiled, [(data, 4)]), towers)


@case
def losses_and_metrics_that_couple_rows(towers):
    """Trains several outputs with a root of a mean over the global batch, a metric that does not add up, and a regularizer."""

    def build():
        x = keras.Input((5,))
        hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))(x)
        return keras.Model(x, {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(2, activation="softmax")(hidden)})

    def root(y_true, y_pred):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))

    def spread(y_true, y_pred):
        return keras.ops.max(y_pred) - keras.ops.min(y_pred)

    data = (numbers(9, 5), {"a": numbers(9, 1), "b": labels(9, 2)})

    def compiled():
        return {
            "optimizer": keras.optimizers.RMSprop(0.01, global_clipnorm=0.3),
            "loss": {"a": root, "b": "sparse_categorical_crossentropy"},
            "metrics": {"a": [spread, "mse"], "b": ["accuracy"]},
        }

    assert_same_script(build, lambda model: fit_evaluate_predict(model, compiled, [(data, 4)]), towers)


@case
def datasets_shuffled_alike(towers):
    """Trains on arrays that `fit` shuffles, and on a shuffled dataset of unknown length, with several steps in one call."""
    x, y = numbers(22, 5), labels(22, 3)

    def script(model):
        model.compile(**classifier()(), steps_per_execution=3)
        keras.utils.set_random_seed(11)
        first = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(22).filter(lambda row, label: label < 2).batch(4)
        second = model.fit(dataset, epochs=2, verbose=0).history
        return [first, second, model.predict(tf.data.Dataset.from_tensor_slices(x).batch(7), verbose=0)]

    assert_same_script(mlp, script, towers)


@case
def fewer_rows_than_workers(towers):
    """Calls methods for single batches, of which some have one row, and workers without rows exchange as others do.

    The number of rows is known, and sums follow sums.
    """

    def build():
        x = keras.Input((5,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(x))
        hidden = keras.layers.Lambda(lambda h: h * keras.ops.sum(h, axis=0))(keras.layers.Dense(4)(hidden))
        hidden = keras.layers.Lambda(lambda h: h + keras.ops.sum(keras.ops.square(h)))(hidden)
        return keras.Model(x, keras.layers.Dense(3, "softmax")(keras.layers.BatchNormalization()(hidden)))

    def script(model):
        model.compile(**classifier(lambda: keras.optimizers.SGD(0.01))())
        results = [model.train_on_batch(numbers(2, 5, seed=i), labels(2, 3, seed=i)) for i in range(2)]
        model.compile(**classifier(lambda: keras.optimizers.SGD(0.02))())
        results.append(model.train_on_batch(numbers(1, 5), labels(1, 3)))
        return [*results, model.test_on_batch(numbers(7, 5), labels(7, 3)), model.predict_on_batch(numbers(7, 5))]

    assert_same_script(build, script, towers)


@case
def accumulation_and_placement(towers):
    """Trains with gradient accumulation, also weighted by rows, moving averages, and variables spread over the towers."""
    x, y = data = (numbers(14, 5), labels(14, 3))
    averaging = {"use_ema": True, "ema_overwrite_frequency": 3}
    compiled = classifier(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, **averaging))
    assert_same_script(mlp, lambda model: fit(model, compiled, [(data, 4)]), towers, {"parameter_device": "sharded"})

    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    one = mlp()
    one.set_weights(parallel.get_weights())
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    parallel.compile(keras_dp.DataParallelOptimizer(accumulating, accumulate="rows"), "sparse_categorical_crossentropy")
    one.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    for model, batch_size in ((parallel, 4), (one, 7)):
        model.fit(x[:7], y[:7], batch_size=batch_size, verbose=0, shuffle=False)
    assert_same(one.get_weights(), parallel.get_weights(), 1e-9)


@case
def gradients_in_half_the_bytes(towers):
    """Sends the gradients as bfloat16 between workers as well, in one message."""
    data = (numbers(14, 5), labels(14, 3))
    compiled = classifier(lambda: keras.optimizers.SGD(0.1))
    one = mlp()
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers, gradient_dtype="bfloat16")
    one.set_weights(parallel.get_weights())
    with mock.patch.object(Collectives, "sum", autospec=True, side_effect=Collectives.sum) as summed:
        fit(parallel, compiled, [(data, 4)])
    fit(one, compiled, [(data, 4)])
    dtypes = [call.args[1].dtype for call in summed.call_args_list]
    assert dtypes.count(tf.bfloat16) == 1, dtypes
    difference = max(np.abs(a - b).max() for a, b in zip(one.get_weights(), parallel.get_weights(), strict=True))
    assert 1e-6 < difference < 1e-2, difference


@case
def other_modes_of_batch_norm(towers):
    """Normalizes each slice by itself; the moving statistics follow all slices ("local") or the first slice ("first")."""
    x, y = numbers(24, 5), numbers(24, 1)
    for mode in ("local", "first"):
        model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        kernel = model.layers[1].kernel.numpy()
        parallel = keras_dp.DataParallelModel(model, devices=towers, batch_norm=mode)
        parallel.compile(keras.optimizers.SGD(0.1), "mse")
        parallel.fit(x, y, batch_size=24, verbose=0, shuffle=False)
        slices = np.split(x, towers * workers.count)
        followed = x if mode == "local" else slices[0]
        moving_mean, moving_variance = (variable.numpy() for variable in model.layers[0].non_trainable_variables)
        np.testing.assert_allclose(moving_mean, 0.01 * followed.mean(0), atol=1e-9)
        np.testing.assert_allclose(moving_variance, 0.99 + 0.01 * followed.var(0), atol=1e-9)
        normalized = np.concatenate([(part - part.mean(0)) / np.sqrt(part.var(0) + 0.001) for part in slices])
        change = -0.1 * 2 * normalized.T @ (normalized @ kernel - y) / 24
        np.testing.assert_allclose(model.layers[1].kernel.numpy() - kernel, change, atol=1e-9)


@case
def batches_of_other_sizes_are_refused(towers):
    """Refuses global batches whose numbers of rows differ between workers, also where all rows are gathered in each step."""
    rows = 12 + 4 * (workers.index == 0)
    batches = tf.data.Dataset.from_tensor_slices((numbers(16, 5)[:rows], labels(16, 3)[:rows])).batch(rows // 2).repeat(2)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    generator = ((x,) for x, _ in batches)
    for call, data in ((parallel.fit, batches), (parallel.predict, generator)):
        with pytest.raises(ValueError, match="different numbers of rows in 4 steps"):
            call(data, verbose=0)


@case
def shards_of_the_user(towers):
    """Joins the workers' batches to global ones with sharded=True, also where some workers have no rows or run out of them."""
    x, y = numbers(30, 5), labels(30, 3)
    # Worker 0 has 3 batches of 3 rows and one of 1 row, the last worker has none, and the others have 2 batches of 2 rows.
    rows = {0: (3, 10), workers.count - 1: (2, 0)}
    parts = [rows.get(i, (2, 4)) for i in range(workers.count)]
    begins = np.cumsum([0] + [size for _, size in parts])
    signature = (tf.TensorSpec((None, 5), tf.float64), tf.TensorSpec((None,), tf.int64))

    def shard(i):
        batch, size = parts[i]
        ends = [*range(begins[i], begins[i] + size, batch), begins[i] + size]
        return [(x[begin:end], y[begin:end]) for begin, end in itertools.pairwise(ends)]

    shards = [shard(i) for i in range(workers.count)]
    steps = [[batch for batch in step if batch] for step in itertools.zip_longest(*shards)]
    together = [tuple(np.concatenate(column) for column in zip(*step, strict=True)) for step in steps]
    own = shards[workers.index]
    for known in (True, False):
        # The second loss couples rows.
        loss = {} if known else {"loss": lambda y, y_pred: keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred)))}

        def script(model):
            data, options = given(model, dataset_of(own, signature, known), dataset_of(together, signature, known))  # noqa: B023
            model.compile(**classifier()() | loss)  # noqa: B023
            history = model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data, **options).history
            return [history, model.evaluate(data, verbose=0, **options), model.predict(data, verbose=0, **options)]

        assert_same_script(mlp, script, towers)


@case
def texts_that_each_worker_pads_by_itself(towers):
    """Joins shards whose texts have other lengths on each worker, which TensorFlow knows in the trace; one has single words."""
    length = 1 + 4 * np.arange(workers.count)[::-1]
    words = np.random.default_rng(0).integers(1, 500, (4 * workers.count, length.max()))
    for i in range(workers.count):
        words[4 * i : 4 * i + 4, length[i] :] = 0
    targets = numbers(len(words), 1)

    def build():
        tokens = keras.Input((None,), dtype="int64")
        bags = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(500, 3, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(bags))

    def script(model):
        model.compile(keras.optimizers.Adam(0.1), "mse")
        if not isinstance(model, keras_dp.DataParallelModel):
            rows = [4 * i + k + j for k in (0, 2) for i in range(workers.count) for j in (0, 1)]
            return model.fit(words[rows], targets[rows], batch_size=2 * workers.count, shuffle=False, verbose=0).history
        part = slice(4 * workers.index, 4 * workers.index + 4)
        own = tf.data.Dataset.from_tensor_slices((words[part, : length[workers.index]], targets[part])).batch(2)
        return model.fit(own, verbose=0, sharded=True).history

    assert_same_script(build, script, towers)


@case
def predictions_of_own_rows(towers):
    """Predicts rows, strings and more on each worker: for all rows, and for its own, which no other worker sends it."""

    class Predicts(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def predict_step(self, data):
            dense = self(data, training=False)
            at_home = tf.numpy_function(lambda rows: rows[:, :1] * 2, [dense], dense.dtype)
            at_home.set_shape([None, 1])
            words = tf.strings.join([tf.strings.as_string(tf.argmax(dense, axis=1)), "é"])
            return {
                "dense": dense,
                "repeated": tf.broadcast_to(dense[:, :1], [tf.shape(dense)[0], 4]),
                "input": data,
                "words": words,
                "int8": tf.cast(tf.argmax(dense, axis=1), tf.int8),
                "at home": at_home,
                "kernel": self.dense.kernel + 0.0,
                "pairs": tf.reshape(dense, [-1, 1]),
            }

    x = numbers(25, 5)
    one = Predicts()
    one(x[:1])
    parallel = keras_dp.DataParallelModel(Predicts(), devices=towers)
    parallel.inner_model(x[:1])
    parallel.inner_model.set_weights(one.get_weights())
    for batch in (8, 1):
        data = tf.data.Dataset.from_tensor_slices(x[:16]).batch(batch, drop_remainder=True)
        for given in ({"x": x[: 3 * batch - 1], "batch_size": batch}, {"x": data}):
            expected, received = (model.predict(**given, verbose=0) for model in (one, parallel))
            words = expected.pop("words"), received.pop("words")
            assert words[0].tolist() == words[1].tolist()
            assert_same(expected, received, 1e-9)
            own = parallel.predict(**given, verbose=0, rows="shard")
            begins = range(0, len(expected["dense"]), batch)
            sizes = [min(batch, len(expected["dense"]) - begin) for begin in begins]
            mine = [
                begin + row
                for begin, size in zip(begins, sizes, strict=True)
                for row in range(size * workers.index // workers.count, size * (workers.index + 1) // workers.count)
            ]
            assert own.pop("words").tolist() == words[0][mine].tolist()
            assert len(own["kernel"]) == len(begins) * 5
            assert_same(expected["pairs"], own["pairs"], 1e-9)
            for name in ("dense", "repeated", "input", "at home", "int8"):
                assert_same(expected[name][mine], own[name], 1e-9)


@keras.saving.register_keras_serializable()
class Coupled(keras.Model):
    """Defines a user's step with two optimizers, random numbers and sparse gradients, which compares rows with rows."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(20, 4)
        self.encoder = keras.Sequential(
            [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.4), keras.layers.Dense(4)]
        )
        self.critic = keras.layers.Dense(1)
        self.critic_optimizer = keras.optimizers.SGD(0.05, momentum=0.875)
        self.generator = keras.random.SeedGenerator(17)

    def call(self, x, training=False):
        return self.critic(self.encoder(x, training=training))

    def train_step(self, data):
        x, tokens = data
        with tf.GradientTape(persistent=True) as tape:
            code = self.encoder(x, training=True)
            code = code + keras.ops.mean(self.embedding(tokens), axis=1)
            code = code + 0.1 * keras.random.normal(keras.ops.shape(code), dtype="float64", seed=self.generator)
            # The likeness of each row with each other row, and the spread from the smallest to the largest.
            likeness = code @ keras.ops.transpose(code)
            own = keras.ops.arange(keras.ops.shape(code)[0])
            contrast = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(own, likeness, from_logits=True))
            spread = keras.ops.max(code, axis=0) - keras.ops.min(code, axis=0)
            middle = keras.ops.sort(x[:, 0])[keras.ops.shape(x)[0] // 2]
            critic_loss = keras.ops.mean(keras.ops.square(self.critic(tf.stop_gradient(code)) - middle))
            loss = contrast + 0.1 * keras.ops.mean(spread) + 0.01 * keras.ops.mean(self.critic(code))
        weights = [*self.encoder.trainable_variables, *self.embedding.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)
        return {"loss": loss, "critic": critic_loss, "all": keras.ops.all(x > -9.0), "any": keras.ops.any(x > 1.0)}


@case
def own_steps(towers):
    """Trains by a user's step whose variables are created when it is traced, also on a last batch of one row."""
    data = (numbers(13, 5), labels(13 * 3, 20).reshape(13, 3))

    def script(model):
        model.compile(optimizer=keras.optimizers.Adam(0.01))
        histories = [model.fit(*data, batch_size=size, epochs=2, shuffle=False, verbose=0).history for size in (4, 13)]
        inner = getattr(model, "inner_model", model)
        state = [values(inner.critic_optimizer), inner.generator.state.numpy()]
        return [histories, state, model.predict(data[0], batch_size=5, verbose=0)]

    assert_same_script(Coupled, script, towers)


@case
def own_steps_of_models_whose_seeds_differ(towers):
    """Trains workers whose steps create variables from different seeds and names, and ends with the chief's values."""
    keras.utils.set_random_seed(100 + workers.index)
    for _ in range(workers.index):
        [keras.layers.Dense(1) for _ in range(8)], keras.Sequential()
    parallel = keras_dp.DataParallelModel(Coupled(), devices=towers)
    parallel.compile(optimizer="adam")
    parallel.fit(numbers(8, 5), labels(8 * 3, 20).reshape(8, 3), batch_size=4, epochs=2, verbose=0)
    optimizers = [parallel.inner_model.optimizer, parallel.inner_model.critic_optimizer]
    assert_same_everywhere([*parallel.get_weights(), *(value for optimizer in optimizers for value in values(optimizer))])


@keras.saving.register_keras_serializable()
class Factors(keras.Model):
    """Factors a matrix of each row, and reads a number from a text of each row: neither takes rows of ones or empty texts.

    Its own step compares matrices, whose size is another one in each step, over the rows.
    """

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        numbers = tf.strings.to_number(inputs["text"], tf.float64)
        lower = tf.debugging.check_numerics(tf.linalg.cholesky(inputs["matrix"]), "no factor")
        return self.dense(tf.stack([numbers, tf.reduce_sum(tf.math.log(tf.linalg.diag_part(lower)), axis=1)], axis=1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x)
            scaled = x["matrix"] * tf.reduce_mean(self.dense.kernel)
            of_rows = tf.reduce_mean(tf.reduce_mean(scaled, axis=0) * tf.reduce_max(scaled, axis=0))
            lowest = tf.reduce_mean(tf.abs(tf.sort(scaled, axis=0)[0]))
            loss = tf.reduce_mean((predicted - y) ** 2) + 0.1 * of_rows + 0.1 * lowest
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "size": tf.shape(scaled)[1], "rows": tf.shape(scaled)[0]}


@case
def rows_of_which_no_other_can_take_the_place(towers):
    """Trains on matrices that have a factor, and on texts that are numbers, of which a worker has none, or runs out."""
    rng = np.random.default_rng(5)
    signature = (
        {"matrix": tf.TensorSpec([None, None, None], tf.float64), "text": tf.TensorSpec([None], tf.string)},
        tf.TensorSpec([None, 1], tf.float64),
    )

    def batch(rows, size):
        factors = np.tril(rng.normal(size=(rows, size, size))) + 2 * np.eye(size)
        texts = np.array([f"{number:.3f}" for number in rng.normal(size=rows)])
        return {"matrix": factors @ factors.transpose(0, 2, 1), "text": texts}, rng.normal(size=(rows, 1))

    together = [batch(rows, size) for rows, size in ((7, 3), (6, 4), (5, 2))]

    def shard(batch, count):
        """Returns this worker's rows of a batch that is divided among the first `count` workers."""
        rows = slice(*(len(batch[1]) * (workers.index + i) // count for i in (0, 1)))
        return keras.tree.map_structure(lambda part: part[rows], batch)

    # The last worker has no rows with one tower, and with two rows of the first batch alone.
    own = [shard(batch, workers.count - (k >= towers - 1)) for k, batch in enumerate(together)]
    own = [batch for batch in own if len(batch[1])]

    def script(model):
        data, options = given(model, dataset_of(own, signature), dataset_of(together, signature))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        history = model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data, **options).history
        return [history, model.evaluate(data, verbose=0, **options), model.predict(data, verbose=0, **options)]

    assert_same_script(Factors, script, towers)


@case
def whole_and_ragged_tensors(towers):
    """Trains on batches with a table that stays whole, a ragged tensor, and rows that are sorted over the global batch."""

    class Lookup(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = keras.layers.Dense(2)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                found = keras.ops.take(data["table"], data["index"], axis=0)
                lengths = keras.ops.cast(data["ragged"].row_lengths(), "float64")[:, None]
                order = tf.argsort(data["x"][:, 0])
                hidden = self.scale(keras.ops.take(data["x"], order, axis=0) + found * lengths)
                loss = keras.ops.mean(keras.ops.square(hidden)) + tf.reduce_mean(data["ragged"].to_tensor())
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    ragged = tf.ragged.constant([[1.0] * (i % 4) for i in range(9)], dtype="float64")
    parts = {"x": numbers(9, 3), "index": labels(9, 4), "ragged": ragged}
    data = tf.data.Dataset.from_tensor_slices(parts).batch(4).map(lambda batch: {**batch, "table": numbers(4, 3, seed=2)})

    def script(model):
        model.compile(optimizer="adam")
        return model.fit(data, epochs=2, verbose=0).history

    assert_same_script(Lookup, script, towers, {"whole": ["table"]})


@case
def several_numbers_of_rows(towers):
    """Trains on tensors of which the dataset's types state other rows, and predicts from tensors that all stay whole."""

    class Lookup(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = keras.layers.Dense(2)

        def call(self, inputs):
            of_table = self.scale(inputs["table"])
            return of_table if "x" not in inputs else self.scale(inputs["x"]) + keras.ops.mean(of_table, axis=0)

    def batch(i):
        return {"x": numbers(7, 3, seed=i), "table": numbers(5, 3, seed=i + 10)}, numbers(7, 2, seed=i + 20)

    data = tf.data.Dataset.from_tensors(batch(0)).concatenate(tf.data.Dataset.from_tensors(batch(1)))
    tables = data.map(lambda x, y: {"table": x["table"]})

    def script(model):
        model.compile("adam", "mse")
        history = model.fit(data, epochs=2, verbose=0).history
        return [history, model.evaluate(data, verbose=0), model.predict(data, verbose=0), model.predict(tables, verbose=0)]

    for wrapper_arguments in ({"whole": ["table"]}, {}):
        assert_same_script(Lookup, script, towers, wrapper_arguments)


@case
def words_beside_sentences(towers):
    """Sorts the encoded words of all rows and a mean for each row, where the number of words in a row is not known."""

    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.encode = keras.layers.Dense(2)

        def train_step(self, words):
            with tf.GradientTape() as tape:
                encoded = self.encode(words)
                joined = tf.concat([tf.reshape(encoded, [-1, 2]), tf.reduce_mean(encoded, 1)], 0)
                loss = tf.reduce_mean(joined**2) + tf.reduce_mean(tf.sort(joined, axis=0)[:3])
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    data = tf.data.Dataset.from_tensor_slices(numbers(9, 5, 3)).padded_batch(4, padded_shapes=[None, 3])

    def script(model):
        model.compile(optimizer="adam")
        return model.fit(data, epochs=2, verbose=0).history

    assert_same_script(Words, script, towers)


@case
def seeds_that_differ(towers):
    """Trains the chief's model although the workers' scripts have set different seeds."""
    x, y = numbers(16, 5), labels(16, 3)
    keras.utils.set_random_seed(100 + workers.index)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    parallel.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert_same_everywhere(parallel.get_weights())
    if workers.is_chief:
        keras.utils.set_random_seed(100)
        one = mlp()
        one.compile(**classifier()())
        one.fit(x, y, batch_size=4, epochs=2, verbose=0)
        assert_same(one.get_weights(), parallel.get_weights(), 1e-9)


@case
def recalibrated_batch_norm(towers):
    """Recalibrates batch normalization to the moments of all rows."""
    x = numbers(13, 5)

    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization()])

    one = build()
    keras_dp.recalibrate_batch_norm(one, x, batch_size=4, verbose=0)
    np.testing.assert_allclose(one.layers[0].moving_mean.numpy(), x.mean(0), atol=1e-12)
    np.testing.assert_allclose(one.layers[0].moving_variance.numpy(), x.var(0), atol=1e-12)


@case
def only_the_chief_writes(towers):
    """Writes files, by callbacks and by `save()`, on the chief only; the logs are the same on all workers."""
    out = Path(tempfile.mkdtemp())
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    callbacks = [keras.callbacks.CSVLogger(out / "log.csv"), keras.callbacks.ModelCheckpoint(out / "best.keras")]
    history = parallel.fit(numbers(12, 5), labels(12, 3), batch_size=5, epochs=2, verbose=0, callbacks=callbacks).history
    parallel.save(out / "model.keras")
    parallel.save_weights(out / "model.weights.h5")
    names = {"log.csv", "best.keras", "model.keras", "model.weights.h5"}
    assert {path.name for path in out.iterdir()} == (names if workers.is_chief else set())
    assert len(set(workers.collectives.exchange(repr(history).encode()))) == 1
    if workers.is_chief:
        assert_same(parallel.get_weights(), keras.models.load_model(out / "model.keras").get_weights(), 0)


@case
def what_is_restored_on_the_chief_is_for_all(towers):
    """Resumes all workers with the weights and the epoch of the backup that the chief alone has."""
    out = Path(tempfile.mkdtemp())
    one = mlp()
    initial = one.get_weights()

    def run(model, epochs, *callbacks):
        model.compile(**classifier()())
        data = (numbers(12, 5), labels(12, 3))
        return model.fit(*data, batch_size=5, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks).epoch

    run(one, 4)
    for epochs in (2, 4):
        parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
        parallel.set_weights(initial)
        received = run(parallel, epochs, keras.callbacks.BackupAndRestore(out / "backup", delete_checkpoint=False))
    assert received == [2, 3]
    assert_same(one.get_weights(), parallel.get_weights(), 1e-9)
    assert (out / "backup").exists() == workers.is_chief


@case
def different_batches_are_warned_of(towers):
    """The chief warns once when the workers shuffle a dataset differently, and not when they shuffle it alike."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("keras_dp").addHandler(handler)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    data = tf.data.Dataset.from_tensor_slices((numbers(16, 5), labels(16, 3)))
    parallel.fit(data.shuffle(16, seed=1).batch(4), epochs=2, verbose=0)
    assert not heard
    parallel.fit(data.shuffle(16, seed=workers.index).batch(4), epochs=1, verbose=0)
    logging.getLogger("keras_dp").removeHandler(handler)
    assert len(heard) == workers.is_chief
    assert all(re.search(r"different batches in [34] steps.*pass sharded=True", message) for message in heard), heard


@case
def differences_are_named(towers):
    """Raises an error on every worker, before training, when the workers differ in their model, data or call."""
    last = workers.index == workers.count - 1

    def predict(**options):
        keras_dp.DataParallelModel(mlp(), devices=towers).predict(numbers(8, 5), verbose=0, **options)

    def fit_differently(units=3, rows=8, seed=0, batch_size=4, devices=towers, **options):
        parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((5,)), keras.layers.Dense(units)]), devices=devices)
        parallel.compile("sgd", "mse")
        parallel.fit(numbers(rows, 5, seed=seed), numbers(rows, units), batch_size=batch_size, verbose=0, **options)

    for expected, difference in {
        "batch_size: worker 0 has 4, worker": {"batch_size": 2},
        "units: worker 0 has 3, worker": {"units": 2},
        "x: worker 0 has 'float64 of shape [8, 5]": {"rows": 6},
        "checksum": {"seed": 1},
        "epochs: worker 0 has None": {"epochs": 2},
        "devices: worker 0 has ['CPU:0'": {"devices": 3 - towers},
    }.items():
        with pytest.raises(ValueError, match=re.escape(expected)):
            fit_differently(**difference if last else {})
    with pytest.raises(ValueError, match="rows: worker 0 has 'all', worker"):
        predict(**{"rows": "shard"} if last else {})
    with pytest.raises(ValueError, match="method: worker 0 has 'fit'"):
        (predict if last else fit_differently)()
    fit_differently()


for number, name in enumerate(sys.argv[3:] or CASES):
    for num_towers in (1, 2) if sys.argv[2] == "12" else (1 + (number + workers.count) % 2,):
        keras.utils.clear_session()
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(7)
        begin = time.monotonic()
        print(f"{name}, {num_towers} tower(s)")
        CASES[name](num_towers)
        print(f"passed {name}, {num_towers} tower(s), {time.monotonic() - begin:.1f} s")
print("done")
