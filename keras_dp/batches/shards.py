"""Join the workers' own shards of the data to global batches."""

import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.nesting import flatten, map_leaves, pack
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, count_rows, cut, row_spec, slice_rows, without_entries
from keras_dp.batches.whole_tensors import leaves_of
from keras_dp.workers.collectives import OneWorker, counted_on
from keras_dp.workers.group import WorkerGroup

Tensor = Any


def with_empty_batches(dataset: Any, group: WorkerGroup, steps_per_execution: int = 1) -> tf.data.Dataset:
    """Appends batches without rows to a worker's dataset until all workers' datasets have ended.

    Sizes that are not the same on all workers, as of texts that each of them pads, are then unknown while the step is traced,
    so that all workers trace the same one.

    Args:
        dataset: the dataset of this worker.
        group: the workers.
        steps_per_execution: the number of steps that TensorFlow runs at once. If the data end during these, all are lost.

    Raises:
        ValueError: if it is no `tf.data.Dataset`, the workers' batches have other structures, or `steps_per_execution` > 1 and
            a worker's dataset has unknown length.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "sharded=True takes a tf.data.Dataset that each worker makes of its own part of the data. For arrays, generators "
            f"and the like, leave sharded out: keras_dp divides them. Received: {type(dataset).__name__}"
        )
    if group.count == 1:
        return dataset
    leaves = dict(leaves_of(dataset.element_spec))
    own = [_cardinality(dataset), {path: _kind(leaf) for path, leaf in leaves.items()}, list(map(_sizes, leaves.values()))]
    with group.reporting_lost_workers():
        received = [json.loads(message) for message in group.collectives.exchange(json.dumps(own).encode())]
    cardinalities, of_workers, sizes = zip(*received, strict=True)
    other = next((i for i, kinds in enumerate(of_workers) if kinds != of_workers[0]), None)
    if other is not None:
        raise ValueError(
            "With sharded=True, the batches of all workers must have the same structure, with the same types of tensors. "
            f"Received: worker 0 has {of_workers[0]}, worker {other} has {of_workers[other]}."
        )
    no_rows = map(_no_rows, leaves.values(), zip(*sizes, strict=True))
    empty = tf.data.Dataset.from_tensors(pack(dataset.element_spec, no_rows))
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


def cut_shards(dataset: tf.data.Dataset, shares: Shares) -> tf.data.Dataset:
    """Cuts each batch of a worker's shard into a slice for each of its towers. Without rows, these have none until `placed`."""
    is_tuple = type(dataset.element_spec) is tuple

    def cut_one(*batch: Any) -> tuple[Slice, ...]:
        data = batch if is_tuple else batch[0]
        rows = count_rows(data, at_least=0)
        return tuple(part._replace(shard_rows=rows) for part in cut(data, shares, at_least=0))

    return dataset.map(tf.autograph.experimental.do_not_convert(cut_one))


def placed(slices: Sequence[Slice], collectives: OneWorker) -> tuple[Slice, ...]:
    """Places slices of a worker's shard in the global batch, in which the workers' batches follow each other.

    Raises:
        tf.errors.OutOfRangeError: at run time, if no worker has rows, as at the end of a dataset.
    """
    counts = collectives.counts(slices[0].shard_rows)
    batch_rows = tf.reduce_sum(counts)
    before = tf.cumsum(counts, exclusive=True)[collectives.index]
    with tf.init_scope():
        ended = iter(tf.data.Dataset.range(0))
    stop = tf.cond(batch_rows > 0, lambda: tf.constant(0, tf.int64), lambda: next(ended))
    # A borrowed row needs a position in the batch as well.
    last, whole_rows = batch_rows - 1, without_entries(batch_rows)
    slices = tuple(
        part._replace(begin=tf.minimum(part.begin + before, last), batch=whole_rows, shard_rows=counts) for part in slices
    )
    # A step that fails during an exchange makes all later ones fail. So none may start before a worker is known to have rows.
    with tf.control_dependencies([stop]):
        slices = tf.nest.map_structure(tf.identity, slices, expand_composites=True)
        return _with_borrowed_rows(slices, counts, collectives)


def _with_borrowed_rows(slices: Sequence[Slice], counts: Tensor, collectives: OneWorker) -> tuple[Slice, ...]:
    """Gives each slice of a worker without rows a row of the first worker that has some: every model can compute on it.

    Args:
        slices: the slices of this worker.
        counts: the numbers of rows of all workers.
        collectives: the collectives of the workers.
    """
    have_rows = counts > 0
    lender, has_rows = tf.argmax(have_rows), have_rows[collectives.index]
    graph = tf.compat.v1.get_default_graph()
    own = [_tensors(part.data) for part in slices]

    def borrowed() -> list[list[Tensor]]:
        row = map_leaves(_first_row, slices[0].data)
        with counted_on(graph):
            received = collectives.of_worker(lender, _tensors(row))
        return [[tf.cond(has_rows, lambda x=x: x, lambda y=y: y) for x, y in zip(part, received, strict=True)] for part in own]

    # All workers know the same counts, so that all of them exchange a row, or none.
    parts = tf.cond(tf.reduce_all(have_rows), lambda: own, borrowed)
    return tuple(part._replace(data=_packed(part.data, tensors)) for part, tensors in zip(slices, parts, strict=True))


def _first_row(leaf: Any) -> Any:
    return leaf if not tf.is_tensor(leaf) or leaf.shape.rank == 0 else slice_rows(leaf, tf.constant(0), tf.constant(1))


def _tensors(data: Any) -> list[Tensor]:
    """Lists the dense tensors of nested data, with those of which ragged and sparse tensors consist."""
    return [tensor for leaf in flatten(data) if tf.is_tensor(leaf) for tensor in tf.nest.flatten(leaf, expand_composites=True)]


def _packed(data: Any, tensors: Sequence[Tensor]) -> Any:
    following = iter(tensors)

    def filled(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        own = [next(following) for _ in tf.nest.flatten(leaf, expand_composites=True)]
        return tf.nest.pack_sequence_as(row_spec(leaf), own, expand_composites=True)

    return map_leaves(filled, data)


def _cardinality(dataset: tf.data.Dataset) -> int:
    # A negative cardinality means unknown or infinite.
    return int(min(dataset.cardinality(), 2**31 - 1))


def _kind(spec: Any) -> str:
    """Describes a tensor's type in words, without sizes that may differ between workers."""
    if isinstance(spec, tf.SparseTensorSpec):
        return f"sparse {spec.dtype.name}, row shape {tuple(spec.shape[1:])}"
    if isinstance(spec, tf.RaggedTensorSpec):
        inner, splits = tuple(spec.shape[spec.ragged_rank + 1 :]), spec.row_splits_dtype.name
        return f"ragged {spec.dtype.name}, ragged rank {spec.ragged_rank}, inner shape {inner}, {splits} splits"
    if isinstance(spec, tf.TensorSpec):
        return f"{spec.dtype.name}, {'unknown rank' if spec.shape.rank is None else f'rank {spec.shape.rank}'}"
    return type(spec).__name__


def _sizes(spec: Any) -> list[int | None]:
    """Returns the sizes of a dense tensor's axes; none for another tensor."""
    return spec.shape.as_list() if isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None else []


def _no_rows(spec: Any, of_workers: Sequence[list[int | None]]) -> Any:
    """Returns a tensor of a type with 0 rows.

    Args:
        spec: the type.
        of_workers: the `_sizes` of the W workers. Along an axis on which they differ, the tensor has another size than this
            worker's batches. A dataset that holds both does not know the size.
    """
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 1 for size in spec.shape[1:])]
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *(size or 1 for size in spec.shape[spec.ragged_rank + 1 :])], spec.dtype)
        lengths = [tf.zeros([0], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths)
    if not isinstance(spec, tf.TensorSpec):
        raise ValueError(f"sharded=True takes batches of tensors. Received: {spec}")
    of_axes = zip(_sizes(spec), *of_workers, strict=True)
    shape = [(own or 0) + 1 if len(set(of_all)) > 1 else own or 1 for own, *of_all in of_axes]
    return tf.zeros([0, *shape[1:]] if shape else [], spec.dtype)
