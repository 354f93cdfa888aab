"""Join the workers' own shards of the data to global batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dp.batches.slicing import Slice, count_rows, cut, slice_rows
from keras_dp.workers.collectives import OneWorker
from keras_dp.workers.group import WorkerGroup

Tensor = Any


class ShardSlice(NamedTuple):
    """A `Slice` of a worker's own batch, before its place in the global batch is known.

    Attributes:
        data: as in `Slice`.
        begin: index of the first row in the worker's batch, an int32 scalar.
        rows: how many rows belong to the tower, an int32 scalar.
        batch_rows: the rows of the worker's batch, 0 once it has no more, an int32 scalar.
    """

    data: Any
    begin: Tensor
    rows: Tensor
    batch_rows: Tensor


def with_empty_batches(dataset: Any, group: WorkerGroup, steps_per_execution: int = 1) -> tf.data.Dataset:
    """A worker's dataset, followed by batches without rows until all workers' datasets have ended.

    Args:
        dataset: of this worker.
        group: the workers.
        steps_per_execution: how many steps TensorFlow runs at once, of which all are lost if the data end amid them.

    Raises:
        ValueError: if it is no `tf.data.Dataset`, or its end cannot be foreseen and must be.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "sharded=True takes a tf.data.Dataset that each worker has made of its own part of the data. Give arrays, "
            f"generators and the like whole, without it: keras_dp divides them. Received: {type(dataset).__name__}"
        )
    if group.count == 1:
        return dataset
    with group.reporting_lost_workers():
        cardinalities = group.collectives.counts(tf.constant(_cardinality(dataset))).numpy().tolist()
    empty = tf.data.Dataset.from_tensors(tf.nest.map_structure(lambda spec: _rows_of_ones(spec, 0), dataset.element_spec))
    leveled = dataset.concatenate(empty.repeat())
    if min(cardinalities) >= 0:
        return leveled.take(max(cardinalities))
    if tf.data.INFINITE_CARDINALITY in cardinalities:
        return leveled
    if steps_per_execution > 1:
        raise ValueError(
            "With sharded=True and steps_per_execution > 1, the datasets of all workers must say how long they are: apply "
            "tf.data.experimental.assert_cardinality(n). Received: datasets of "
            f"{', '.join(str(n) if n >= 0 else 'unknown' for n in cardinalities)} batches, "
            f"steps_per_execution={steps_per_execution}"
        )
    # It ends when all have, and not never, which is what its length says.
    return leveled.filter(lambda *_: True)


def cut_shards(dataset: tf.data.Dataset, num_slices: int) -> tf.data.Dataset:
    """The batches, cut into N `ShardSlice`s each. Those of a batch without rows borrow one from the batch before."""

    def remember(last: Any, batch: Any) -> tuple[Any, Any]:
        rows = count_rows(batch, at_least=0)
        last = tf.nest.pack_sequence_as(batch, last, expand_composites=True)
        data = tf.cond(rows > 0, lambda: batch, lambda: last)
        first = tf.nest.map_structure(lambda leaf: slice_rows(leaf, tf.constant(0), tf.constant(1)), data)
        return parts(first), (data, rows)

    def parts(data: Any) -> tuple[Tensor, ...]:
        """As dense tensors, which scan can hand on."""
        return tuple(tf.nest.flatten(data, expand_composites=True))

    def cut_one(data: Any, rows: Tensor) -> tuple[ShardSlice, ...]:
        has_rows = tf.minimum(rows, 1)
        return tuple(ShardSlice(part.data, part.begin, part.rows * has_rows, rows) for part in cut(data, num_slices))

    row = tf.nest.map_structure(lambda spec: _rows_of_ones(spec, 1), dataset.element_spec)
    return dataset.scan(parts(row), remember).map(cut_one)


def as_slices(shards: Sequence[ShardSlice], collectives: OneWorker) -> tuple[Slice, ...]:
    """The slices in their places in the global batch: the workers' batches follow each other.

    Raises:
        tf.errors.OutOfRangeError: when it runs, if no worker has rows: as if a dataset had ended.
    """
    counts = collectives.counts(shards[0].batch_rows)
    batch_rows = tf.reduce_sum(counts)
    before = tf.cumsum(counts, exclusive=True)[collectives.index]
    with tf.init_scope():
        ended = iter(tf.data.Dataset.range(0))
    stop = tf.cond(batch_rows > 0, lambda: tf.constant(0, tf.int64), lambda: next(ended))
    # A borrowed row, too, has a place among the rows of the batch.
    last = batch_rows - 1
    slices = tuple(Slice(part.data, tf.minimum(part.begin + before, last), part.rows, batch_rows) for part in shards)
    # A step that fails while workers exchange anything ends that for good: nothing may begin before it is known to go on.
    with tf.control_dependencies([stop]):
        slices = tf.nest.map_structure(tf.identity, slices, expand_composites=True)
        return _with_lengths(slices, shards[0].batch_rows > 0, collectives)


def _with_lengths(slices: Sequence[Slice], has_rows: Tensor, collectives: OneWorker) -> tuple[Slice, ...]:
    """The slices, where those of a worker without rows, which has borrowed one, get one of the other workers' lengths."""

    def refilled(*parts: Any) -> list[Any]:
        if not isinstance(parts[0], tf.Tensor) or parts[0].shape.rank is None or parts[0].shape[1:].is_fully_defined():
            return list(parts)
        own = tf.shape(parts[0])[1:] * tf.cast(has_rows, tf.int32)
        by_worker = collectives.sum(tf.one_hot([collectives.index], collectives.count, axis=0, dtype=tf.int32) * own)
        one = tf.constant("") if parts[0].dtype == tf.string else tf.ones((), parts[0].dtype)
        borrowed = tf.fill(tf.concat([[1], tf.reduce_max(by_worker, axis=0)], axis=0), one)
        borrowed = tf.ensure_shape(borrowed, [None, *parts[0].shape[1:]])
        return [tf.cond(has_rows, lambda part=part: part, lambda: borrowed) for part in parts]

    by_leaf = [refilled(*parts) for parts in zip(*(keras.tree.flatten(part.data) for part in slices), strict=True)]
    datas = zip(*by_leaf, strict=True)
    return tuple(
        part._replace(data=keras.tree.pack_sequence_as(part.data, list(leaves)))
        for part, leaves in zip(slices, datas, strict=True)
    )


def _cardinality(dataset: tf.data.Dataset) -> int:
    # Negative ones say that it is unknown, or infinite.
    return int(min(dataset.cardinality(), 2**31 - 1))


def _rows_of_ones(spec: Any, rows: int) -> Any:
    """A batch of a type, with 0 rows, or with one that models can compute on: what comes of it does not count, but NaN does."""
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [rows, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        values = tf.zeros([0, *(size or 1 for size in inner)], spec.dtype)
        lengths = [tf.zeros([rows if level == 0 else 0], spec.row_splits_dtype) for level in range(spec.ragged_rank)]
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths)
    if not isinstance(spec, tf.TensorSpec):
        raise ValueError(f"sharded=True takes batches of tensors. Received: {spec}")
    shape = [rows, *(size or 1 for size in spec.shape[1:])]
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.ones(shape, spec.dtype)
