"""Join the workers' own shards of the data to global batches."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.nesting import flatten, map_leaves, pack
from keras_dp.batches.slicing import Shard, Slice, count_rows, cut, slice_rows, without_entries
from keras_dp.workers.collectives import OneWorker
from keras_dp.workers.group import WorkerGroup

Tensor = Any


def with_empty_batches(dataset: Any, group: WorkerGroup, steps_per_execution: int = 1) -> tf.data.Dataset:
    """Appends batches without rows to a worker's dataset until all workers' datasets have ended.

    Args:
        dataset: the dataset of this worker.
        group: the workers.
        steps_per_execution: the number of steps that TensorFlow runs at once. If the data end during these, all are lost.

    Raises:
        ValueError: if it is no `tf.data.Dataset`, or `steps_per_execution` > 1 and a worker's dataset has unknown length.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "sharded=True takes a tf.data.Dataset that each worker makes of its own part of the data. For arrays, generators "
            f"and the like, leave sharded out: keras_dp divides them. Received: {type(dataset).__name__}"
        )
    if group.count == 1:
        return dataset
    with group.reporting_lost_workers():
        cardinalities = group.collectives.counts(tf.constant(_cardinality(dataset))).numpy().tolist()
    empty = tf.data.Dataset.from_tensors(map_leaves(lambda spec: _rows_of_ones(spec, 0), dataset.element_spec))
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
    # The filter makes the length unknown instead of infinite: `placed` ends the data when all workers' datasets have ended.
    return leveled.filter(lambda *_: True)


def cut_shards(dataset: tf.data.Dataset, num_slices: int) -> tf.data.Dataset:
    """Cuts each batch of a worker into N slices of a `Shard`. A batch without rows borrows a row from an earlier batch."""

    def remember(last: Any, batch: Any) -> tuple[Any, Any]:
        rows = count_rows(batch, at_least=0)
        last = tf.nest.pack_sequence_as(batch, last, expand_composites=True)
        data = tf.cond(rows > 0, lambda: batch, lambda: last)
        first = map_leaves(lambda leaf: slice_rows(leaf, tf.constant(0), tf.constant(1)), data)
        return parts(first), (parts(data), rows)

    def parts(data: Any) -> tuple[Tensor, ...]:
        """Flattens data to dense tensors: `scan` passes on no others."""
        return tuple(tf.nest.flatten(data, expand_composites=True))

    def cut_one(flat: Any, rows: Tensor) -> tuple[Slice, ...]:
        data = tf.nest.pack_sequence_as(dataset.element_spec, flat, expand_composites=True)
        has_rows = tf.minimum(rows, 1)
        return tuple(part._replace(rows=part.rows * has_rows, source=Shard(rows)) for part in cut(data, num_slices))

    row = map_leaves(lambda spec: _rows_of_ones(spec, 1), dataset.element_spec)
    return dataset.scan(parts(row), remember).map(cut_one)


def placed(shard: Shard, slices: Sequence[Slice], collectives: OneWorker) -> tuple[Slice, ...]:
    """Places slices of a worker's own batch in the global batch, in which the workers' batches follow each other.

    Raises:
        tf.errors.OutOfRangeError: at run time, if no worker has rows, as at the end of a dataset.
    """
    counts = collectives.counts(shard.rows)
    batch_rows = tf.reduce_sum(counts)
    before = tf.cumsum(counts, exclusive=True)[collectives.index]
    with tf.init_scope():
        ended = iter(tf.data.Dataset.range(0))
    stop = tf.cond(batch_rows > 0, lambda: tf.constant(0, tf.int64), lambda: next(ended))
    # A borrowed row needs a position in the batch as well.
    last, whole_rows = batch_rows - 1, without_entries(batch_rows)
    slices = tuple(part._replace(begin=tf.minimum(part.begin + before, last), batch=whole_rows, source=()) for part in slices)
    # A step that fails during an exchange makes all later ones fail. So none may start before a worker is known to have rows.
    with tf.control_dependencies([stop]):
        slices = tf.nest.map_structure(tf.identity, slices, expand_composites=True)
        return _with_lengths(slices, shard.rows > 0, collectives)


def _with_lengths(slices: Sequence[Slice], has_rows: Tensor, collectives: OneWorker) -> tuple[Slice, ...]:
    """Replaces the borrowed row of a worker without rows by a row with the largest lengths that the other workers use."""

    def refilled(*parts: Any) -> list[Any]:
        if not isinstance(parts[0], tf.Tensor) or parts[0].shape.rank is None or parts[0].shape[1:].is_fully_defined():
            return list(parts)
        own = tf.shape(parts[0])[1:] * tf.cast(has_rows, tf.int32)
        by_worker = collectives.sum(tf.one_hot([collectives.index], collectives.count, axis=0, dtype=tf.int32) * own)
        one = tf.constant("") if parts[0].dtype == tf.string else tf.ones((), parts[0].dtype)
        borrowed = tf.fill(tf.concat([[1], tf.reduce_max(by_worker, axis=0)], axis=0), one)
        borrowed = tf.ensure_shape(borrowed, [None, *parts[0].shape[1:]])
        return [tf.cond(has_rows, lambda part=part: part, lambda: borrowed) for part in parts]

    by_leaf = [refilled(*parts) for parts in zip(*(flatten(part.data) for part in slices), strict=True)]
    datas = zip(*by_leaf, strict=True)
    return tuple(part._replace(data=pack(part.data, leaves)) for part, leaves in zip(slices, datas, strict=True))


def _cardinality(dataset: tf.data.Dataset) -> int:
    # A negative cardinality means unknown or infinite.
    return int(min(dataset.cardinality(), 2**31 - 1))


def _rows_of_ones(spec: Any, rows: int) -> Any:
    """Returns a batch of a type with 0 rows, or with 1 row that models can compute on.

    Results of that row are ignored, unless they are NaN.
    """
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
