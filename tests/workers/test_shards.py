"""Shards that the user has cut get datasets of equal lengths, batches without rows, and places in the global batch."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from worker_threads import on_workers

from keras_dp.batches.shards import cut_shards, placed, with_empty_batches
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice
from keras_dp.workers.collectives import Collectives, OneWorker
from keras_dp.workers.group import WorkerGroup


class Pair(tf.experimental.ExtensionType):
    rows: tf.Tensor
    doubled: tf.RaggedTensor
    dtype: tf.DType = tf.int32


TWO = Shares.alike(2)
LEAVES = {
    "dense": lambda rows: tf.cast(tf.reshape(rows, [-1, 1]), tf.float32) * [1.0, 10.0],
    "scalars": lambda rows: rows,
    "strings": lambda rows: tf.strings.as_string(rows),
    "ragged": lambda rows: tf.RaggedTensor.from_row_lengths(tf.repeat(rows, rows % 3), rows % 3),
    "ragged twice": lambda rows: tf.RaggedTensor.from_row_lengths(
        tf.RaggedTensor.from_row_lengths(tf.repeat(tf.cast(rows, tf.float32), 2 * rows), tf.repeat([2], tf.reduce_sum(rows))),
        rows,
    ),
    "extension type": lambda rows: Pair(rows, tf.RaggedTensor.from_row_lengths(2 * rows, tf.ones_like(rows))),
    "sparse": lambda rows: tf.sparse.from_dense(tf.reshape(rows, [-1, 1]) * [0, 1, 2]),
}


def as_lists(leaf):
    if isinstance(leaf, Pair):
        return list(zip(as_lists(leaf.rows), as_lists(leaf.doubled), strict=True))
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else np.asarray(leaf).tolist()


def batches(*sizes):
    """Returns a dataset of batches with these numbers of rows, which hold 1, 2, 3 and so on."""
    ends = list(itertools.accumulate(sizes))
    rows = [list(range(1 + end - size, 1 + end)) for end, size in zip(ends, sizes, strict=True)]
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=tf.TensorSpec([None], tf.int32))


def numbers(count):
    return tf.data.Dataset.range(count, output_type=tf.int32)


def leveled(*datasets, **options):
    """Returns the datasets of the workers after they are brought to one length."""

    def work(collectives):
        return with_empty_batches(datasets[collectives.index], WorkerGroup(collectives), **options)

    return on_workers(len(datasets), work)


def sizes(dataset, most=8):
    return [len(batch) for batch in dataset.take(most)]


def test_one_worker_alone_has_its_dataset():
    dataset = tf.data.Dataset.range(3).batch(2)
    assert with_empty_batches(dataset, WorkerGroup()) is dataset


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.zeros(3), "sharded=True takes a tf.data.Dataset .* Received: ndarray$"),
        (tf.data.Dataset.range(3).window(2), "sharded=True takes batches of tensors. Received: DatasetSpec"),
    ],
)
def test_what_is_no_dataset_of_batches_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        leveled(data, data)


def test_batches_of_other_structures_are_refused_on_all_workers():
    """Each worker would otherwise trace other exchanges, and wait for the others until the timeout."""
    data = tf.data.Dataset.range(6).batch(3)

    def other(x):
        column = tf.ensure_shape(x[:, tf.newaxis], [None, 1])
        unknown = tf.numpy_function(lambda x: x, [x], tf.int64)
        parts = {"a": tf.cast(column, tf.float32), "b": tf.RaggedTensor.from_tensor(column), "c": unknown}
        return parts, tf.sparse.from_dense(column)

    said = "'0/a': 'float32, rank 2', '0/b': 'ragged int64, ragged rank 1, inner shape (), int64 splits'"
    said += ", '0/c': 'int64, unknown rank', '1': 'sparse int64, row shape (1,)'"
    received = f"Received: worker 0 has {{'0': 'int64, rank 1'}}, worker 1 has {{{said}}}."
    with pytest.raises(ValueError, match=f"must have the same structure.* {re.escape(received)}"):
        leveled(data, data.map(other))


def test_datasets_of_known_lengths_end_together():
    known = leveled(*(tf.data.Dataset.range(rows).batch(2) for rows in (5, 0, 2)))
    assert [int(dataset.cardinality()) for dataset in known] == [3, 3, 3]
    assert [sizes(dataset) for dataset in known] == [[2, 2, 1], [0, 0, 0], [2, 0, 0]]
    none = leveled(tf.data.Dataset.range(0).batch(2), tf.data.Dataset.range(0).batch(2))
    assert [int(dataset.cardinality()) for dataset in none] == [0, 0]


def test_a_dataset_of_unknown_length_goes_on_without_rows():
    """All datasets continue with empty batches, because the length is unknown."""
    for dataset, own in zip(leveled(batches(2, 1), numbers(2).batch(2)), ([2, 1], [2]), strict=True):
        assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
        assert sizes(dataset) == own + [0] * (8 - len(own))


def test_several_steps_at_once_need_known_lengths():
    """If the data ended between steps of one call, the steps before the end would be lost."""
    known = numbers(6).batch(2)
    message = "must say how long they are: .* Received: datasets of 3, unknown batches, steps_per_execution=4"
    with pytest.raises(ValueError, match=message):
        leveled(known, batches(2, 1), steps_per_execution=4)
    assert [int(dataset.cardinality()) for dataset in leveled(known, known.take(1), steps_per_execution=4)] == [3, 3]
    assert sizes(leveled(known, known.repeat(), steps_per_execution=4)[0], 4) == [2, 2, 2, 0]


def test_with_an_endless_dataset_all_are_endless():
    for other in (numbers(2).batch(2), batches(2)):
        endless, ended = leveled(numbers(3).batch(3).repeat(), other)
        assert [dataset.cardinality() == tf.data.INFINITE_CARDINALITY for dataset in (endless, ended)] == [True, True]
        assert sizes(endless) == [3] * 8
        assert sizes(ended) == [2] + [0] * 7


def test_batches_without_rows_are_of_the_datasets_type():
    dataset = batches(2, 1).map(lambda rows: ({name: leaf(rows) for name, leaf in LEAVES.items()}, rows))
    long, short = leveled(dataset.apply(tf.data.experimental.assert_cardinality(2)), dataset.take(1))
    for one, other in ((long, dataset), (short, dataset)):
        assert tf.nest.map_structure(type, one.element_spec) == tf.nest.map_structure(type, other.element_spec)
        for (x, y), (expected, _) in zip(one, other, strict=False):
            for name in LEAVES if len(y) else ():
                assert as_lists(x[name]) == as_lists(expected[name])
    x, y = list(short.take(2))[1]
    assert {name: as_lists(leaf) for name, leaf in x.items()} == {name: [] for name in LEAVES}
    assert y.dtype == tf.int32


# Slices


def test_batches_are_cut_into_slices():
    steps = list(cut_shards(batches(6, 5, 1), TWO))
    assert [int(parts[0].shard_rows) for parts in steps] == [6, 5, 1]
    assert [[(as_lists(part.data), int(part.begin), int(part.rows)) for part in parts] for parts in steps] == [
        [([1, 2, 3], 0, 3), ([4, 5, 6], 3, 3)],
        [([7, 8], 0, 2), ([9, 10, 11], 2, 3)],
        # The first slice has no rows, and borrows one.
        [([12], 0, 0), ([12], 0, 1)],
    ]
    # The number of batches stays known, or unknown.
    assert cut_shards(tf.data.Dataset.range(5).batch(2), TWO).cardinality() == 3
    assert cut_shards(batches(2), TWO).cardinality() == tf.data.UNKNOWN_CARDINALITY


def test_single_rows_are_refused():
    with pytest.raises(ValueError, match=r"at least one tensor.*single rows.*dataset.batch\(32\)"):
        cut_shards(tf.data.Dataset.range(3), TWO)


# Places in the global batch


def placed_slices(*datasets):
    """Returns the slices of each worker's first batch, for two towers, with their places in the global batch."""
    steps = [next(iter(cut_shards(dataset, TWO))) for dataset in datasets]

    def work(collectives):
        slices = placed(steps[collectives.index], collectives)
        assert all(isinstance(part, Slice) for part in slices)
        return slices

    return on_workers(len(datasets), work)


def places(slices):
    return [(as_lists(part.data), int(part.begin), int(part.rows), int(part.batch_rows)) for part in slices]


def test_the_workers_batches_follow_each_other():
    """A worker without rows borrows one, which also has a place among the rows."""
    assert [places(slices) for slices in placed_slices(batches(3), batches(0), batches(2), batches(0))] == [
        [([1], 0, 1, 5), ([2, 3], 1, 2, 5)],
        [([1], 3, 0, 5), ([1], 3, 0, 5)],
        [([1], 3, 1, 5), ([2], 4, 1, 5)],
        [([1], 4, 0, 5), ([1], 4, 0, 5)],
    ]


@pytest.mark.parametrize("name", LEAVES)
def test_rows_of_all_kinds_are_borrowed(name):
    """A worker without rows gets the first row of the first worker that has some, of any dtype and length."""
    dataset = batches(0, 2, 3).map(LEAVES[name])
    borrowing, lending, _ = (places(slices) for slices in placed_slices(*(dataset.skip(i).take(1) for i in range(3))))
    values = [as_lists(LEAVES[name](tf.constant([row]))) for row in (1, 2)]
    assert borrowing == [(values[0], 0, 0, 5)] * 2
    assert lending == [(values[0], 0, 1, 5), (values[1], 1, 1, 5)]


def test_workers_that_all_have_rows_exchange_none():
    with mock.patch.object(Collectives, "of_worker", side_effect=AssertionError):
        placed_slices(batches(2), batches(1))
        with pytest.raises(AssertionError):
            placed_slices(batches(2), batches(0))


def test_a_worker_without_rows_has_the_lengths_of_the_others():
    def data(rows):
        shape = [rows, 2 + rows, 4]
        return {"numbers": tf.fill(shape, 2.0), "texts": tf.fill(shape, "a"), "scalar": tf.cast(rows, tf.float32)}

    for part in placed_slices(*(tf.data.Dataset.from_tensor_slices([rows]).map(data) for rows in (0, 2)))[0]:
        np.testing.assert_array_equal(part.data["numbers"], np.full([1, 4, 4], 2.0))
        np.testing.assert_array_equal(part.data["texts"], np.full([1, 4, 4], b"a"))
        assert (float(part.data["scalar"]), int(part.rows)) == (2.0, 0)


def test_when_no_worker_has_rows_the_dataset_has_ended_and_nothing_runs():
    (shards,) = cut_shards(batches(0), TWO)
    collectives = OneWorker()
    collectives.count, collectives.counts = 2, lambda own: tf.zeros([2], tf.int32)
    ran = tf.Variable(0)

    @tf.function
    def step():
        slices = placed(shards, collectives)
        ran.assign_add(1 + slices[0].rows)

    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert int(ran) == 0
