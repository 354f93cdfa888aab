"""All kinds and forms of data that plain Keras takes give one device's result on towers."""

import traceback

import keras
import numpy as np
import pandas
import pytest
import scipy.sparse
import tensorflow as tf
from comparison import assert_same_script, next_draws, same_on_towers, twins
from keras import layers

import keras_dp

# Batches of 7, 7, 7 and 2 rows: three towers get 2, 2 and 3 rows of each, and 0, 1 and 1 rows of the last.
ROWS, BATCH, TOWERS = 23, 7, 3
rng = np.random.default_rng(0)
X, Y, W = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2)), rng.uniform(size=ROWS)
CLASSES = rng.integers(0, 3, ROWS)

runs_dry = pytest.mark.filterwarnings("ignore:Your input ran out of data")


def dense(units=2, activation=None):
    return keras.Sequential([keras.Input((4,)), layers.Dense(units, activation)])


def for_data(x, y):
    """Returns a function that builds a model for arrays in any structures, whose inputs are named by the letters from a on."""

    def build():
        names = iter("abcd")
        inputs = keras.tree.map_structure(lambda array: keras.Input(array.shape[1:], name=next(names)), x)
        hidden = layers.Concatenate()([layers.Flatten()(leaf) for leaf in keras.tree.flatten(inputs)])
        return keras.Model(inputs, keras.tree.map_structure(lambda array: layers.Dense(array.size // ROWS)(hidden), y))

    return build


def compiled(model, **arguments):
    model.compile(**{"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], **arguments})
    return model


def fit(model, *data, **arguments):
    return model.fit(*data, **{"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}).history


def evaluate(model, *data, **arguments):
    return model.evaluate(*data, **{"batch_size": BATCH, "verbose": 0, "return_dict": True, **arguments})


def predict(model, x, **arguments):
    return model.predict(x, **{"batch_size": BATCH, "verbose": 0, **arguments})


def batches(*arrays, sizes=(BATCH,) * 4):
    """Cuts arrays into batches of the given sizes, as tuples."""
    ends = np.cumsum(sizes)
    return [tuple(array[end - size : end] for array in arrays) for size, end in zip(sizes, ends, strict=True)]


def dataset(*arrays, **arguments):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, **arguments)


def generator(*arrays, repeat=False, **arguments):
    while True:
        yield from batches(*arrays, **arguments)
        if not repeat:
            return


class PyDataset(keras.utils.PyDataset):
    def __init__(self, *arrays, **arguments):
        super().__init__(**arguments)
        self.batches = batches(*arrays)
        self.calls = []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[i]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class EndlessPyDataset(PyDataset):
    num_batches = None

    def __getitem__(self, i):
        return self.batches[i % len(self)]


DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool"]


def takes_any_dtype():
    inputs = {dtype: keras.Input((4,), dtype=dtype, name=dtype) for dtype in DTYPES}
    hidden = layers.Concatenate()([layers.Rescaling(1.0)(leaf) for leaf in inputs.values()])
    return keras.Model(inputs, [layers.Dense(2)(hidden) for _ in range(3)])


@same_on_towers(takes_any_dtype, TOWERS)
def test_arrays_and_tensors_of_any_dtype(model):
    x = {dtype: np.abs(3 * X).astype(dtype) for dtype in DTYPES}
    y = [np.abs(3 * Y).astype(dtype) for dtype in ("float16", "int64", "bool")]
    compiled(model, metrics=None)
    return fit(model, x, y), fit(model, *keras.tree.map_structure(tf.constant, [x, y]))


@same_on_towers(lambda: dense(1), TOWERS)
def test_pandas(model):
    columns = {"a": X[:, 0], "b": X[:, 1].astype("float32"), "c": CLASSES, "d": CLASSES > 1}
    frame, target, weight = pandas.DataFrame(columns), pandas.Series(Y[:, 0]), pandas.Series(W)
    compiled(model)
    history = fit(model, frame, target, sample_weight=weight, validation_split=0.3)
    return history, predict(model, frame)


@same_on_towers(for_data(dict.fromkeys("abcd", W[:, None]), Y), TOWERS)
def test_pandas_columns_by_name(model):
    x, y = pandas.DataFrame(X, columns=list("abcd")), pandas.DataFrame(Y)
    return fit(compiled(model), dict(x), y), model.train_on_batch(dict(x[:5]), y[:5])


SPARSE = np.where(X > 0.3, X, 0)
SPARSE[3] = SPARSE[7:14] = 0


@runs_dry
@same_on_towers(lambda: keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(2)]), TOWERS)
def test_sparse_inputs(model):
    """Towers sum the gradients of a row of the kernel before Adam squares them, as one device does."""
    matrix, tensor = scipy.sparse.csr_matrix(SPARSE), tf.sparse.from_dense(SPARSE)
    compiled(model, optimizer="adam")
    histories = fit(model, generator(matrix, Y)), fit(model, tensor, Y, validation_split=0.3)
    return histories, predict(model, matrix), model.predict_on_batch(tensor)


TOKENS = tf.RaggedTensor.from_row_lengths(rng.integers(1, 6, 50), [1, 4, 2, 1, 3] * 4 + [3, 2, 1])


class Pad(layers.Layer):
    def call(self, x):
        return x.to_tensor() if isinstance(x, tf.RaggedTensor) else x


def pads():
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    hidden = layers.Embedding(6, 3, mask_zero=True)(Pad()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


@same_on_towers(pads, TOWERS)
def test_ragged_inputs(model):
    """The model pads the rows itself, and masks the padding."""
    history = fit(compiled(model), dataset(TOKENS, Y))
    return history, predict(model, TOKENS), model.train_on_batch(TOKENS[:5], Y[:5])


class TakesNoDenseTensors(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.kernel = layers.Embedding(6, 3, mask_zero=True), self.add_weight((4, 3))
        self.last = layers.Dense(2)

    def call(self, inputs):
        tokens, flags = inputs
        averages = layers.GlobalAveragePooling1D()(self.embedding(tokens.to_tensor()))
        return self.last(averages + tf.sparse.sparse_dense_matmul(flags, self.kernel.value))


@same_on_towers(TakesNoDenseTensors, TOWERS)
def test_subclassed_models_that_take_nothing_but_ragged_and_sparse_tensors(model):
    return fit(compiled(model), (TOKENS, tf.sparse.from_dense(SPARSE)), Y)


LETTERS = np.array([list("abcd")[i % 4] for i in range(ROWS)])
TEXTS = np.array([" ".join("abcde"[: 1 + i % 5]) for i in range(ROWS)])


def takes_strings():
    inputs = {name: keras.Input((1,), dtype="string", name=name) for name in ("letter", "text")}
    parts = [layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")(inputs["letter"])]
    for length in (6, None):
        tokens = layers.TextVectorization(vocabulary=["a", "b", "c", "d"], output_sequence_length=length)(inputs["text"])
        parts.append(layers.GlobalAveragePooling1D()(layers.Embedding(6, 3, mask_zero=True)(tokens)))
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(parts)))


@same_on_towers(takes_strings, TOWERS)
def test_strings(model):
    """Texts are padded to a fixed length and to the longest text, and the padding is masked."""
    tensors = {"letter": tf.constant(LETTERS[:, None]), "text": tf.constant(TEXTS[:, None])}
    history = fit(compiled(model), tensors, Y)
    rows = tf.data.Dataset.from_tensor_slices((tensors, Y)).batch(BATCH)
    return history, fit(model, rows), predict(model, rows)


@runs_dry
@same_on_towers(dense, TOWERS)
def test_datasets(model):
    """Covers cached and endless datasets, whole batches only, unknown lengths and shapes, any sizes, and a scalar weight."""
    compiled(model)
    sizes = (7, 1, 9, 2, 4)
    shapes = tf.TensorSpec((None, None), "float64")
    datasets = [
        dataset(X, Y, W).cache().prefetch(2),
        dataset(X, Y, drop_remainder=True).map(lambda x, y: (x, tf.cast(y, "float32"))),
        dataset(X, Y, W).filter(lambda x, y, w: True),
        dataset(X, Y).map(lambda x, y: (x, y, tf.constant(0.5))),
        tf.data.Dataset.from_generator(lambda: generator(X, Y, sizes=sizes), output_signature=(shapes, shapes)),
    ]
    histories = [fit(model, data) for data in datasets]
    histories.append(fit(model, dataset(X, Y, W).repeat(), steps_per_epoch=5, epochs=2))
    return histories, evaluate(model, datasets[-1]), predict(model, datasets[-1])


@runs_dry
@same_on_towers(dense, TOWERS)
def test_datasets_that_depend_on_what_was_trained(model):
    """With reading ahead turned off, each batch is read when the last one is learned, as an agent's memory needs it."""
    compiled(model)
    seen = []

    def replay():
        for i in range(12):
            yield X[:BATCH], Y[:BATCH] + len(seen) + i

    shapes = tf.TensorSpec((None, 4), "float64"), tf.TensorSpec((None, 2), "float64")
    learned = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    data = tf.data.Dataset.from_generator(replay, output_signature=shapes)
    options = tf.data.Options()
    options.autotune.enabled = False
    data = data.with_options(options)
    return fit(model, data, steps_per_epoch=4, epochs=2, callbacks=[learned]), fit(model, data, callbacks=[learned]), seen


class Traced(keras.Model):
    traces = []  # noqa: RUF012

    def train_step(self, data):
        self.traces.append(data[0].shape)
        return super().train_step(data)


def traced():
    tokens = keras.Input((None,), dtype="int64")
    return Traced(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(layers.Embedding(9, 4, mask_zero=True)(tokens))))


@runs_dry
@same_on_towers(traced, TOWERS)
def test_batches_that_are_padded_to_different_widths(model):
    """A custom step is traced as often as on one device, and not for each width."""
    Traced.traces.clear()
    compiled(model)
    sentences = [(np.arange(4 * width).reshape(4, width) % 8 + 1, Y[:4]) for width in (3, 5, 9, 4)]
    types = tf.TensorSpec((None, None), "int64"), tf.TensorSpec((None, 2), "float64")
    results = fit(model, tf.data.Dataset.from_generator(lambda: sentences, output_signature=types), epochs=2)
    return results, [model.train_on_batch(*batch) for batch in sentences], len(Traced.traces)


@same_on_towers(for_data({"b": Y, "a": X}, {"p": Y, "q": W}), TOWERS)
def test_datasets_of_dictionaries(model):
    compiled(model, metrics={"p": "mae", "q": "mse"})
    data = dataset({"a": X, "b": Y}, {"q": W, "p": Y}, {"q": W, "p": W**2})
    return fit(model, data), evaluate(model, data), predict(model, data.map(lambda x, y, w: x))


@runs_dry
@same_on_towers(dense, TOWERS)
def test_generators(model):
    """Covers endless generators, None for weights, and batches of any size; also in validation, `evaluate` and `predict`."""
    compiled(model)
    histories = [
        fit(model, generator(X, Y, W, repeat=True), steps_per_epoch=5, epochs=2),
        fit(model, X, Y, validation_data=generator(X, Y, repeat=True), validation_steps=3),
        fit(model, generator(X, Y, sizes=(7, 1, 9, 2, 4))),
        fit(model, ((x, y, None) for x, y in generator(X, Y))),
    ]
    return histories, evaluate(model, generator(X, Y, repeat=True), steps=3), predict(model, generator(X))


@same_on_towers(dense, TOWERS)
def test_py_datasets(model):
    """With threads, `on_epoch_begin` and `on_epoch_end` are called as often as in plain Keras."""
    arguments = {"workers": 2, "max_queue_size": 2}
    compiled(model)
    data, validation = PyDataset(X, Y, W, **arguments), PyDataset(X, Y, **arguments)
    histories = [fit(model, data, epochs=2, validation_data=validation)]
    histories.append(fit(model, EndlessPyDataset(X, Y, **arguments), steps_per_epoch=5))
    assert set(data.calls) == {"begin", "end"}
    return histories, evaluate(model, data), predict(model, data), data.calls, validation.calls


@same_on_towers(dense, TOWERS)
def test_shuffle(model):
    """With the same seed, the rows come in the same order as in plain Keras. Python's random numbers shuffle a `PyDataset`."""
    compiled(model)
    histories = [fit(model, X, Y, shuffle=True, epochs=2, validation_split=0.3)]
    histories += [fit(model, X, Y, shuffle="batch"), fit(model, X, Y, shuffle=True)]
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH)
    augmented = rows.map(lambda x, y: (x + tf.random.normal(tf.shape(x), dtype="float64"), y))
    histories += [fit(model, augmented, epochs=2), fit(model, PyDataset(X, Y), shuffle=True, epochs=3)]
    return histories, next_draws()


@pytest.mark.filterwarnings("ignore:The structure of `inputs` doesn't match")
@same_on_towers(for_data([X, Y], Y), TOWERS)
def test_inputs_in_lists_and_tuples_and_by_name(model):
    compiled(model, metrics=None)
    ways = [[X, Y], (X, Y), {"b": Y, "a": X}]
    return [fit(model, x, Y) for x in ways], predict(model, ways[-1])


NESTED_X = {"one": (W, [X.reshape(ROWS, 2, 2, 1)]), "two": {"three": np.zeros((ROWS, 0)), "four": X.reshape(ROWS, 2, 2)}}
NESTED_Y = {"all": [Y], "some": {"few": (W, W**2)}}


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict, all keys")
@same_on_towers(for_data(NESTED_X, NESTED_Y), TOWERS)
def test_deeply_nested_structures_of_any_rank(model):
    """Covers single numbers, images, and inputs without features, in lists and tuples in dictionaries."""
    compiled(model, metrics=None)
    return fit(model, NESTED_X, NESTED_Y), evaluate(model, NESTED_X, NESTED_Y), predict(model, NESTED_X)


@same_on_towers(for_data([X], [Y]), TOWERS)
def test_lists_and_dictionaries_of_one(model):
    compiled(model)
    return fit(model, [X], [Y], sample_weight=[W]), fit(model, {"a": X}, Y), predict(model, X)


class Shift(layers.Layer):
    def call(self, x, shift=None):
        return x if shift is None else x + shift


def with_an_optional_input():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((4,), name="b", optional=True)}
    p = layers.Dense(2, name="p")(Shift()(inputs["a"], inputs["b"]))
    return keras.Model(inputs, {"p": p, "q": layers.Rescaling(2.0, name="q")(p), "r": layers.Rescaling(3.0, name="r")(p)})


@same_on_towers(with_an_optional_input, TOWERS)
def test_none_in_place_of_an_array(model):
    """None stands for an optional input, for the weights of the output "q", and for the targets of "r", which has no loss.

    Then the targets have "p" alone.
    """
    compiled(model, loss={"p": "mse", "q": "mse", "r": None}, metrics=None)
    x, y, weights = {"a": X, "b": None}, {"p": Y, "q": Y, "r": None}, {"p": W, "q": None, "r": None}
    results = fit(model, x, y, sample_weight=weights), predict(model, x)
    return results, fit(compiled(model, loss={"p": "mse"}, metrics=None), x, {"p": Y}, sample_weight={"p": W})


def of_flags_and_classes():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [layers.Dense(1, "sigmoid")(inputs), layers.Dense(3, "softmax")(inputs)])


@same_on_towers(of_flags_and_classes, TOWERS)
def test_targets_of_rank_one(model):
    """Keras fits flags and class numbers of shape (rows,) to the shape of the outputs. Weights have the shape (rows, 1)."""
    metrics = [["accuracy"], ["accuracy"]]
    losses = ["binary_crossentropy", "sparse_categorical_crossentropy"]
    compiled(model, loss=losses, metrics=metrics, weighted_metrics=metrics)
    y, weights = [CLASSES > 1, CLASSES.astype("uint8")], [W[:, None], W[:, None]]
    return fit(model, X, y, sample_weight=weights)


@same_on_towers(dense, TOWERS)
def test_sample_weight(model):
    """Weights of rows may be negative, integers, or all zero in a slice, in a batch and everywhere."""
    row = np.arange(ROWS)
    weights = [W, W - 0.5, row, np.where(row < 2, 0, W), np.where(row < BATCH, 0, W), 0 * W]
    compiled(model, weighted_metrics=["mae"])
    return [fit(model, X, Y, sample_weight=w) for w in weights]


@same_on_towers(lambda: dense(3, "softmax"), TOWERS)
def test_class_weight(model):
    """Covers arrays, datasets, `PyDataset`s and single batches; classes without a weight have 1."""
    arguments = {"class_weight": {0: 0.2, 2: 3.0}}
    compiled(model, loss="sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
    ways = [(X, CLASSES), (dataset(X, CLASSES),), (PyDataset(X, CLASSES),)]
    return [fit(model, *data, **arguments) for data in ways], model.train_on_batch(X[:5], CLASSES[:5], **arguments)


@same_on_towers(dense, TOWERS)
def test_validation(model):
    """Covers splits, and arrays and datasets, with weights, in some epochs, with batch sizes and numbers of steps."""
    compiled(model, weighted_metrics=["mse"])
    ways = [
        {"validation_split": 0.3, "validation_batch_size": 5, "validation_freq": 2, "epochs": 4},
        {"validation_data": (X[:11], Y[:11], W[:11]), "validation_freq": [1, 3], "validation_steps": 2, "epochs": 3},
        {"validation_data": [X, Y], "validation_batch_size": 4},
        {"validation_data": dataset(X, Y, W)},
        {"validation_data": dataset(X, Y).repeat(), "validation_steps": 6},
    ]
    histories = [fit(model, X, Y, sample_weight=W, **arguments) for arguments in ways]
    return histories, fit(model, tf.constant(X), Y, sample_weight=W, validation_split=0.05)


@runs_dry
@same_on_towers(dense, TOWERS)
def test_batch_sizes_and_steps(model):
    """Covers more and fewer steps than batches of data, with and without a batch size, and `initial_epoch`."""
    compiled(model)
    ways = [
        {"batch_size": None},
        {"batch_size": 100},
        {"batch_size": 1},
        {"batch_size": None, "steps_per_epoch": 4},
        {"steps_per_epoch": 6, "epochs": 3},
        {"steps_per_epoch": 3, "epochs": 4, "initial_epoch": 1},
    ]
    return [fit(model, np.tile(X, (2, 1)), np.tile(Y, (2, 1)), **arguments) for arguments in ways]


@runs_dry
@same_on_towers(dense, TOWERS)
def test_steps_per_execution(model):
    """Covers executions of three steps and of the remaining ones, also with an unknown number of batches or given steps.

    More than one step crashes under tf.distribute.
    """
    compiled(model, steps_per_execution=3)
    unknown = dataset(X, Y).filter(lambda x, y: True)
    histories = [fit(model, X, Y, epochs=2, validation_data=(X, Y)), fit(model, unknown, epochs=2)]
    histories += [fit(model, data, steps_per_epoch=5) for data in (dataset(X, Y).repeat(), EndlessPyDataset(X, Y))]
    return histories, predict(model, unknown)


@same_on_towers(dense, TOWERS)
def test_methods_beside_fit(model):
    """Covers batch sizes, steps, weights of rows and classes, results as lists and dictionaries, and fewer rows than towers."""
    compiled(model, weighted_metrics=["mse"])
    results = []
    for x, y, w in batches(X, Y, W, sizes=(5, 2)):
        results.append(model.train_on_batch(x, y, w, return_dict=True))
        results.append(model.train_on_batch(x, y, class_weight={1: 2.0}))
        results += [model.test_on_batch(tf.constant(x), y, w), model.predict_on_batch(x)]
    ways = [{"batch_size": size} for size in (None, 4)] + [{"batch_size": 5, "steps": 2}]
    results += [evaluate(model, X, Y, sample_weight=W, **arguments) for arguments in ways]
    results += [evaluate(model, dataset(X, Y, W), steps=2), evaluate(model, PyDataset(X, Y), return_dict=False)]
    predictions = [predict(model, X, **arguments) for arguments in ways]
    return results, model.test_on_batch(x, y, return_dict=True), predictions, predict(model, dataset(X), steps=2)


def of_any_dtype():
    x, tokens = keras.Input((4,), name="x"), keras.Input((None,), dtype="int64", ragged=True, name="tokens")
    best = keras.ops.argmax(x, -1)
    outputs = {"flags": x > 0, "half": keras.ops.cast(x, "float16"), "best": best}
    return keras.Model(
        {"x": x, "tokens": tokens},
        {**outputs, "names": layers.Lambda(tf.strings.as_string)(best), "twice": layers.Lambda(lambda x: 2 * x)(tokens)},
    )


@same_on_towers(of_any_dtype, TOWERS)
def test_predictions_of_any_kind(model):
    """Covers integers, flags, half precision, strings and ragged tensors."""
    outputs = predict(compiled(model), {"x": X, "tokens": TOKENS})
    assert [outputs[name].dtype for name in ("flags", "half", "best")] == ["bool", "float16", "int32"]
    ragged = outputs.pop("twice")
    return {**outputs, "names": outputs["names"].astype(int)}, ragged.flat_values, ragged.row_lengths()


class NoiseForEachRow(keras.Sequential):
    """Reads the number of rows from the static shape."""

    def train_step(self, data):
        x, y = data
        noise = tf.random.stateless_normal((x.shape[0], 4), [1, 2], dtype=x.dtype)
        return super().train_step((x + noise, y))


@same_on_towers(lambda: NoiseForEachRow([keras.Input((4,)), layers.Dense(2)]), TOWERS)
def test_fails_where_one_device_does_not_know_the_batch_size(model):
    """After traces for two sizes, TensorFlow traces a function for any size."""
    compiled(model)
    results = []
    for size in (7, 5, 6, 7):
        try:
            results.append(fit(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, drop_remainder=True)))
        except (TypeError, ValueError):
            results.append(f"{size} fails")
    assert {type(result) for result in results} == {dict, str}
    return results


@same_on_towers(lambda: keras.Sequential([keras.Input((None,), dtype="int64", ragged=True), Pad()]), TOWERS)
def test_outputs_that_are_padded_to_the_longest_row(model):
    """The longest row is that of the global batch: slices have others."""
    return model.predict_on_batch(TOKENS[:5])


REFUSED = {
    "lists of numbers": lambda model: model.fit(X.tolist(), Y.tolist()),
    "objects": lambda model: model.fit(X.astype(object), Y),
    "strings of a fixed length": lambda model: model.fit(TEXTS, Y),
    "another number of targets": lambda model: model.fit(X, Y[:5]),
    "targets beside a dataset": lambda model: model.fit(dataset(X, Y), Y),
    "class weights and a generator": lambda model: model.fit(generator(X, Y), class_weight={0: 1.0}, shuffle=False),
    "class weights and weights of a batch": lambda model: model.train_on_batch(X, Y, W, class_weight={0: 1.0}),
    "a split of a dataset": lambda model: model.fit(dataset(X, Y), validation_split=0.3),
    "a generator of lists": lambda model: model.fit(([x, y] for x, y in generator(X, Y)), shuffle=False),
    "an empty generator": lambda model: model.fit(generator(sizes=()), shuffle=False),
    "executions of any number of steps": lambda model: compiled(model, steps_per_execution="auto").fit(X, Y),
}


def test_refuses_what_keras_refuses():
    """The errors have the same words."""
    one, inner = twins(dense)
    parallel = keras_dp.DataParallelModel(inner, devices=TOWERS)
    for what, call in REFUSED.items():
        words = []
        for model in (one, parallel):
            with pytest.raises((ValueError, TypeError)) as caught:
                call(compiled(model))
            words.append((type(caught.value), str(caught.value)))
        assert words[0] == words[1], what


class DrawsItsPoints(keras.Sequential):
    """Learns a function from points that the step draws itself, as networks for differential equations do."""

    def train_step(self, largest):
        x = largest * tf.random.stateless_uniform((20, 1), [1, 2], dtype="float64")
        return super().train_step((x, tf.sin(x)))


def test_batches_of_numbers_without_rows(caplog):
    """They were once refused. There is nothing in them that towers could divide."""

    def build():
        return DrawsItsPoints([keras.Input((1,)), layers.Dense(4, "tanh"), layers.Dense(1)])

    numbers = tf.data.Dataset.from_tensor_slices(np.arange(1.0, 6.0))
    assert_same_script(build, lambda model: fit(compiled(model), numbers, epochs=2), TOWERS)
    (record,) = [record for record in caplog.records if "without rows" in record.message]
    assert "one device computes the step" in record.message


@runs_dry
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")
def test_refuses_batches_without_rows():
    """Plain Keras would take a step with a loss of 0, and would log nothing for validation data without batches."""
    parallel = compiled(keras_dp.DataParallelModel(dense(), devices=TOWERS))
    none = dataset(X, Y).filter(lambda x, y: False)
    for method in (parallel.fit, parallel.evaluate, parallel.predict):
        with pytest.raises(ValueError, match="dataset is empty"):
            method(dataset(X, Y).take(0), verbose=0)
        with pytest.raises(ValueError, match=rf"{method.__name__}\(\) was given no batch"):
            method(none, verbose=0)
    with pytest.raises(ValueError, match=r"evaluate\(\) was given no batch"):
        fit(parallel, X, Y, validation_data=none)
    with pytest.raises(ValueError, match="no batch|empty"):
        fit(parallel, X[:0], Y[:0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one row"):
        parallel.train_on_batch(X[:0], Y[:0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one row"):
        fit(parallel, generator(X, Y, sizes=(5, 0, 5)))
    # The model still trains afterwards, and no epoch is not an empty dataset.
    assert len(fit(parallel, X, Y)["loss"]) == 1
    assert fit(parallel, X, Y, epochs=0) == {}


def test_refuses_tensors_with_other_numbers_of_rows():
    parallel = compiled(keras_dp.DataParallelModel(dense(), devices=TOWERS))
    with pytest.raises(ValueError, match=r"same number of rows.*\(23, 4\) \(0\), \(5, 2\) \(1\)"):
        parallel.train_on_batch(X, Y[:5])
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        fit(parallel, ((x, y[:1]) for x, y in generator(X, Y)))
    single_rows = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"\(2,\) \(1\). If these are single rows, make batches of them: dataset.batch\("):
        fit(parallel, single_rows)
    unbuilt = keras_dp.DataParallelModel(keras.Sequential([layers.Dense(2)]), devices=TOWERS)
    for method, rows in [
        (lambda rows, verbose: fit(parallel, rows), single_rows.map(lambda x, y: (x, y[0]))),
        (parallel.predict, single_rows.map(lambda x, y: x)),
        (unbuilt.predict, single_rows.map(lambda x, y: x)),
    ]:
        with pytest.raises(ValueError, match="shape|ndim") as error:
            method(rows, verbose=0)
        said = "".join(traceback.format_exception_only(error.value))
        note = "keras_dp: if the dataset gives single rows, make batches of them: dataset.batch(32).\n"
        assert said.endswith(f"\n{note}")
        assert said.count(note) == 1
    untraced = compiled(keras_dp.DataParallelModel(dense(), devices=TOWERS))
    with pytest.raises(ValueError, match="shape") as error:  # Other errors of Keras mention (None, 4), too.
        fit(untraced, dataset(X[:, :3], Y))
    assert "keras_dp:" not in "".join(traceback.format_exception_only(error.value))
