"""Batches whose tensors have several numbers of rows give one device's result, whichever of them are cut."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script, twins
from keras import layers, ops
from programs.steps import Learner

import keras_dp
from keras_dp.batches.other_rows import FoundWhole, other_than_cut
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut, own_rows
from keras_dp.batches.whole_tensors import WholeNames, WholeTensors

# Keras warns so whenever the length of a dataset is unknown.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
]

rng = np.random.default_rng(0)


def dataset(seed, rows, *types):
    """Returns four batches of `rows` rows, with random tensors of the given shapes, or of integers below a number."""
    rng = np.random.default_rng(seed)
    arrays = [
        rng.integers(0, below, size=(4, rows, *shape)) if below else rng.normal(size=(4, rows, *shape))
        for shape, below in types
    ]
    return tf.data.Dataset.from_tensor_slices(tuple(arrays) if len(arrays) > 1 else arrays[0])


NUMBERS = ((4,), 0)
CLASSES = ((), 3)


def labelled_and_unlabelled(labelled=6, unlabelled=10):
    return tf.data.Dataset.zip(dataset(1, labelled, NUMBERS, CLASSES), dataset(2, unlabelled, NUMBERS))


class SemiSupervised(Learner, keras.Model):
    """Learns from labelled rows, and from the most likely classes of unlabelled rows."""

    def __init__(self):
        super().__init__()
        stack = [layers.Dense(8, activation="tanh"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(3)]
        self.classify = keras.Sequential(stack)

    def call(self, x, training=None):
        return self.classify(x, training=training)

    def loss_of(self, labelled, unlabelled):
        likely = ops.stop_gradient(ops.argmax(self(unlabelled, training=False), axis=-1))
        crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        of_labelled = crossentropy(labelled[1], self(labelled[0], training=True))
        return of_labelled + 0.5 * crossentropy(likely, self(unlabelled, training=True)), {"labelled": of_labelled}


def build_semi_supervised(cls=SemiSupervised):
    model = cls()
    model(np.zeros((1, 4)))
    return model


def fit(model, data, **arguments):
    return model.fit(data, shuffle=False, verbose=0, **arguments).history


def test_what_has_other_rows_stays_whole_without_a_name():
    """The types of the dataset say that labelled and unlabelled rows differ. Evaluation and prediction see other batches."""

    def script(model):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
        labelled = dataset(3, 6, NUMBERS, CLASSES)
        history = fit(model, labelled_and_unlabelled(), epochs=2, validation_data=labelled)
        # Rows that are equal for once, and the other way round.
        more = [fit(model, labelled_and_unlabelled(*rows)) for rows in ((6, 6), (10, 6), (2, 1))]
        return [history, more, model.evaluate(labelled, verbose=0), model.predict(labelled, verbose=0)]

    assert_same_script(build_semi_supervised, script, (1, 3))


def test_a_warning_says_once_what_stays_whole(caplog):
    parallel = keras_dp.DataParallelModel(build_semi_supervised(), devices=2)
    parallel.compile("sgd")
    for _ in range(2):
        parallel.fit(labelled_and_unlabelled(), verbose=0)
    (said,) = [record.getMessage() for record in caplog.records if "numbers of rows" in record.getMessage()]
    assert "6 (0/0, 0/1) and 10 (1). Those with 6 rows are cut" in said
    assert 'DataParallelModel(..., whole=["1"])' in said
    # explain() and check_step() take a batch of this dataset as it is.
    batch = next(iter(labelled_and_unlabelled()))
    assert "batch of 6 rows" in str(parallel.explain(batch))
    assert keras_dp.check_step(parallel, batch).is_exact


def test_rows_that_are_joined_with_others(caplog):
    """All is computed once, and the warning does not say otherwise."""

    class Joined(SemiSupervised):
        def train_step(self, data):
            return super().train_step(((tf.concat([data["a"], data["b"]], axis=0), tf.range(13) % 3), data["a"]))

    def data():
        return tf.data.Dataset.zip({"a": dataset(1, 9, NUMBERS), "b": dataset(2, 4, NUMBERS)})

    def script(model):
        model.compile("sgd")
        return fit(model, data(), epochs=2)

    _, parallel = assert_same_script(lambda: build_semi_supervised(Joined), script, 3)
    assert "computed from them alone, or from rows joined with them, is computed once" in caplog.text
    (joined, *_) = parallel.explain(next(iter(data()))).once
    assert joined.type == "ConcatV2"


class Graphs(keras.Model):
    """Adds to each node what it receives along its edges, with a loss for each node."""

    def __init__(self):
        super().__init__()
        self.update = layers.Dense(2)

    def call(self, graph):
        nodes, edges = graph["nodes"], graph["edges"]
        received = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
        return self.update(ops.concatenate([nodes, received], axis=-1))


def build_graphs():
    model = Graphs()
    model({"nodes": np.zeros((1, 4)), "edges": np.zeros((1, 2), int)})
    return model


def graphs(targets=True):
    nodes, edges = dataset(1, 7, NUMBERS, ((2,), 0)), dataset(2, 9, ((2,), 7))
    return tf.data.Dataset.zip(nodes, edges).map(
        lambda node, edges: ({"nodes": node[0], "edges": edges}, *([node[1]] if targets else []))
    )


@pytest.mark.parametrize("is_trained", [True, False])
def test_predictions_cut_what_training_cuts(is_trained):
    """Without targets, the types alone do not tell rows from what they look up."""

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        before = [fit(model, graphs(), epochs=2), model.evaluate(graphs(), verbose=0)] if is_trained else []
        after = [model.predict(graphs(targets), verbose=0) for targets in (False, True)]
        return [before, after, fit(model, graphs())]

    _, parallel = assert_same_script(build_graphs, script, 3)
    assert (parallel.tower_steps.inputs.whole.paths == ("0/edges",)) == is_trained


class WithTable(keras.Model):
    """Scales what a layer makes of the rows by the batch's temperature, if there is one, and adds the mean of its table."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.sizes = layer, []

    def call(self, inputs, training=None):
        self.sizes.append(inputs["table"].shape[0])
        return self.layer(inputs["rows"]) * inputs.get("temperature", 1.0) + ops.mean(inputs["table"])


def with_table(layer):
    model = WithTable(layer)
    model({"rows": np.zeros((1, 4)), "table": np.zeros((5, 4))})
    return model


def test_traces_of_one_dataset_are_not_used_for_another():
    """The same tensor has rows in one dataset, and other rows in the next, of types that a function generalizes."""

    def data(rows, table):
        zipped = tf.data.Dataset.zip(dataset(1, rows, NUMBERS, ((2,), 0)), dataset(2, table, NUMBERS))
        return zipped.map(lambda row, table: ({"rows": row[0], "table": table}, row[1]))

    def script(model):
        model.compile("sgd", "mse")
        sizes = ((8, 5), (8, 4), (8, 8), (4, 4), (8, 5), (4, 2))
        return [(fit(model, data(*size)), model.predict(data(*size), verbose=0)) for size in sizes]

    assert_same_script(lambda: with_table(layers.Dense(2)), script, 2)


def reading(rows):
    x = np.random.default_rng(1).normal(size=(rows, 4))
    return {"rows": x, "table": np.random.default_rng(2).normal(size=(5, 4)), "temperature": np.float64(0.5)}, x[:, :2]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_table_and_a_scalar_beside_the_rows(run_eagerly):
    """The table's size is known in the trace."""

    def data(rows):
        inputs, y = reading(rows)
        batches = tf.data.Dataset.from_tensor_slices((inputs["rows"], y)).batch(5)
        return batches.map(lambda rows, y: (inputs | {"rows": rows}, y))

    def script(model):
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        histories = [fit(model, data(rows), epochs=2) for rows in (7, 9)]
        model.train_on_batch(*reading(9))
        return [histories, [model.predict_on_batch(reading(rows)[0]) for rows in (9, 8, 2)]]

    _, parallel = assert_same_script(lambda: with_table(layers.Dense(2)), script, 3, {"whole": ["table"]})
    assert set(parallel.inner_model.sizes) == {5}


def test_recalibration_keeps_what_is_whole():
    x = rng.normal(size=(12, 4))
    rows = tf.data.Dataset.from_tensor_slices(x).batch(5)
    data = rows.map(lambda rows: {"rows": rows, "table": tf.ones((3, 4), tf.float64)})
    by_model, by_argument = twins(lambda: with_table(layers.BatchNormalization()))
    keras_dp.recalibrate_batch_norm(keras_dp.DataParallelModel(by_model, devices=3, whole=["table"]), data, verbose=0)
    keras_dp.recalibrate_batch_norm(by_argument, data, verbose=0, whole=["table"])
    for model in (by_model, by_argument):
        np.testing.assert_allclose(model.layer.moving_mean, x.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(model.layer.moving_variance, x.var(axis=0), rtol=1e-12)
    with pytest.raises(ValueError, match="Did you mean 'table'"):
        keras_dp.recalibrate_batch_norm(by_argument, data, verbose=0, whole=["tabel"])
    # All tensors may stay whole.
    keras_dp.recalibrate_batch_norm(by_argument, data, verbose=0, whole=["table", "rows"])
    np.testing.assert_allclose(by_argument.layer.moving_mean, x.mean(axis=0), rtol=1e-12)


# Names.


def test_what_is_cut():
    """Rows that inputs and targets share are cut; else those of most tensors; else the most rows."""
    assert other_than_cut({"0/nodes": 8, "0/edges": 13, "0/weights": 13, "1": 8}) == ["0/edges", "0/weights"]
    assert other_than_cut({"0/0": 6, "0/1": 6, "1": 10}) == ["1"]
    assert other_than_cut({"0/0": 6, "0/1": 6, "1/0": 10, "1/1": 10}) == ["0/0", "0/1"]
    assert other_than_cut({"0/rows": None, "0/table": 5, "0/names": 7, "1": None}) == ["0/table", "0/names"]


def test_what_the_types_do_not_say_is_not_found():
    def found(*shapes):
        return FoundWhole().add_to(WholeTensors(), tuple(map(tf.TensorSpec, shapes))).paths

    assert found([6, 4], [5, 4], [6]) == ("1",)
    # These may be single rows, and these have any numbers of rows.
    assert found([4], [3]) == found([None, 4], [5, 4]) == found([None, 4], [5, 4], [6, 4]) == ()


def test_names_are_keys_and_indices():
    batch = ({"nodes": tf.zeros((3, 2)), "edges": {"from": tf.zeros(4), "to": tf.zeros(4)}}, tf.zeros(3))
    assert [WholeTensors((name,)).of(batch) for name in ("edges", "0/edges/to", "1", "edges/from", "edge")] == [
        [True, True, False, False],
        [False, True, False, False],
        [False, False, False, True],
        [True, False, False, False],
        [False, False, False, False],
    ]
    assert WholeTensors().of((tf.zeros(()), tf.zeros(2), None)) == [True, False, False]


def test_copies_keep_what_is_whole():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(3)]), devices=2, whole=["table"])
    assert keras.models.clone_model(parallel).tower_steps.inputs.whole == parallel.tower_steps.inputs.whole


class Sums(keras.Sequential):
    """Sums all tensors of a batch, of any structure."""

    def train_step(self, data):
        return {"sum": tf.add_n([tf.reduce_sum(leaf) for leaf in keras.tree.flatten(data) if leaf is not None])}


NAMES = {
    "labelled and unlabelled": (((6, 6), 10), ["1"]),
    "a structure": (({"nodes": 7, "edges": {"from": 9, "to": 9}}, 7), ["from", "to"]),
    "the same key twice": (({"a": {"x": 7}, "b": {"x": 9}}, 7), ["0/b/x"]),
}


def noted(error):
    """Returns an error with its notes, which belong to its text before Python 3.11."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("name", NAMES)
def test_errors_name_what_must_stay_whole(name):
    """The names are the same whether the numbers of rows are known before the batch or with it; and they are enough."""
    structure, names = NAMES[name]
    batch = keras.tree.map_structure(np.ones, structure)
    said = "DataParallelModel(..., whole=[{}])".format(", ".join(f'"{name}"' for name in names))

    def model(whole):
        parallel = keras_dp.DataParallelModel(Sums([keras.Input((4,)), layers.Dense(2)]), devices=2, whole=whole)
        parallel.compile("sgd")
        return parallel

    with pytest.raises(ValueError, match="same number of rows") as error:
        model([]).train_on_batch(*batch)
    assert said in str(error.value)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received numbers of rows:") as error:
        model([]).fit((batch for _ in range(3)), verbose=0)
    assert said in noted(error.value)
    history = model(names).fit((batch for _ in range(3)), verbose=0).history
    assert history["sum"] == [sum(keras.tree.flatten(structure))]


class Whole(keras.Model):
    """Has inputs that all stay whole, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.dense, self.dropout = layers.BatchNormalization(), layers.Dense(2), layers.Dropout(0.3)

    def call(self, inputs, training=None):
        outputs = self.dense(self.dropout(self.norm(inputs["x"], training=training), training=training))
        self.add_loss(ops.mean(outputs**2))
        return outputs


WHOLE = rng.normal(size=(11, 4))


def build_whole():
    model = Whole()
    model({"x": WHOLE})
    return model


def test_nothing_is_cut():
    """Evaluates, predicts and trains with batches all of whose tensors stay whole: once, on one device."""

    def script(model):
        model.compile(keras.optimizers.Adam(0.01))
        batches = tf.data.Dataset.from_tensor_slices({"x": WHOLE}).batch(4)
        return [
            fit(model, {"x": WHOLE}, batch_size=4, epochs=2),
            fit(model, (({"x": WHOLE[i : i + 4]},) for i in (0, 4))),
            model.evaluate(batches, verbose=0),
            model.predict(batches, verbose=0),
            [model.train_on_batch({"x": WHOLE[:rows]}) for rows in (5, 1)],
            model.test_on_batch({"x": WHOLE[:5]}),
            model.predict_on_batch({"x": WHOLE[:5]}),
        ]

    _, parallel = assert_same_script(build_whole, script, 3, {"whole": ["x"]})
    assert keras_dp.check_step(parallel, ({"x": WHOLE},)).is_exact
    assert "0 operations on each tower" in str(parallel.explain(({"x": WHOLE},)))


def test_rows_of_a_worker_are_those_of_tensors_that_are_cut():
    slices = cut(({"x": np.ones((8, 4))},), Shares.alike(2), whole=WholeTensors(("x",)))
    with pytest.raises(ValueError, match=r'rows="shard".*all tensors of the batch stay whole.*0/x'):
        own_rows(tf.ones((8, 2)), slices[:1])


def test_refuses_a_text_and_misspelled_names():
    with pytest.raises(ValueError, match="`whole` lists names of tensors.*Received: whole='table'"):
        keras_dp.DataParallelModel(build_graphs(), devices=2, whole="table")
    parallel = keras_dp.DataParallelModel(build_graphs(), devices=2, whole=["edgs"])
    parallel.compile("sgd", "mse")
    said = r"names 'edgs', but the batch has no such.*mean 'edges'\?.*'0/edges', '0/nodes', '1'.*Received: whole=\['edgs'\]"
    for method in (parallel.fit, parallel.evaluate):
        with pytest.raises(ValueError, match=said):
            method(graphs())
    for method in (parallel.train_on_batch, parallel.test_on_batch):
        with pytest.raises(ValueError, match=said):
            method(*next(iter(graphs())))


def test_names_that_a_method_need_not_have():
    """Predictions have no targets, and a step of the user's own may evaluate other data than it learns from."""
    parallel = keras_dp.DataParallelModel(build_semi_supervised(), devices=2, whole=["1/unlabelled"])
    parallel.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labelled = dataset(3, 6, NUMBERS, CLASSES)
    parallel.predict(labelled, verbose=0)
    parallel.evaluate(labelled, verbose=0)
    with pytest.raises(ValueError, match="names '1/unlabelled', but"):
        parallel.fit(labelled, verbose=0)


def test_names_that_a_batch_had_once_may_be_missing_later():
    names = WholeNames(["edges", "1/more"])
    names.see({"edges": tf.zeros(2)}, has_all=False)
    names.see((tf.zeros(2), {"more": tf.zeros(2)}), has_all=True)
    names.see((tf.zeros(2), tf.zeros(2)), has_all=True)
