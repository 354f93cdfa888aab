"""Train a plain model on one device and its twin on the towers of all workers, and compare them on every worker.

exactness.py WORKERS TOWERS [CASE ...]    TOWERS is "2", "12" for one tower and for two, or "alternate" for one or two in turn

A CASE is one of this file, or a program of tests/programs. Prints "passed <case>" for each case, and "done" at the end.
"""

import itertools
import logging
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_run, assert_same_script, fit_evaluate_predict, largest_difference, values
from programs import catalogue
from programs.catalogue import integers
from programs.catalogue import normal as numbers
from test_programs import plain, program

import keras_dp
from keras_dp.workers.collectives import Collectives

keras_dp.use_logical_cpus(2)
workers = keras_dp.connect_workers(timeout=60, start_timeout=120)
assert workers.count == int(sys.argv[1])

CASES = {}
# How most models here are compiled.
CLASSIFIED = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


def case(function):
    CASES[function.__name__] = function
    return function


def labels(rows, classes=3, seed=1):
    return integers(classes, rows, seed=seed)


def trains(*datasets, optimizer="Adam", config=None, compiled=CLASSIFIED, epochs=2):
    """Returns a script that trains a model on datasets of rows and a batch size, evaluates and predicts."""
    made = {"class_name": optimizer, "config": config or {}}

    def compile_arguments():
        return {"optimizer": keras.optimizers.get(made), **compiled}

    return lambda model: fit_evaluate_predict(model, compile_arguments, datasets, epochs=epochs)


def dataset_of(batches, signature, known=True):
    """Returns a dataset of batches, whose number is known or not."""
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else data


def on_shards(own, together, **compiled):
    """Returns a script that gives a wrapper this worker's shard, and plain Keras all batches."""

    def script(model):
        is_wrapper = isinstance(model, keras_dp.DataParallelModel)
        data, options = (own, {"sharded": True}) if is_wrapper else (together, {})
        model.compile("adam", **compiled)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data, **options).history
        return [history, model.evaluate(data, verbose=0, **options), model.predict(data, verbose=0, **options)]

    return script


def mlp():
    return catalogue.mlp(5, 8, 3, last="softmax")


def wrapped(towers, build=mlp, **options):
    parallel = keras_dp.DataParallelModel(build(), devices=towers, **options)
    parallel.compile("adam", **CLASSIFIED)
    return parallel


@case
def even_and_uneven_batches(towers):
    """Trains on even batches, uneven batches, a last batch of one row, which leaves a worker none, and a single row."""
    datasets = [((numbers(rows, 5), labels(rows)), batch_size) for rows, batch_size in ((25, 8), (14, 5), (1, 1))]
    assert_same_script(mlp, trains(*datasets, epochs=1), towers)


@case
def synchronized_batch_norm(towers):
    """Trains convolutions with batch normalization over all workers, momentum, and each gradient clipped."""

    def build():
        layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Flatten()]
        return keras.Sequential([keras.Input((6, 6, 2)), *layers, keras.layers.Dense(3, activation="softmax")])

    config = {"learning_rate": 0.1, "momentum": 0.875, "nesterov": True, "clipnorm": 0.05}
    data = (numbers(9, 6, 6, 2), labels(9))
    assert_same_script(build, trains((data, 4), optimizer="SGD", config=config), towers)


@case
def slices_one_after_the_other(towers):
    """Trains convolutions, whose moments and dropout are those of all workers, in two slices of each of unlike devices."""

    def build():
        layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)]
        return keras.Sequential([keras.Input((6, 6, 2)), *layers, keras.layers.Flatten(), keras.layers.Dense(3, "softmax")])

    data = (numbers(9, 6, 6, 2), labels(9))
    arguments = {"slices_per_device": 2, "rows": [1, 3][:towers]}
    assert_same_script(build, trains((data, 7), config={"global_clipnorm": 0.1}), towers, arguments)


@case
def masks_dropout_and_sample_weights(towers):
    """Trains with a masked batch normalization and loss, sample weights, and dropout, which draws one device's numbers."""

    def build():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.BatchNormalization()(keras.layers.Embedding(9, 4, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Dropout(0.5, seed=3)(hidden)))

    rng = np.random.default_rng(4)
    tokens = rng.integers(1, 9, (9, 6)) * (np.arange(6) < rng.integers(1, 7, (9, 1)))
    data = (tokens, numbers(9, 6, 1), rng.uniform(0.1, 2.0, (9, 6)))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    assert_same_script(build, trains((data, 4), compiled={"loss": loss, "weighted_metrics": ["mae"]}), towers)


@case
def sparse_gradients(towers):
    """Trains embeddings, whose gradients are sparse, with a global norm over all workers' gradients."""

    def build():
        tokens = keras.Input((4,), dtype="int32")
        words = keras.layers.Flatten()(keras.layers.Embedding(50, 3)(tokens))
        bags = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(500, 3, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(keras.ops.concatenate([words, bags], -1)))

    data = (integers(12, 9, 4, seed=5), numbers(9, 1))
    config = {"learning_rate": 0.1, "global_clipnorm": 0.1}
    assert_same_script(build, trains((data, 4), config=config, compiled={"loss": "mse"}), towers)


@case
def datasets_shuffled_alike(towers):
    """Trains on arrays that `fit` shuffles, and on a shuffled dataset of unknown length, with several steps in one call."""
    x, y = numbers(22, 5), labels(22)

    def script(model):
        model.compile("adam", **CLASSIFIED, steps_per_execution=3)
        keras.utils.set_random_seed(11)
        first = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(22).filter(lambda row, label: label < 2).batch(4)
        return [first, model.fit(dataset, epochs=2, verbose=0).history, model.predict(x, batch_size=7, verbose=0)]

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
        results = []
        for sizes in ((2, 2), (1,)):
            model.compile(keras.optimizers.SGD(0.01), **CLASSIFIED)
            results += [model.train_on_batch(numbers(rows, 5, seed=i), labels(rows, seed=i)) for i, rows in enumerate(sizes)]
        return [*results, model.test_on_batch(numbers(7, 5), labels(7)), model.predict_on_batch(numbers(7, 5))]

    assert_same_script(build, script, towers)


@case
def accumulation_and_placement(towers):
    """Accumulates gradients weighted by rows, with variables that are spread over the towers."""
    x, y = numbers(7, 5), labels(7)
    one, parallel = mlp(), wrapped(towers, parameter_device="sharded")
    one.set_weights(parallel.get_weights())
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    parallel.compile(keras_dp.DataParallelOptimizer(accumulating, accumulate="rows"), "sparse_categorical_crossentropy")
    one.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    for model, batch_size in ((parallel, 4), (one, 7)):
        model.fit(x, y, batch_size=batch_size, verbose=0, shuffle=False)
    assert_same(one.get_weights(), parallel.get_weights(), 1e-9)


@case
def gradients_in_half_the_bytes(towers):
    """Sends the gradients as bfloat16 between workers as well, in one message."""
    one, parallel = mlp(), wrapped(towers, gradient_dtype="bfloat16")
    one.set_weights(parallel.get_weights())
    with mock.patch.object(Collectives, "sum", autospec=True, side_effect=Collectives.sum) as summed:
        for model in (parallel, one):
            model.compile(keras.optimizers.SGD(0.1), **CLASSIFIED)
            model.fit(numbers(14, 5), labels(14), batch_size=4, verbose=0, shuffle=False)
    dtypes = [call.args[1].dtype for call in summed.call_args_list]
    assert dtypes.count(tf.bfloat16) == 1, dtypes
    assert 1e-6 < largest_difference(one, parallel) < 1e-2


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
def shards_of_the_user(towers):
    """Joins the workers' batches to global ones with sharded=True, also where some workers have no rows or run out of them."""
    signature = (tf.TensorSpec((None, 5), tf.float64), tf.TensorSpec((None,), tf.int64))
    sizes = [[3, 3, 3, 1], *[[2, 2]] * (workers.count - 2), []]
    shards = [
        [(numbers(rows, 5, seed=10 * i + k), labels(rows, seed=10 * i + k)) for k, rows in enumerate(own)]
        for i, own in enumerate(sizes)
    ]
    steps = [[batch for batch in step if batch] for step in itertools.zip_longest(*shards)]
    together = [tuple(np.concatenate(column) for column in zip(*step, strict=True)) for step in steps]

    def of_all_rows(y, y_pred):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_pred)))

    for known, loss, rows in ((True, {}, None), (False, {"loss": of_all_rows}, [1, 3][:towers])):
        own, all_batches = (dataset_of(batches, signature, known) for batches in (shards[workers.index], together))
        assert_same_script(mlp, on_shards(own, all_batches, **CLASSIFIED | loss), towers, {"rows": rows})


@case
def texts_that_each_worker_pads_by_itself(towers):
    """Joins shards whose texts have other lengths on each worker, which TensorFlow knows in the trace; one has single words."""
    length = 1 + 4 * np.arange(workers.count)[::-1]
    words = np.stack([integers(499, 4, length.max(), seed=i) + 1 for i in range(workers.count)])
    for of_worker, own in zip(words, length, strict=True):
        of_worker[:, own:] = 0
    targets = numbers(workers.count, 4, 1)

    def build():
        tokens = keras.Input((None,), dtype="int64")
        bags = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(500, 3, mask_zero=True)(tokens))
        return keras.Model(tokens, keras.layers.Dense(1)(bags))

    own = tf.data.Dataset.from_tensor_slices((words[workers.index, :, : length[workers.index]], targets[workers.index]))
    # Each global batch has two rows of each worker.
    together = [np.concatenate(np.split(array, 2, axis=1)).reshape(4 * workers.count, -1) for array in (words, targets)]
    together = tf.data.Dataset.from_tensor_slices(tuple(together)).batch(2 * workers.count)
    assert_same_script(build, on_shards(own.batch(2), together, loss="mse"), towers)


@case
def predictions_of_own_rows(towers):
    """Predicts rows, strings and more on each worker: for all rows, and for its own, which no other worker sends it."""

    class Predicts(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)
            self.dense.build((None, 5))

        def predict_step(self, data):
            dense = self.dense(data)
            at_home = tf.numpy_function(lambda rows: rows[:, :1] * 2, [dense], dense.dtype)
            at_home.set_shape([None, 1])
            return {
                "dense": dense,
                "repeated": tf.broadcast_to(dense[:, :1], [tf.shape(dense)[0], 4]),
                "input": data,
                "words": tf.strings.join([tf.strings.as_string(tf.argmax(dense, axis=1)), "é"]),
                "int8": tf.cast(tf.argmax(dense, axis=1), tf.int8),
                "at home": at_home,
                "kernel": self.dense.kernel + 0.0,
                "pairs": tf.reshape(dense, [-1, 1]),
            }

    x = numbers(25, 5)
    one, inner = Predicts(), Predicts()
    inner.set_weights(one.get_weights())
    parallel = keras_dp.DataParallelModel(inner, devices=towers)
    batches = tf.data.Dataset.from_tensor_slices(x[:16]).batch(8, drop_remainder=True)
    for rows, batch, data in ((23, 8, x[:23]), (2, 1, x[:2]), (16, 8, batches)):
        given = {"x": data, "verbose": 0, "batch_size": None if data is batches else batch}
        expected, received = (model.predict(**given) for model in (one, parallel))
        words = expected.pop("words")
        assert words.tolist() == received.pop("words").tolist()
        assert_same(expected, received, 1e-9)
        own = parallel.predict(**given, rows="shard")
        mine = []
        for begin in range(0, rows, batch):
            size = min(batch, rows - begin)
            first, end = (begin + size * (workers.index + i) // workers.count for i in (0, 1))
            mine += range(first, end)
        assert own.pop("words").tolist() == words[mine].tolist()
        assert_same(expected["pairs"], own.pop("pairs"), 1e-9)
        assert_same(expected.pop("kernel"), own.pop("kernel"), 0)
        del expected["pairs"]
        assert_same({name: array[mine] for name, array in expected.items()}, own, 1e-9)


@case
def seeds_that_differ(towers):
    """Trains the chief's model, although the workers' steps create variables from different seeds and names."""
    for _ in range(workers.index):
        [keras.layers.Dense(1) for _ in range(8)], keras.Sequential()
    build, _ = program("built_in_the_first_step")

    def trained(wrap):
        keras.utils.set_random_seed(100 + workers.index)
        model = wrap(build())
        model.compile("adam")
        model.fit(numbers(8, 5), numbers(8, 1), batch_size=4, epochs=2, verbose=0)
        return [*model.get_weights(), *values(model.optimizer)]

    own = trained(lambda model: keras_dp.DataParallelModel(model, devices=towers))
    # All workers have the same bits.
    bits = np.concatenate([array.astype("float64").reshape(-1) for array in own]).tobytes()
    assert set(workers.collectives.exchange(bits)) == {bits}
    if workers.is_chief:
        assert_same(trained(lambda model: model), own, 1e-9)


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
    assert_same_script(Factors, on_shards(dataset_of(own, signature), dataset_of(together, signature), loss="mse"), towers)


def assert_trains_by(loss_of, data, towers, **wrapper_arguments):
    """Asserts that a dense layer of two units trains by a model's own loss, which is given the layer and the batch."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def train_step(self, batch):
            with tf.GradientTape() as tape:
                loss = loss_of(self.dense, batch)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def script(model):
        model.compile("adam")
        return model.fit(data, epochs=2, verbose=0).history

    assert_same_script(Own, script, towers, wrapper_arguments)


@case
def whole_and_ragged_tensors(towers):
    """Trains on batches with a table that stays whole, a ragged tensor, and rows that are sorted over the global batch."""

    def loss_of(dense, batch):
        found = keras.ops.take(batch["table"], batch["index"], axis=0)
        lengths = keras.ops.cast(batch["ragged"].row_lengths(), "float64")[:, None]
        rows = keras.ops.take(batch["x"], tf.argsort(batch["x"][:, 0]), axis=0)
        return keras.ops.mean(keras.ops.square(dense(rows + found * lengths))) + tf.reduce_mean(batch["ragged"].to_tensor())

    ragged = tf.ragged.constant([[1.0] * (i % 4) for i in range(9)], dtype="float64")
    parts = {"x": numbers(9, 3), "index": labels(9, 4), "ragged": ragged}
    data = tf.data.Dataset.from_tensor_slices(parts).batch(4).map(lambda batch: {**batch, "table": numbers(4, 3, seed=2)})
    assert_trains_by(loss_of, data, towers, whole=["table"])


@case
def words_beside_sentences(towers):
    """Sorts the encoded words of all rows and a mean for each row, where the number of words in a row is not known."""

    def loss_of(dense, words):
        encoded = dense(words)
        joined = tf.concat([tf.reshape(encoded, [-1, 2]), tf.reduce_mean(encoded, 1)], 0)
        return tf.reduce_mean(joined**2) + tf.reduce_mean(tf.sort(joined, axis=0)[:3])

    data = tf.data.Dataset.from_tensor_slices(numbers(9, 5, 3)).padded_batch(4, padded_shapes=[None, 3])
    assert_trains_by(loss_of, data, towers)


@case
def several_numbers_of_rows(towers):
    """Trains on tensors of which the dataset's types state other rows, and predicts from tensors that all stay whole."""

    class OfTable(keras.Model):
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

    expected = assert_same_run(OfTable, script, towers, whole=["table"])
    assert_same_run(OfTable, script, towers, expected)


@case
def recalibrated_batch_norm(towers):
    """Recalibrates batch normalization to the moments of all rows."""
    x = numbers(13, 5)
    one = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization()])
    keras_dp.recalibrate_batch_norm(one, x, batch_size=4, verbose=0)
    np.testing.assert_allclose(one.layers[0].moving_mean.numpy(), x.mean(0), atol=1e-12)
    np.testing.assert_allclose(one.layers[0].moving_variance.numpy(), x.var(0), atol=1e-12)


@case
def the_chief_writes_and_what_it_restores_is_for_all(towers):
    """Writes files by callbacks and by `save()` on the chief alone, and resumes all workers from its backup."""
    out = Path(tempfile.mkdtemp())
    one = mlp()
    initial = one.get_weights()
    data = {"x": numbers(12, 5), "y": labels(12), "batch_size": 5, "verbose": 0, "shuffle": False}
    one.compile("adam", **CLASSIFIED)
    one.fit(**data, epochs=4)
    for epochs in (2, 4):
        parallel = wrapped(towers)
        parallel.set_weights(initial)
        callbacks = [keras.callbacks.CSVLogger(out / "log.csv"), keras.callbacks.ModelCheckpoint(out / "best.keras")]
        callbacks.append(keras.callbacks.BackupAndRestore(out / "backup", delete_checkpoint=False))
        history = parallel.fit(**data, epochs=epochs, callbacks=callbacks)
    assert history.epoch == [2, 3]
    assert_same(one.get_weights(), parallel.get_weights(), 1e-9)
    assert len(set(workers.collectives.exchange(repr(history.history).encode()))) == 1
    parallel.save(out / "model.keras")
    parallel.save_weights(out / "model.weights.h5")
    names = {"log.csv", "best.keras", "backup", "model.keras", "model.weights.h5"}
    assert {path.name for path in out.iterdir()} == (names if workers.is_chief else set())
    if workers.is_chief:
        assert_same(parallel.get_weights(), keras.models.load_model(out / "model.keras").get_weights(), 0)


@case
def different_batches_are_noticed(towers):
    """The chief warns once when the workers shuffle a dataset differently. Other numbers of rows are refused."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("keras_dp").addHandler(handler)
    parallel = wrapped(towers)
    data = tf.data.Dataset.from_tensor_slices((numbers(16, 5), labels(16)))
    parallel.fit(data.shuffle(16, seed=1).batch(4), epochs=2, verbose=0)
    assert not heard
    parallel.fit(data.shuffle(16, seed=workers.index).batch(4), epochs=1, verbose=0)
    logging.getLogger("keras_dp").removeHandler(handler)
    assert len(heard) == workers.is_chief
    assert all(re.search(r"different batches in [34] steps.*pass sharded=True", message) for message in heard), heard

    rows = 12 + 4 * workers.is_chief
    others = data.take(rows).batch(rows // 2).repeat(2)
    # All rows are gathered in each step where their number is not known.
    for call, data in ((parallel.fit, others), (parallel.predict, ((x,) for x, _ in others))):
        with pytest.raises(ValueError, match="different numbers of rows in 4 steps"):
            call(data, verbose=0)


@case
def differences_are_named(towers):
    """Raises an error on every worker, before training, when the workers differ in their model, data or call."""
    last = workers.index == workers.count - 1

    def train(units=3, size=8, seed=0, devices=towers, shares=None, method="fit", **options):
        parallel = wrapped(devices, lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(units)]), rows=shares)
        x, y = numbers(size, 5, seed=seed), labels(size)
        options = {"batch_size": 4, "verbose": 0} | options
        parallel.fit(x, y, **options) if method == "fit" else parallel.predict(x, **options)

    predicts = {"method": "predict"}
    for expected, common, difference in (
        ("batch_size: worker 0 has 4, worker", {}, {"batch_size": 2}),
        ("units: worker 0 has 3, worker", {}, {"units": 2}),
        ("x: worker 0 has 'float64 of shape [8, 5]", {}, {"size": 6}),
        ("checksum", {}, {"seed": 1}),
        ("epochs: worker 0 has None", {}, {"epochs": 2}),
        ("devices: worker 0 has ['CPU:0'", {}, {"devices": 3 - towers}),
        *([("shares: worker 0 has [1, 1], worker", {}, {"shares": [2, 1]})] * (towers > 1)),
        ("rows: worker 0 has 'all', worker", predicts, {"rows": "shard"}),
        ("method: worker 0 has 'fit'", {}, predicts),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            train(**common | (difference if last else {}))
    train()


for number, name in enumerate(sys.argv[3:] or CASES):
    for num_towers in (1 + (number + workers.count) % 2,) if sys.argv[2] == "alternate" else map(int, sys.argv[2]):
        keras.utils.clear_session()
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(7)
        print(f"{name}, {num_towers} tower(s)")
        if name in CASES:
            CASES[name](num_towers)
        else:
            assert_same_run(*program(name), num_towers, plain(name))
        print(f"passed {name}, {num_towers} tower(s)", flush=True)
print("done")
