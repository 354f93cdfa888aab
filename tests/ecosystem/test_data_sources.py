"""Data that other tools read trains a wrapped model as a plain one: in the same batches, and in the same order.

pandas, SciPy and Keras's own kinds of data are in `tests/parity/test_compatibility_data.py`, for example in `test_pandas`.
"""

import contextlib

import datasets
import grain
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from comparison import assert_same_script
from keras import layers
from tensorflow.data.experimental import service

# Batches of 7, 7, 7 and 2 rows: three towers get 2, 2 and 3 rows of each, and 0, 1 and 1 rows of the last.
ROWS, BATCH, TOWERS = 23, 7, 3
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2))


@pytest.fixture(autouse=True)
def double_precision(single_precision):
    """Sets float64, in which a wrong row cannot hide behind rounding."""
    keras.config.set_floatx("float64")


def model_of_two_layers():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dropout(0.2, seed=1), layers.Dense(2)])


def assert_trains_as_plain(source, epochs=2, build=model_of_two_layers):
    """Compares `fit` with validation, `evaluate` and `predict`, all with data that `source` returns anew."""

    def script(model):
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(source(), shuffle=False, epochs=epochs, validation_data=source(), verbose=2).history
        assert len(history["val_mae"]) == epochs
        # Rows that come in any order are predicted in any order.
        predictions = np.sort(model.predict(source(), verbose=0), axis=0)
        assert predictions.shape == (ROWS, 2)
        return history, model.evaluate(source(), verbose=0, return_dict=True), predictions

    assert_same_script(build, script, TOWERS)


@contextlib.contextmanager
def data_service(count):
    """Starts a dispatcher and `count` workers in this process, and yields the dispatcher's address."""
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(count)]
    yield dispatcher.target
    for server in (*workers, dispatcher):
        server._stop()


def test_tf_data_service():
    """One worker of the service shuffles and makes the batches."""
    with data_service(1) as address:

        def source():
            rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=2).batch(BATCH)
            return rows.apply(service.distribute("distributed_epoch", address)).prefetch(2)

        assert_trains_as_plain(source)


def test_tf_data_service_with_two_workers():
    """Two workers give their rows in any order, so here all rows make one batch, whose gradient is the same in any order."""
    with data_service(2) as address:
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).map(lambda x, y: (2 * x, y))
        identifier = service.register_dataset(address, rows)

        def source():
            mode = service.ShardingPolicy.DYNAMIC
            return service.from_dataset_id(mode, address, identifier, element_spec=rows.element_spec).batch(ROWS)

        assert_trains_as_plain(source, build=lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)]))


def test_tf_record_files(tmp_path):
    """Compressed files are read in turns, in parallel; rows are shuffled, and parsed by the batch."""
    for number in range(3):
        with tf.io.TFRecordWriter(str(tmp_path / f"{number}.tfrecord"), "GZIP") as writer:
            for row in zip(X[number::3], Y[number::3], strict=True):
                values = zip("xy", (tf.train.Feature(float_list=tf.train.FloatList(value=part)) for part in row), strict=True)
                writer.write(tf.train.Example(features=tf.train.Features(feature=dict(values))).SerializeToString())
    features = {"x": tf.io.FixedLenFeature([4], tf.float32), "y": tf.io.FixedLenFeature([2], tf.float32)}

    def parse(records):
        parsed = tf.io.parse_example(records, features)
        return parsed["x"], parsed["y"]

    def source():
        files = tf.data.Dataset.list_files(str(tmp_path / "*.tfrecord"), seed=3)
        records = files.interleave(
            lambda file: tf.data.TFRecordDataset(file, "GZIP"), cycle_length=2, num_parallel_calls=2, deterministic=True
        )
        return records.shuffle(10, seed=4).batch(BATCH).map(parse, num_parallel_calls=2).prefetch(tf.data.AUTOTUNE)

    assert_trains_as_plain(source)


class PyDataset(keras.utils.PyDataset):
    """Cuts batches from a Hugging Face dataset."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __len__(self):
        return -(-len(self.rows) // BATCH)

    def __getitem__(self, i):
        batch = self.rows[i * BATCH : (i + 1) * BATCH]
        return batch["x"], batch["y"]


def batches(rows):
    for batch in rows.iter(BATCH):
        yield batch["x"], batch["y"]


def streamed_batches(rows):
    """Generates batches of a stream of two shards, which are shuffled, and whose rows are shuffled in a buffer."""
    return batches(rows.to_iterable_dataset(2).shuffle(seed=5, buffer_size=10).with_format("numpy"))


WAYS_OF_HUGGING_FACE = {
    "to_tf_dataset": lambda rows: rows.to_tf_dataset(BATCH, columns="x", label_cols="y"),
    "PyDataset": lambda rows: PyDataset(rows.with_format("numpy", dtype="float64")),
    "generator of tensors": lambda rows: batches(rows.with_format("tf", dtype=tf.float64)),
    "generator of a stream": streamed_batches,
}


@pytest.mark.parametrize("way", WAYS_OF_HUGGING_FACE)
def test_hugging_face_datasets(way):
    rows = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).shuffle(seed=6)
    epochs = 1 if way.startswith("generator") else 2  # A generator can be read once.
    assert_trains_as_plain(lambda: WAYS_OF_HUGGING_FACE[way](rows), epochs)


ROWS_IN_PAIRS = list(zip(X, Y, strict=True))


def map_dataset():
    return grain.MapDataset.source(ROWS_IN_PAIRS).seed(7).shuffle().map(lambda row: (2 * row[0], row[1])).batch(BATCH)


def data_loader():
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=8, num_epochs=1)
    return grain.DataLoader(data_source=ROWS_IN_PAIRS, sampler=sampler, operations=[grain.transforms.Batch(BATCH)])


WAYS_OF_GRAIN = {
    "MapDataset": map_dataset,
    "IterDataset": lambda: map_dataset().to_iter_dataset(),
    "DataLoader": data_loader,
}


@pytest.mark.parametrize("way", WAYS_OF_GRAIN)
def test_grain(way):
    assert_trains_as_plain(WAYS_OF_GRAIN[way])


def test_torch_data_loader():
    def source():
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        order = torch.Generator().manual_seed(9)
        return torch.utils.data.DataLoader(rows, BATCH, shuffle=True, generator=order)

    assert_trains_as_plain(source)
