"""Train a plain model on one device and its twin on the towers of all workers, and compare them on every worker.

Prints a line for each case, "passed <case>" or "FAILED <case>" with the traceback; then "done".
"""

import logging
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest import mock

import keras
import numpy as np
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
def masks_and_sample_weights(towers):
    """Trains with a masked batch normalization and loss, sample weights, and `mean_with_sample_weight`."""

    def build():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
        hidden = keras.layers.BatchNormalization()(hidden)
        return keras.Model(tokens, keras.layers.TimeDistributed(keras.layers.Dense(1))(hidden))

    rng = np.random.default_rng(4)
    tokens = rng.integers(1, 9, (9, 6)) * (np.arange(6) < rng.integers(1, 7, (9, 1)))
    data = (tokens, numbers(9, 6, 1), rng.uniform(0.1, 2.0, (9, 6)))

    def compiled():
        return {
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "weighted_metrics": ["mae"],
        }

    assert_same_script(build, lambda model: fit_evaluate_predict(model, compiled, [(data, 4)]), towers)


@case
def sparse_gradients(towers):
    """Trains an embedding with Adam, which has sparse gradients, and with a global norm over all workers' gradients."""

    def build():
        tokens = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Embedding(50, 3)(tokens)
        bags = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(500, 3, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(keras.ops.concatenate([keras.layers.Flatten()(hidden), bags], -1)))

    data = (np.random.default_rng(5).integers(0, 12, (9, 4)), numbers(9, 1))
    for optimizer in (lambda: keras.optimizers.Adam(0.1), lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1)):
        compiled = lambda: {"optimizer": optimizer(), "loss": "mse"}  # noqa: B023, E731
        assert_same_script(build, lambda model: fit(model, compiled, [(data, 4)]), towers)  # noqa: B023


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
        return [
            first,
            second,
            model.predict(
                dataset.map(lambda row, label: row).take(0).concatenate(tf.data.Dataset.from_tensor_slices(x).batch(7)),
                verbose=0,
            ),
        ]

    assert_same_script(mlp, script, towers)


@case
def single_batches(towers):
    """Calls `train_on_batch`, `test_on_batch` and `predict_on_batch` without a `fit` before, and after a second `compile`."""
    x, y = numbers(7, 5), labels(7, 3)

    def script(model):
        model.compile(**classifier()())
        results = [model.train_on_batch(x, y), model.train_on_batch(x[:1], y[:1]), model.test_on_batch(x, y)]
        model.compile(**classifier(lambda: keras.optimizers.SGD(0.1))())
        return [*results, model.train_on_batch(x, y), model.predict_on_batch(x)]

    assert_same_script(mlp, script, towers)


@case
def fewer_rows_than_workers(towers):
    """Trains on two rows, whose number is known, with sums that follow sums: workers without rows exchange as others do.

    Once they sent other messages than the others, and all waited for each other.
    """

    def build():
        x = keras.Input((5,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(x))
        hidden = keras.layers.Lambda(lambda h: h * keras.ops.sum(h, axis=0))(keras.layers.Dense(4)(hidden))
        hidden = keras.layers.Lambda(lambda h: h + keras.ops.sum(keras.ops.square(h)))(hidden)
        return keras.Model(x, keras.layers.Dense(3, "softmax")(keras.layers.BatchNormalization()(hidden)))

    def script(model):
        model.compile(**classifier(lambda: keras.optimizers.SGD(0.01))())
        return [model.train_on_batch(numbers(2, 5, seed=i), labels(2, 3, seed=i)) for i in range(3)]

    assert_same_script(build, script, towers)


@case
def callbacks_act_alike(towers):
    """Trains with class weights, and with callbacks that stop early and lower the rate by the validation loss."""
    x, y = numbers(20, 5), labels(20, 3)

    def script(model):
        model.compile(**classifier(lambda: keras.optimizers.SGD(0.5))())
        callbacks = [
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.01),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        ]
        return model.fit(
            *(x[:14], y[:14]),
            batch_size=5,
            epochs=8,
            verbose=0,
            shuffle=False,
            class_weight={0: 0.5, 1: 2.0, 2: 1.0},
            validation_data=(x[14:], y[14:]),
            validation_batch_size=4,
            callbacks=callbacks,
        ).history

    assert_same_script(mlp, script, towers)


@case
def state_of_layers(towers):
    """Trains a layer whose state is a mean over the rows, an integer that depends on the last row, and a count of calls."""

    class Watch(keras.layers.Layer):
        def build(self, shape):
            self.last = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")
            self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros")
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")

        def call(self, x):
            self.calls.assign(self.calls + 1)
            self.last.assign(keras.ops.cast(keras.ops.sum(x[-1]) * 1000, "int32"))
            self.mean.assign(keras.ops.mean(x))
            return x

    def build():
        return keras.Sequential([keras.Input((5,)), Watch(), keras.layers.Dense(3, activation="softmax")])

    data = (numbers(9, 5), labels(9, 3))
    assert_same_script(build, lambda model: fit(model, classifier(), [(data, 4), (data, 1)]), towers)


@case
def accumulated_gradients(towers):
    """Trains with gradient accumulation and moving averages of weights on the towers of all workers."""
    data = (numbers(16, 5), labels(16, 3))
    compiled = classifier(
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3)
    )
    assert_same_script(mlp, lambda model: fit(model, compiled, [(data, 4)]), towers)


@case
def placement_accumulation_and_scope(towers):
    """Trains with variables spread over the towers, and with accumulation that is weighted by rows."""
    data = (numbers(14, 5), labels(14, 3))
    compiled = classifier(lambda: keras.optimizers.SGD(0.1, momentum=0.875))
    options = {"parameter_device": "sharded"}
    assert_same_script(mlp, lambda model: fit(model, compiled, [(data, 4)]), towers, options)

    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    one = mlp()
    one.set_weights(parallel.get_weights())
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    parallel.compile(keras_dp.DataParallelOptimizer(accumulating, accumulate="rows"), "sparse_categorical_crossentropy")
    parallel.fit(*(part[:7] for part in data), batch_size=4, epochs=1, verbose=0, shuffle=False)
    one.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    one.fit(*(part[:7] for part in data), batch_size=7, epochs=1, verbose=0, shuffle=False)
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

    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    data = (numbers(24, 5), numbers(24, 1))
    count = towers * workers.count
    for mode in ("local", "first"):
        model = build()
        initial = model.get_weights()
        parallel = keras_dp.DataParallelModel(model, devices=towers, batch_norm=mode)
        parallel.compile(keras.optimizers.SGD(0.1), "mse")
        parallel.fit(*data, batch_size=24, epochs=1, verbose=0, shuffle=False)
        slices = np.split(data[0], count)
        mean, variance = (data[0].mean(0), data[0].var(0)) if mode == "local" else (slices[0].mean(0), slices[0].var(0))
        scale, offset = (variable.numpy() for variable in model.layers[0].trainable_variables)
        moving_mean, moving_variance = (variable.numpy() for variable in model.layers[0].non_trainable_variables)
        kernel, bias = (variable.numpy() for variable in model.layers[1].trainable_variables)
        np.testing.assert_allclose(moving_mean, 0.01 * mean, atol=1e-9)
        np.testing.assert_allclose(moving_variance, 0.99 + 0.01 * variance, atol=1e-9)
        normalized = np.concatenate([(part - part.mean(0)) / np.sqrt(part.var(0) + 0.001) for part in slices])
        initial_kernel = next(weight for weight in initial if weight.shape == (5, 1))
        difference = normalized @ initial_kernel - data[1]
        np.testing.assert_allclose(bias, -0.1 * 2 * difference.mean(0), atol=1e-9)
        np.testing.assert_allclose(kernel - initial_kernel, -0.1 * 2 * normalized.T @ difference / 24, atol=1e-9)
        assert np.abs(scale - 1).max() > 1e-6
        assert np.abs(offset).max() > 1e-6


@case
def batches_of_other_sizes_are_refused(towers):
    """Refuses global batches whose numbers of rows differ between workers, also where all rows are gathered in each step."""
    rows = 12 + 4 * (workers.index == 0)
    batches = tf.data.Dataset.from_tensor_slices((numbers(16, 5)[:rows], labels(16, 3)[:rows])).batch(rows // 2).repeat(2)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    generator = ((x,) for x, _ in batches)
    for call, data in ((parallel.fit, batches), (parallel.predict, generator)):
        try:
            call(data, verbose=0)
        except ValueError as error:
            assert "different numbers of rows in 4 steps" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("not refused")


@case
def ragged_and_sparse(towers):
    """Predicts floats and integers for all rows, from a sparse dataset that is made dense and from arrays."""

    class Lengths(keras.layers.Layer):
        def call(self, x):
            return keras.ops.cast(keras.ops.argmax(x, axis=-1), "int8")

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape[:-1], "int8")

    def build():
        x = keras.Input((5,))
        return keras.Model(x, [keras.layers.Dense(3)(x), Lengths()(x)])

    dense = numbers(9, 5) * (np.random.default_rng(3).uniform(size=(9, 5)) < 0.5)
    dataset = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(dense)).batch(4).map(tf.sparse.to_dense)

    def script(model):
        return [model.predict(dataset, verbose=0), model.predict(dense, batch_size=2, verbose=0)]

    one = build()
    parallel = keras_dp.DataParallelModel(build(), devices=towers)
    parallel.inner_model.set_weights(one.get_weights())
    assert_same(script(one), script(parallel), 1e-9)


@case
def shards_of_the_user(towers):
    """Joins the workers' batches to global ones with sharded=True, also where some workers have no rows or run out of them."""
    x, y = numbers(30, 5), labels(30, 3)
    # Worker 0 has 3 batches of 3 rows and one of 1 row, the last worker has none, and the others have 2 batches of 2 rows.
    rows = {0: (3, 10), workers.count - 1: (2, 0)}
    parts = [rows.get(i, (2, 4)) for i in range(workers.count)]
    begins = np.cumsum([0] + [size for _, size in parts])
    for known in (True, False):

        def dataset_of(i):
            batch, size = parts[i]
            part = slice(begins[i], begins[i] + size)
            dataset = tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(batch)
            return dataset if known else dataset.filter(lambda *_: True)  # noqa: B023

        steps = [[*map(tuple, dataset_of(i).as_numpy_iterator())] for i in range(workers.count)]
        together = []
        for k in range(max(map(len, steps))):
            present = [step[k] for step in steps if k < len(step)]
            together.append(tuple(np.concatenate(column) for column in zip(*present, strict=True)))

        def global_batches():
            yield from together  # noqa: B023

        signature = (tf.TensorSpec((None, 5), tf.float64), tf.TensorSpec((None,), tf.int64))
        reference = tf.data.Dataset.from_generator(global_batches, output_signature=signature)
        if known:  # Keras counts one step more in each epoch over data of unknown length.
            reference = reference.apply(tf.data.experimental.assert_cardinality(len(together)))

        def script(model):
            is_parallel = isinstance(model, keras_dp.DataParallelModel)
            data = dataset_of(workers.index) if is_parallel else reference  # noqa: B023
            options = {"sharded": True} if is_parallel else {}
            model.compile(**classifier()())
            history = model.fit(data, epochs=2, verbose=0, validation_data=data, **options).history
            return [history, model.evaluate(data, verbose=0, **options), model.predict(data, verbose=0, **options)]

        def with_a_loss_that_couples_rows(model):
            model.compile("sgd", lambda y, y_pred: keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred))))
            options = {"sharded": True} if isinstance(model, keras_dp.DataParallelModel) else {}
            data = dataset_of(workers.index) if options else reference  # noqa: B023
            return model.fit(data, epochs=1, verbose=0, **options).history

        if not known:
            assert_same_script(mlp, with_a_loss_that_couples_rows, towers)
        _, parallel = assert_same_script(mlp, script, towers)
        own = parallel.predict(dataset_of(workers.index), verbose=0, sharded=True, rows="shard") if parts[-1][1] else None
        assert own is None or len(own) == parts[workers.index][1]


@case
def texts_that_each_worker_pads_by_itself(towers):
    """Joins shards whose texts have other lengths on each worker, which TensorFlow knows while it traces; one has single words.

    The copies that the gradient of a bag makes of a row were once made for as many words as the worker's own texts have.
    """
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
            for name in ("dense", "repeated", "input", "at home"):
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
        self.critic_optimizer.apply(
            tape.gradient(critic_loss, self.critic.trainable_variables), self.critic.trainable_variables
        )
        return {"loss": loss, "critic": critic_loss, "all": keras.ops.all(x > -9.0), "any": keras.ops.any(x > 1.0)}


@case
def own_steps(towers):
    """Trains by a user's step whose variables are created when it is traced, also on a last batch of one row."""
    data = (numbers(13, 5), labels(13 * 3, 20).reshape(13, 3))

    def script(model):
        model.compile(optimizer=keras.optimizers.Adam(0.01))
        histories = [model.fit(*data, batch_size=size, epochs=2, shuffle=False, verbose=0).history for size in (4, 13)]
        inner = getattr(model, "inner_model", model)
        return [
            histories,
            values(inner.critic_optimizer),
            inner.generator.state.numpy(),
            model.predict(data[0], batch_size=5, verbose=0),
        ]

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
    everything = [*parallel.get_weights(), *(value for optimizer in optimizers for value in values(optimizer))]
    flat = np.concatenate([value.astype("float64").reshape(-1) for value in everything])
    for other in workers.collectives.exchange(flat.tobytes()):
        np.testing.assert_array_equal(np.frombuffer(other), flat)


@case
def own_steps_on_shards(towers):
    """Trains on batches of sequences of different lengths, where the last worker's shard is empty or runs out."""

    class Sequences(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Conv1D(3, 2, padding="same", activation="tanh")
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(self.hidden(x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                hidden = self.hidden(x)
                by_time = keras.ops.mean(hidden, axis=0)
                highest = keras.ops.max(hidden, axis=0)
                order = keras.ops.sort(hidden, axis=0)[0]
                loss = keras.ops.mean(keras.ops.square(self.head(hidden) - y[:, None, None]))
                loss = loss + keras.ops.mean(by_time * highest) + 0.1 * keras.ops.mean(keras.ops.abs(order))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "length": keras.ops.shape(x)[1], "rows": keras.ops.shape(x)[0]}

    lengths = (4, 6, 3)
    batches = [(numbers(5, length, 2, seed=length), numbers(5, seed=length)) for length in lengths]
    signature = (tf.TensorSpec((None, None, 2), tf.float64), tf.TensorSpec((None,), tf.float64))

    def dataset_of(parts):
        return tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=signature).apply(
            tf.data.experimental.assert_cardinality(len(parts))
        )

    def shard(batch, count):
        """Returns this worker's rows of a batch that is divided among the first `count` workers."""
        return tuple(part[5 * workers.index // count : 5 * (workers.index + 1) // count] for part in batch)

    # The last worker has rows of the first batch only, or no rows at all.
    for first in (workers.count, workers.count - 1):
        own = [shard(batch, workers.count - 1 if k else first) for k, batch in enumerate(batches)]
        own = [batch for batch in own if len(batch[1])]

        def script(model):
            is_parallel = isinstance(model, keras_dp.DataParallelModel)
            model.compile(optimizer="adam")
            data = dataset_of(own) if is_parallel else dataset_of(batches)  # noqa: B023
            return model.fit(data, epochs=2, verbose=0, **({"sharded": True} if is_parallel else {})).history

        assert_same_script(Sequences, script, towers)


@keras.saving.register_keras_serializable()
class Factors(keras.Model):
    """Factors a matrix of each row, and reads a number from a text of each row: neither takes rows of ones or empty texts."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        numbers = tf.strings.to_number(inputs["text"], tf.float64)
        lower = tf.linalg.cholesky(inputs["matrix"])
        lower = tf.debugging.check_numerics(lower, "no factor")
        return self.dense(tf.stack([numbers, tf.reduce_sum(tf.math.log(tf.linalg.diag_part(lower)), axis=1)], axis=1))


@case
def rows_of_which_no_other_can_take_the_place(towers):
    """Trains on matrices that have a factor, and on texts that are numbers, of which the last worker has none.

    The matrices of a step are all of one size, which is another one in the next step. A worker without rows does not know it.
    """
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

    def dataset_of(batches):
        return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature).apply(
            tf.data.experimental.assert_cardinality(len(batches))
        )

    def shard(batch):
        begin, end = (len(batch[1]) * (workers.index + i) // (workers.count - 1) for i in (0, 1))
        return keras.tree.map_structure(lambda part: part[begin:end], batch)

    own = [] if workers.index == workers.count - 1 else [shard(batch) for batch in together]

    def script(model):
        is_parallel = isinstance(model, keras_dp.DataParallelModel)
        options = {"sharded": True} if is_parallel else {}
        data = dataset_of(own if is_parallel else together)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
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
def metrics_and_masks_with_dropout(towers):
    """Trains with dropout, which draws one device's numbers, and with AUC, masks and sample weights."""

    def build():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
        hidden = keras.layers.Dropout(0.5, seed=3)(keras.layers.LSTM(3)(hidden))
        return keras.Model(tokens, keras.layers.Dense(1, activation="sigmoid")(hidden))

    rng = np.random.default_rng(4)
    tokens = rng.integers(1, 9, (11, 6)) * (np.arange(6) < rng.integers(1, 7, (11, 1)))
    data = (tokens, labels(11, 2), rng.uniform(0.1, 2.0, 11))

    def compiled():
        metrics = {"metrics": [keras.metrics.AUC(name="auc")], "weighted_metrics": ["accuracy"]}
        return {"optimizer": keras.optimizers.Adam(0.01), "loss": "binary_crossentropy", **metrics}

    script = lambda model: fit_evaluate_predict(model, compiled, [(data, 5)])  # noqa: E731
    assert_same_script(build, script, towers)


@case
def seeds_that_differ(towers):
    """Trains the chief's model although the workers' scripts have set different seeds."""
    x, y = numbers(16, 5), labels(16, 3)
    keras.utils.set_random_seed(100 + workers.index)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    parallel.fit(x, y, batch_size=4, epochs=2, verbose=0)
    flat = np.concatenate([weight.reshape(-1) for weight in parallel.get_weights()])
    everywhere = [np.frombuffer(message) for message in workers.collectives.exchange(flat.tobytes())]
    for other in everywhere:
        np.testing.assert_array_equal(other, flat)
    if workers.is_chief:
        keras.utils.set_random_seed(100)
        one = mlp()
        one.compile(**classifier()())
        one.fit(x, y, batch_size=4, epochs=2, verbose=0)
        assert_same(one.get_weights(), parallel.get_weights(), 1e-9)


@case
def every_row_once(towers):
    """Checks that every row is trained on exactly once in an epoch, by one tower of one worker."""

    class Rows(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(shape=(23,), trainable=False, initializer="zeros")
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            counts = keras.ops.sum(keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), 23, dtype="float64"), axis=0)
            self.seen.assign(self.seen + counts)
            return x * self.scale

    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((1,)), Rows()]), devices=towers)
    parallel.compile(keras.optimizers.SGD(1e-6), "mse")
    rows = np.arange(23.0)[:, np.newaxis]
    parallel.fit(rows, rows, batch_size=5, epochs=1, verbose=0)
    np.testing.assert_array_equal(parallel.inner_model.layers[0].seen.numpy(), np.ones(23))


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
    x, y = numbers(12, 5), labels(12, 3)
    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    callbacks = [
        keras.callbacks.CSVLogger(out / "log.csv"),
        keras.callbacks.ModelCheckpoint(out / "best.keras", monitor="loss", save_best_only=True),
        keras.callbacks.TensorBoard(out / "board"),
        keras.callbacks.BackupAndRestore(out / "backup", delete_checkpoint=False),
    ]
    history = parallel.fit(x, y, batch_size=5, epochs=2, verbose=0, callbacks=callbacks).history
    parallel.save(out / "model.keras")
    parallel.save_weights(out / "model.weights.h5")
    names = {"log.csv", "best.keras", "board", "backup", "model.keras", "model.weights.h5"}
    assert {path.name for path in out.iterdir()} == (names if workers.is_chief else set())
    assert len(set(workers.collectives.exchange(repr(history).encode()))) == 1
    if workers.is_chief:
        loaded = keras.models.load_model(out / "model.keras")
        assert_same(parallel.get_weights(), loaded.get_weights(), 0)


@case
def what_is_restored_on_the_chief_is_for_all(towers):
    """Resumes all workers with the weights and the epoch of the backup that the chief alone has."""
    out = Path(tempfile.mkdtemp())
    x, y = numbers(12, 5), labels(12, 3)

    def run(model, epochs, backup):
        model.compile(**classifier()())
        callbacks = [keras.callbacks.BackupAndRestore(out / backup, delete_checkpoint=False)]
        return model.fit(x, y, batch_size=5, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)

    one = mlp()
    initial = one.get_weights()
    one.compile(**classifier()())
    one.fit(x, y, batch_size=5, epochs=5, verbose=0, shuffle=False)
    histories = []
    for epochs in (2, 5):
        parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
        parallel.set_weights(initial)
        histories.append(run(parallel, epochs, "backup"))
    assert histories[1].epoch == [2, 3, 4]
    assert_same(one.get_weights(), parallel.get_weights(), 1e-9)
    assert (out / "backup").exists() == workers.is_chief


@case
def one_worker_ends_training_for_all(towers):
    """Ends training on all workers after the same epoch, when a callback of the last worker stops it."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and workers.index == workers.count - 1:
                self.model.stop_training = True

    parallel = keras_dp.DataParallelModel(mlp(), devices=towers)
    parallel.compile(**classifier()())
    history = parallel.fit(numbers(8, 5), labels(8, 3), batch_size=4, epochs=5, verbose=0, callbacks=[Stop()])
    assert history.epoch == [0, 1]


@case
def different_batches_are_warned_of(towers):
    """The chief warns once when the workers shuffle a dataset differently, and not when they shuffle it alike."""

    class Heard(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())

    heard = []
    handler = Heard()
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

    def fit_differently(units=3, optimizer="sgd", rows=8, seed=0, batch_size=4, activation="tanh", devices=towers, **options):
        layers = [keras.layers.Dense(4, activation=activation), keras.layers.Dense(units)]
        parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((5,)), *layers]), devices=devices)
        parallel.compile(optimizer, "mse")
        parallel.fit(numbers(rows, 5, seed=seed), numbers(rows, units), batch_size=batch_size, verbose=0, **options)

    differences = {
        "batch_size": ("batch_size: worker 0 has 4, worker", {"batch_size": 2}),
        "model": ("units: worker 0 has 3, worker", {"units": 2}),
        "activation": ("activation: worker 0 has 'tanh', worker", {"activation": "relu"}),
        "optimizer": ("the optimizer, class: worker 0 has 'SGD', worker", {"optimizer": "adam"}),
        "rows": ("x: worker 0 has 'float64 of shape [8, 5]", {"rows": 6}),
        "data": ("checksum", {"seed": 1}),
        "epochs": ("epochs: worker 0 has None", {"epochs": 2}),
        "towers": ("devices: worker 0 has ['CPU:0'", {"devices": 3 - towers}),
    }
    for name, (expected, difference) in differences.items():
        try:
            fit_differently(**difference if last else {})
        except ValueError as error:
            assert expected in str(error), (name, error)  # noqa: PT017
        else:
            raise AssertionError(f"{name} was not refused")
    try:
        rows = {"rows": "shard"} if last else {}
        keras_dp.DataParallelModel(mlp(), devices=towers).predict(numbers(8, 5), verbose=0, **rows)
    except ValueError as error:
        assert "rows: worker 0 has 'all', worker" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("other rows were not refused")
    try:
        if last:
            keras_dp.DataParallelModel(mlp(), devices=towers).predict(numbers(8, 5), verbose=0)
        else:
            fit_differently()
    except ValueError as error:
        assert "method: worker 0 has 'fit'" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("another method was not refused")
    fit_differently()


for name in sys.argv[2:] or list(CASES):
    for num_towers in (1, 2):
        keras.utils.clear_session()
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(7)
        begin = time.monotonic()
        try:
            CASES[name](num_towers)
            print(f"passed {name}, {num_towers} tower(s), {time.monotonic() - begin:.1f} s")
        except Exception:
            # The state of the other workers is unknown from here on.
            sys.exit(f"FAILED {name}, {num_towers} tower(s)\n{traceback.format_exc()}")
print("done")
