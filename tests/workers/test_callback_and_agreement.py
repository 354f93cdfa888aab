"""Workers check that models and data are the same, start with the same variables, and write files on one worker."""

import copy
import itertools
import json
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from worker_threads import on_workers

from keras_dp.keras_internals.keras_models import all_variables
from keras_dp.workers.agreement import described_data, described_graph, described_model
from keras_dp.workers.callback import SameStateCallback, WorkersCallback, with_workers_callbacks
from keras_dp.workers.collectives import Collectives, OneWorker
from keras_dp.workers.group import WorkerGroup
from keras_dp.workers.synchronization import refuse_different, synchronize

rng = np.random.default_rng(0)


class Told(OneWorker):
    """Receives the given messages as a worker, in place of any that are sent."""

    def __init__(self, *messages, index=0):
        super().__init__()
        self.index, self.count = index, len(messages)
        self.messages = [json.dumps(message).encode() for message in messages]

    def exchange(self, message):
        return self.messages


def model(optimizer="adam", loss="mse", seed=None, **dense):
    x = keras.Input((5,))
    initializer = keras.initializers.GlorotUniform(seed)
    hidden = layers.Dense(**{"units": 3, "activation": "tanh", "kernel_initializer": initializer} | dense)(x)
    made = keras.Model(x, layers.Dense(2)(layers.Dropout(0.5, seed=seed)(layers.BatchNormalization()(hidden))))
    made.compile(optimizer, loss)
    return made


# Agreement


def refused(*facts):
    with pytest.raises(ValueError, match="The workers must run the same script with the same arguments") as error:
        WorkerGroup(Told(*facts)).agree(facts[0])
    return str(error.value).partition("They differ in ")[2]


def test_workers_agree_on_what_is_the_same():
    facts = {"epochs": 3, "nested": {"list": [1, None, {"a": 0.1}], "text": "x"}, "nan": float("nan")}
    WorkerGroup(Told(facts, facts, facts)).agree(facts)
    WorkerGroup().agree({"anything": object()})


def test_the_first_difference_is_named_with_its_path_and_both_values():
    facts = {"epochs": 3, "layer 1": {"class": "Dense", "units": 4, "config": {"rate": 0.5}}, "x": "float32"}
    assert refused(facts, facts | {"epochs": 2, "x": "int8"}) == "epochs: worker 0 has 3, worker 1 has 2."
    other = copy.deepcopy(facts)
    other["layer 1"]["config"]["rate"] = 0.25
    assert refused(facts, facts, other) == "layer 1, config, rate: worker 0 has 0.5, worker 2 has 0.25."
    assert refused({"a": {"b": 1}}, {"a": None}) == "a: worker 0 has {'b': 1}, worker 1 has None."
    assert refused({"a": [1, 2]}, {"a": [1, 3]}) == "a: worker 0 has [1, 2], worker 1 has [1, 3]."
    assert refused({"a": 1}, {"a": 1, "b": 2}) == "b: worker 0 has None, worker 1 has 2."
    assert refused({"a": 1, "b": {"c": 2}}, {"a": 1}) == "b: worker 0 has {'c': 2}, worker 1 has None."


# Descriptions


@pytest.mark.parametrize("difference", [{}, {"optimizer": keras.optimizers.Adam(0.2)}, {"seed": 5}])
def test_twins_are_described_alike(difference):
    """What workers are given does not count. Neither do automatic names, which number the objects of a script."""
    assert described_model(model()) == described_model(model(**difference))


def decay(steps):
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, steps))


AXIS, OTHER_AXIS = (keras.losses.CategoricalCrossentropy(axis=axis) for axis in (1, -1))


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({}, {"units": 4}, "units: worker 0 has 3, worker 1 has 4."),
        ({}, {"activation": "relu"}, "activation: worker 0 has 'tanh', worker 1 has 'relu'."),
        ({}, {"optimizer": "sgd"}, "the optimizer, class: worker 0 has 'Adam', worker 1 has 'SGD'."),
        ({}, {"optimizer": keras.optimizers.Adam(beta_1=0.5)}, "the optimizer, beta_1: worker 0 has 0.9, worker 1 has 0.5."),
        ({}, {"loss": keras.losses.huber}, "the loss: worker 0 has 'mse', worker 1 has 'huber'."),
        ({}, {"dtype": "mixed_bfloat16"}, "'config': {'name': 'mixed_bfloat16'}, 'registered_name': None}\"."),
        ({"loss": AXIS}, {"loss": OTHER_AXIS}, "the loss, axis: worker 0 has 1, worker 1 has -1."),
        ({"optimizer": decay(10)}, {"optimizer": decay(20)}, "config, decay_steps: worker 0 has 10, worker 1 has 20."),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_differences_of_models_are_named(one, other, named):
    assert refused(*(described_model(model(**options)) for options in (one, other))).endswith(named)


def test_any_model_can_be_described():
    class Odd(keras.Model):
        def get_config(self):
            raise NotImplementedError

    nested = keras.Sequential([keras.Input((4, 5)), layers.Bidirectional(layers.RNN([layers.GRUCell(2), layers.LSTMCell(3)]))])
    outputs = keras.Model(x := keras.Input((4, 5)), {"a": layers.Dense(1)(x), "b": layers.Lambda(tf.nn.relu)(x)})
    outputs.compile(loss={"a": "mse", "b": None})
    for described in (Odd(), nested, outputs, keras.Sequential([layers.Dense(2)])):
        assert json.dumps(described_model(described))
    assert described_model(Odd()) != described_model(nested)
    assert described_model(model(optimizer=None))["the optimizer"] == {}


ARRAYS = {
    "ints": np.arange(6),
    "floats": rng.normal(size=(3, 2)),
    "float32": np.float32(rng.normal(size=(3, 2))),
    "shape": rng.normal(size=(2, 3)),
    "tensor": tf.constant([1.0, 2.0]),
    "variable": tf.Variable([1.0, 3.0]),
    "text": np.array(["a", "b"]),
    "other text": np.array(["a", "c"]),
    "objects": np.array([{}, None]),
    "string tensor": tf.constant(["a", "b", "c"]),
    "none": np.zeros((0, 2)),
    "scalar": np.float32(1.5),
}


def test_data_is_described_by_what_it_holds():
    descriptions = {name: described_data(array) for name, array in ARRAYS.items()}
    assert len(set(descriptions.values())) == len(ARRAYS)
    assert descriptions["ints"].startswith("int64 of shape [6], checksum ")
    assert {name: described_data(np.array(array)) for name, array in ARRAYS.items()} == descriptions
    one = rng.normal(size=(50, 3))
    assert described_data(one[::2].T) == described_data(np.ascontiguousarray(one[::2].T))
    # Of a large array, a sample is read.
    large = np.zeros((5000, 1000), np.int8)
    other = large.copy()
    other[0, 0] = other[-1] = 1
    assert described_data(large) != described_data(other)
    assert described_data(large) == described_data(large.copy())


def test_arguments_are_described():
    """A worker may take fewer batches of its own shard than the others."""
    data = tf.data.Dataset.range(4)
    arguments = {
        "x": [ARRAYS["ints"], (ARRAYS["floats"], None)],
        "class_weight": {0: 0.5, 1: 2.0},
        "generator": (i for i in range(3)),
        "dataset": data.batch(2),
        "shorter": data.batch(2).take(1),
        "ragged": tf.ragged.constant([[1], [2, 3]]),
        "sparse": tf.sparse.from_dense([[0, 1]]),
    }
    plain = {"batch_size": 4, "shuffle": True, "steps": None, "split": 0.5, "text": "batch"}
    described = json.loads(json.dumps(described_data(arguments | plain)))
    assert described["class_weight"] == {"0": 0.5, "1": 2.0}
    assert (described["generator"], described["dataset"], described["shorter"]) == ("generator", "Dataset", "Dataset")
    assert {name: described[name] for name in plain} == plain
    assert described["x"][1][1] is None
    assert described_data(iter(data)) != "Dataset"


# Callbacks


def test_one_worker_writes_files(tmp_path):
    class Checkpoint(keras.callbacks.ModelCheckpoint):
        pass

    writers = [
        *(keras.callbacks.BackupAndRestore(tmp_path / "backup"), keras.callbacks.CSVLogger(tmp_path / "log.csv")),
        *(keras.callbacks.TensorBoard(tmp_path), keras.callbacks.RemoteMonitor(), Checkpoint(tmp_path / "other.keras")),
    ]
    others = [keras.callbacks.EarlyStopping(), keras.callbacks.LambdaCallback(), keras.callbacks.Callback()]
    mixed = [others[0], *writers, *others[1:]]
    chief, second = (WorkerGroup(Told(None, None, index=index)) for index in (0, 1))
    for group, callbacks, expected in (
        *((chief, mixed, mixed), (second, mixed, others), (WorkerGroup(), mixed, mixed)),
        *((second, None, []), (second, writers[0], []), (second, others[0], others[:1])),
    ):
        first, *kept, last = with_workers_callbacks(callbacks, group, FakeFit(None), None, list)
        assert kept == expected
        assert (type(first), type(last)) == (SameStateCallback, WorkersCallback)


def test_a_list_of_keras_is_in_lockstep_too():
    writer, other = keras.callbacks.CSVLogger("log.csv"), keras.callbacks.LambdaCallback()
    fit = FakeFit(None)
    callbacks = keras.callbacks.CallbackList([writer, other], model=fit)
    second = WorkerGroup(Told(None, None, index=1))
    for _ in range(2):  # The list may be used again.
        assert with_workers_callbacks(callbacks, second, fit, None, list) is callbacks
        first, kept, last = callbacks.callbacks
        assert kept is other
        assert (type(first), type(last)) == (SameStateCallback, WorkersCallback)
        assert first.model is last.model is fit


class FakeFit:
    """Holds the attributes of a model in `fit` that the callback uses."""

    def __init__(self, inner_model, stops=False):
        self.inner_model = inner_model
        self.stop_training = stops
        self._initial_epoch = None


def call(method, fits, *arguments):
    def work(collectives):
        inner = fits[collectives.index].inner_model
        callback = WorkersCallback(WorkerGroup(collectives), inner, lambda: [] if inner is None else all_variables(inner))
        callback.set_model(fits[collectives.index])
        getattr(callback, method)(*arguments)

    on_workers(len(fits), work)


@pytest.mark.parametrize("stops", [(False, False, False), (False, False, True)])
def test_all_end_when_one_ends(stops):
    fits = [FakeFit(None, stops=stop) for stop in stops]
    call("on_epoch_end", fits, 0)
    assert [fit.stop_training for fit in fits] == [any(stops)] * 3


class TwoOptimizers(keras.Model):
    """Keeps optimizers of its own, as a GAN does."""

    def __init__(self, rates):
        super().__init__()
        self.dense = layers.Dense(2)
        self.dense.build((None, 3))
        self.built = True
        self.optimizers = {"kernel": keras.optimizers.Adam(rates[0]), "bias": [keras.optimizers.SGD(rates[1], momentum=0.9)]}


def test_the_first_workers_state_of_all_optimizers_is_that_of_all():
    """The chief's callbacks, or a backup that it alone restores, may set rates and slots, also of optimizers of a GAN."""
    fits = [FakeFit(TwoOptimizers(rates)) for rates in ((0.1, 0.2), (0.1, 0.3), (0.4, 0.2))]
    adam = fits[0].inner_model.optimizers["kernel"]
    adam.build([fits[0].inner_model.dense.kernel])
    adam._momentums[0].assign(np.ones((3, 2)))
    fits[0]._initial_epoch, fits[2]._initial_epoch = 5, 3
    call("on_train_begin", fits)
    for fit in fits:
        assert fit._initial_epoch == 5
        kernel, (bias,) = fit.inner_model.optimizers.values()
        assert (float(kernel.learning_rate), float(bias.learning_rate)) == (0.1, 0.2)
        np.testing.assert_array_equal(kernel._momentums[0], np.ones((3, 2)))
    adam.learning_rate = 0.01
    call("on_epoch_end", fits, 0)
    assert [float(fit.inner_model.optimizers["kernel"].learning_rate) for fit in fits] == [0.01] * 3
    assert [fit.stop_training for fit in fits] == [False] * 3


def test_state_that_one_worker_changes_between_batches_is_an_error():
    """It is named on all workers. Callbacks at the end of an epoch may change state: they come later."""
    models = [TwoOptimizers((0.1, 0.2)) for _ in range(2)]
    for one in models:
        one.set_weights(models[0].get_weights())

    def check(collectives):
        refuse_different(WorkerGroup(collectives), all_variables(models[collectives.index]))

    def refuse(collectives):
        with pytest.raises(RuntimeError, match="values of '.*learning_rate', and of 0 other variables, differ"):
            check(collectives)

    on_workers(2, check)
    models[1].optimizers["bias"][0].learning_rate = 0.5
    on_workers(2, refuse)


def test_graphs_in_another_order_are_other_graphs():
    """A step that follows the order of a set lets workers exchange tensors of different operations."""
    one = TwoOptimizers((0.1, 0.2))

    def known(order):
        weights = [one.dense.kernel.value, one.dense.bias.value]
        return described_graph([], [weights[i] for i in order], one)

    assert known([0, 1]) == known([0, 1])
    assert known([0, 1]) != known([1, 0])


def test_batches_are_progress():
    notes = []
    group = WorkerGroup()
    group.note_progress = lambda: notes.append(1)
    callbacks = keras.callbacks.CallbackList([WorkersCallback(group, None, list)], model=FakeFit(None))
    for method in (callbacks.on_train_batch_end, callbacks.on_test_batch_end, callbacks.on_predict_batch_end):
        method(0, {})
    assert len(notes) == 3


# Variables


def test_all_variables_are_there_once():
    shared = layers.Dense(3, name="shared")
    x = keras.Input((3,))
    made = keras.Model(x, layers.Dropout(0.5)(shared(layers.BatchNormalization()(shared(x)))))
    made.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    made.fit(np.ones((2, 3)), np.ones((2, 3)), verbose=0)
    keras.random.normal((1,))
    ids = [id(variable) for variable in all_variables(made)]
    assert len(set(ids)) == len(ids)
    assert {id(v) for v in [*made.variables, *made.optimizer.variables, *made.metrics_variables]} < set(ids)
    # Dense has 2, normalization 4, dropout a seed, and a draw without a seed has made the global one. Adam has 2 for each of 4
    # weights, and 2 of its own. Each of 2 metrics has 2.
    assert len(ids) == 8 + 10 + 4


def variables(seed):
    numbers = np.random.default_rng(seed)
    kinds = itertools.product(["float32", "int32", "float64", "bool", "bfloat16", "uint32"], [(3, 2), (), (0, 4)])
    return [keras.Variable(tf.cast(numbers.normal(size=shape) * 9, dtype), dtype=dtype) for dtype, shape in kinds]


def test_variables_become_those_of_the_first_worker():
    of_workers = [variables(seed) for seed in (1, 2, 1)]
    synchronized(*of_workers)
    for mine in of_workers:
        for variable, expected in zip(mine, variables(1), strict=True):
            np.testing.assert_array_equal(variable, expected)


def synchronized(*of_workers):
    return on_workers(len(of_workers), lambda worker: synchronize(WorkerGroup(worker), of_workers[worker.index]))


def test_variables_that_are_the_same_are_not_sent():
    synchronize(WorkerGroup(), variables(1))
    with mock.patch.object(Collectives, "broadcast", side_effect=AssertionError):
        synchronized(variables(1), variables(1))


def zeros(*shape, dtype="float64"):
    return keras.Variable(np.zeros(shape, dtype), dtype=dtype)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ([zeros(2)], [zeros(2), zeros(3)], "the number of variables of model and optimizer: worker 0 has 1, worker 1 has 2."),
        ([zeros(2, 3)], [zeros(3, 2)], "variable 0: worker 0 has 'float64[2, 3]', worker 1 has 'float64[3, 2]'."),
        ([zeros(2)], [zeros(2, dtype="int8")], "variable 0: worker 0 has 'float64[2]', worker 1 has 'int8[2]'."),
    ],
)
def test_other_variables_are_refused(one, other, difference):
    with pytest.raises(ValueError, match=f"must run the same script.*{re.escape(difference)}"):
        synchronized(one, other)


def test_what_arrives_otherwise_than_it_was_sent_is_noticed():
    garbled = mock.patch.object(Collectives, "broadcast", lambda worker, message: bytes(len(message)))
    with garbled, pytest.raises(RuntimeError, match="still differ after the first worker's were sent"):
        synchronized(variables(1), variables(2))
