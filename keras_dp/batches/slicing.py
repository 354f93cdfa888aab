"""Cut nested batches into slices, and put slices together again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dp.batches.nesting import flatten, map_leaves, pack
from keras_dp.batches.other_rows import refuse_other_rows, refuse_other_rows_at_run_time
from keras_dp.batches.shares import Shares
from keras_dp.batches.whole_tensors import WholeTensors, leaves_of
from keras_dp.partition.tensorflow_internals import HOST

Tensor = Any

BATCH_SIZE = 32  # the default of `keras.Model.fit`


class Slice(NamedTuple):
    """One tower's rows of a global batch.

    Slices of a worker's own shard count rows within this worker's part of the batch, until `shards.placed`.

    Attributes:
        data: the batch's structure with b rows in every tensor. An empty slice holds one borrowed row instead, because
            zero rows abort some kernels.
        begin: the index of the first row in the global batch, an int32 scalar.
        rows: the number of rows that belong to the tower, 0 if the slice is empty, an int32 scalar.
        batch: B rows without entries, of shape (B, 0). Its type says how many rows the global batch has, where it is known that
            all batches have as many.
        whole_paths: the paths of the tensors that were not cut although they have an axis, as the keys of a dictionary without
            values. A dataset and a function keep them so, as a part of a batch's structure.
        unknown_paths: the paths of the tensors that have any number of rows although that of `batch` is known, as in
            `whole_paths`.
        digest: a checksum of the global batch, an int32 scalar, if each of several workers reads it whole; else empty.
        shard_rows: the number of rows of the worker's own part of the global batch, an int32 scalar, 0 after the worker's data
            have ended; of the parts of all W workers, once these are joined; empty for a batch that all workers have.
    """

    data: Any
    begin: Tensor
    rows: Tensor
    batch: Tensor
    whole_paths: dict[str, tuple[()]] | tuple[()] = ()
    unknown_paths: dict[str, tuple[()]] | tuple[()] = ()
    digest: Tensor | tuple[()] = ()
    shard_rows: Tensor | tuple[()] = ()

    @property
    def whole(self) -> WholeTensors:
        """The tensors that were not cut."""
        return WholeTensors(paths=tuple(self.whole_paths))

    @property
    def is_of_shard(self) -> bool:
        """Whether it is of a worker's own part of the global batch."""
        return bool(tf.is_tensor(self.shard_rows))

    @property
    def batch_rows(self) -> Tensor:
        """B, the number of rows of the global batch, as an int32 scalar."""
        with tf.device(HOST):
            return tf.shape(self.batch)[0]


def is_cut(batch: Any) -> bool:
    """Returns whether a batch is a tuple of slices."""
    return isinstance(batch, tuple) and bool(batch) and isinstance(batch[0], Slice)


def without_entries(batch_rows: Tensor | int) -> Tensor:
    """Returns rows without entries, of shape (B, 0), for the `batch` of a `Slice`."""
    return tf.zeros([batch_rows, 0], tf.int32)


_ALL_CUT = WholeTensors()


def cut(
    batch: Any, shares: Shares, worker: int = 0, workers: int = 1, whole: WholeTensors = _ALL_CUT, at_least: int = 1
) -> tuple[Slice, ...]:
    """Cuts the N slices of a worker's towers from a batch of B rows.

    Args:
        batch: nested tensors (dense, ragged or sparse, also in extension types) with B rows each; None and
            `tf.experimental.Optional` pass through.
        shares: the shares of the towers.
        worker: the index of the worker.
        workers: the number of workers that divide the batch.
        whole: the tensors that are not cut: every slice holds them whole. If they are all tensors, as numbers without rows are,
            the batch counts as one row, which the last slice of all workers has.
        at_least: the smallest number of rows that a batch may have; the slices of a batch without rows have none.

    Raises:
        ValueError: if there is no tensor with rows, or the numbers of rows are known to differ.
        tf.errors.InvalidArgumentError: if the numbers of rows differ when the batch is cut, or are too small.
    """
    batch = map_leaves(as_tensor, batch)
    whole_paths: dict[str, tuple[()]] = {path: () for path, leaf in whole.whole_leaves(batch).items() if tf.is_tensor(leaf)}
    is_all_whole = at_least > 0 and any(map(tf.is_tensor, flatten(batch))) and not whole.cut_leaves(batch)
    counted = tf.constant(1) if is_all_whole else count_rows(batch, at_least, whole)
    # With a number, TensorFlow knows how many rows each slice has.
    known = 1 if is_all_whole else known_rows(batch, whole)
    batch_rows = counted if known is None else known
    with tf.control_dependencies([counted]):
        whole_rows = without_entries(batch_rows)
    is_whole = whole.of(batch)
    leaves = [leaf if stays else _in_own_memory(leaf) for leaf, stays in zip(flatten(batch), is_whole, strict=True)]
    slices = []
    for begin, end in shares.ranges(batch_rows, worker, workers):
        last = tf.maximum(end, begin + 1) if known is None else max(end, begin + 1)
        # The name tells these operations, which the host runs, from the step's own.
        with tf.name_scope("slices"):
            own = [leaf if stays else slice_rows(leaf, begin, last) for leaf, stays in zip(leaves, is_whole, strict=True)]
        numbers = tf.convert_to_tensor(begin), tf.convert_to_tensor(end - begin)
        slices.append(Slice(pack(batch, own), *numbers, whole_rows, whole_paths=whole_paths))
    return tuple(slices)


def typed_by_batch(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Returns slices of which only `batch` says how many rows they have.

    TensorFlow traces a step by the types of its slices, and where sizes differ, leaves open those that differ. The sizes of
    slices are others than those of the batch, by which one device traces: batches of 8, 9 and 5 rows give a tower 4, 4 and 2.
    """
    is_known = slices[0].batch.shape[0] is not None
    leaves = slices[0].whole.cut_leaves(slices[0].data) if is_known else {}
    unknown: dict[str, tuple[()]] = {path: () for path, leaf in leaves.items() if leaf.shape.rank and leaf.shape[0] is None}

    def with_any_rows(leaf: Any, stays: bool) -> Any:
        is_known = isinstance(leaf, tf.Tensor) and not stays and leaf.shape.rank and leaf.shape[0] is not None
        return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]]) if is_known else leaf

    return tuple(
        part._replace(
            data=pack(part.data, map(with_any_rows, flatten(part.data), part.whole.of(part.data))), unknown_paths=unknown
        )
        for part in slices
    )


def with_known_rows(slices: Sequence[Slice], shares: Shares, worker: int, workers: int) -> tuple[Slice, ...]:
    """Returns slices of `typed_by_batch` whose own types say again how many rows they have.

    Args:
        slices: the slices of a worker. Those of the worker's own part of the batch remain as they are.
        shares: the shares of its towers.
        worker: the index of the worker.
        workers: the number of workers.
    """
    batch_rows = slices[0].batch.shape[0]
    if batch_rows is None or slices[0].is_of_shard:
        return tuple(slices)

    def of(part: Slice, begin: int, end: int) -> Slice:
        rows = max(1, end - begin)
        known = set(part.whole.cut_leaves(part.data)) - set(part.unknown_paths)
        leaves = [
            tf.ensure_shape(leaf, [rows, *leaf.shape[1:]]) if path in known and isinstance(leaf, tf.Tensor) else leaf
            for path, leaf in leaves_of(part.data)
        ]
        return part._replace(data=pack(part.data, leaves))

    ranges = shares.ranges(batch_rows, worker, workers)
    return tuple(of(part, *own) for part, own in zip(slices, ranges, strict=True))


def _in_own_memory(leaf: Any) -> Any:
    """Copies a tensor that may lie in the memory of an array of the user's, as those of generators do.

    TensorFlow writes results over tensors that nothing else needs. It knows that it must not write into an array of NumPy's,
    but takes the memory of a slice for its own: the user's data would change.
    """

    def copied(tensor: Tensor) -> Tensor:
        rows = tensor.shape[0] if tensor.shape.rank else None
        copy = tf.gather(tensor, tf.range(tf.shape(tensor)[0] if rows is None else rows))
        return tf.ensure_shape(copy, tensor.shape)

    return tf.nest.map_structure(copied, leaf, expand_composites=True) if tf.is_tensor(leaf) else leaf


def rows_of_checked(batch: Any, whole: WholeTensors) -> Tensor:
    """Returns B for a batch that was checked when it was cut, as an int32 scalar."""
    cut_leaves = [leaf for leaf in whole.cut_leaves(batch).values() if tf.is_tensor(leaf)]
    if not cut_leaves:
        raise ValueError(
            "The rows of a batch are those of the tensors that are cut, and all tensors of this batch stay whole. Leave out "
            f'accumulate="rows", which counts rows. Received: batch={batch}'
        )
    return _rows(cut_leaves[0])


def holds_no_rows(batch: Any) -> bool:
    """Returns whether all tensors of a batch, or their types, are numbers without an axis."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in flatten(batch) if hasattr(leaf, "shape")]
    return bool(shapes) and all(shape.rank == 0 for shape in shapes)


def count_rows(batch: Any, at_least: int = 1, whole: WholeTensors = _ALL_CUT) -> Tensor:
    """Returns B, the number of rows of all tensors that are cut, as an int32 scalar. Checks that they have the same number."""
    rows = {path: _rows(leaf) for path, leaf in whole.cut_leaves(batch).items() if tf.is_tensor(leaf)}
    if not rows:
        raise ValueError(
            "A batch needs at least one tensor to cut into slices, by its first axis. If these are single rows, make batches "
            f"of them: dataset.batch(32). Received: batch={batch}"
        )
    refuse_other_rows(batch, whole)
    first = next(iter(rows.values()))
    checks = [refuse_other_rows_at_run_time(rows)]
    if at_least:
        checks.append(tf.debugging.assert_positive(first, message="A batch must have at least one row."))
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first)


def slice_rows(leaf: Any, begin: Tensor | int, end: Tensor | int) -> Any:
    """Returns rows `begin` to `end` of a tensor, and any other object unchanged."""
    if not tf.is_tensor(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        return _slice_sparse(leaf, begin, end)
    return leaf[begin:end]


def _slice_sparse(leaf: tf.SparseTensor, begin: Tensor | int, end: Tensor | int) -> tf.SparseTensor:
    sizes = tf.concat([[tf.cast(end - begin, tf.int64)], leaf.dense_shape[1:]], axis=0)
    starts = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(leaf.dense_shape[1:])], axis=0)
    own = tf.sparse.slice(leaf, starts, sizes)
    if leaf.shape.rank is None:
        return own
    # TensorFlow knows a sparse tensor's shape from the numbers of which it is made.
    rows = end - begin if isinstance(end, int) and leaf.shape[0] is not None else None
    known = [own.dense_shape[axis] if size is None else size for axis, size in enumerate([rows, *leaf.shape[1:]])]
    return tf.SparseTensor(own.indices, own.values, tf.stack([tf.cast(size, tf.int64) for size in known]))


def own_spec(leaf: Any) -> Any:
    """Returns the type spec of a tensor or type spec; None for any other object."""
    spec = tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf
    return spec if isinstance(spec, tf.TypeSpec) and hasattr(spec, "shape") else None


def row_spec(leaf: Any, rows: int | None = None) -> Any:
    """Returns the type spec of a tensor or type spec with `rows` rows (None: any number); None for any other object."""
    spec = own_spec(leaf)
    if spec is None:
        return None
    shape = [rows, *spec.shape[1:]] if spec.shape.rank else spec.shape
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return tf.TensorSpec(shape, spec.dtype)


def known_rows(batch: Any, whole: WholeTensors = _ALL_CUT) -> int | None:
    """Returns the number of rows of a batch of tensors or types, if any that is cut is known to have it; else None."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in whole.cut_leaves(batch).values()]
    return next((shape[0] for shape in shapes if shape.rank and shape[0] is not None), None)


def traced_spec(leaf: Any, batch_rows: int | None) -> Any:
    """Returns the type with which one device traces a tensor, from a slice of it.

    Args:
        leaf: a tower's slice of the tensor.
        batch_rows: B, if it is known.
    """
    spec = own_spec(leaf)
    is_known = spec is not None and spec.shape.rank and spec.shape[0] is not None
    return row_spec(spec, batch_rows if is_known else None)


def rows_of_batches(data: Any, batch_size: int | None, whole: WholeTensors = _ALL_CUT) -> int | None:
    """Returns B if the arguments of `fit` determine it, from the batch size and the rows of arrays, or the data; else None.

    Args:
        data: the inputs, or batches.
        batch_size: the argument of `fit`.
        whole: the tensors that are not cut.
    """
    if isinstance(data, tf.data.Dataset):
        return known_rows(data.element_spec, whole)
    if all(hasattr(leaf, "shape") for leaf in flatten(data)):
        size = batch_size or BATCH_SIZE
        # The paths of tensors that are not cut begin at the batch.
        types = map_leaves(lambda leaf: tf.TensorSpec(leaf.shape), (data,))
        return min(size, known_rows(types, whole) or size)
    own = getattr(data, "batch_size", None)
    return own if isinstance(own, int) else None


def whole_batch(parts: Sequence[Any], slices: Sequence[Slice], whole: WholeTensors = _ALL_CUT) -> Any:
    """Joins the parts of a batch, without borrowed rows.

    Args:
        parts: N nested tensors of the same structure.
        slices: the N slices to which the parts belong.
        whole: the tensors that were not cut and are the same in all parts.
    """

    def put_together(stays: bool, *leaves: Any) -> Any:
        if leaves[0] is None or stays:
            return leaves[0]
        own = [
            slice_rows(leaf, tf.constant(0), _rows(leaf) * tf.minimum(part.rows, 1))
            for leaf, part in zip(leaves, slices, strict=True)
        ]
        is_sparse = isinstance(own[0], tf.SparseTensor)
        return tf.sparse.concat(axis=0, sp_inputs=own) if is_sparse else tf.concat(own, axis=0)

    return pack(parts[0], map(put_together, whole.of(parts[0]), *map(flatten, parts)))


def own_rows(whole: Any, slices: Sequence[Slice]) -> Any:
    """Returns the rows of consecutive slices from nested tensors with the rows of the global batch.

    Raises:
        ValueError: if no tensor of the batch was cut, so that no rows belong to a slice.
    """
    if not slices[0].whole.cut_leaves(slices[0].data):
        raise ValueError(
            'rows="shard" returns the predictions for a worker\'s own rows, but all tensors of the batch stay whole. Leave it '
            f"out: each worker then has all predictions. Received: whole={list(slices[0].whole.paths)}"
        )
    begin = slices[0].begin
    end = begin + tf.add_n([part.rows for part in slices])
    batch_rows = slices[0].batch_rows

    def own(leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            return leaf
        # A result that is not as long as the batch has no rows, such as a vector of weights, or the worker's rows alone.
        size = _rows(leaf)
        return slice_rows(leaf, tf.where(size == batch_rows, begin, 0), tf.where(size == batch_rows, end, size))

    return map_leaves(own, whole)


def _rows(leaf: Any) -> Tensor:
    if leaf.shape.rank and leaf.shape[0] is not None:
        return tf.constant(leaf.shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def as_array(leaf: Any) -> Any:
    """Converts an array to a tensor, and returns any other leaf of a batch as it is: numbers of Python adapt to their dtype."""
    return as_tensor(leaf) if hasattr(leaf, "__array__") and not tf.is_tensor(leaf) else leaf


def as_tensor(leaf: Any) -> Any:
    """Converts a leaf of a batch to a tensor, except None and `tf.experimental.Optional`.

    Raises:
        ValueError: if it is a dataset, which has no rows to cut.
    """
    if isinstance(leaf, tf.data.Dataset):
        raise ValueError(
            "A dataset inside a batch, as dataset.window() makes them, has no rows that towers could divide. Make tensors of "
            "it before: dataset.window(5).flat_map(lambda window: window.batch(5)), or dataset.batch(5). "
            f"Received: {leaf}"
        )
    if leaf is None or tf.is_tensor(leaf) or isinstance(leaf, tf.experimental.Optional):
        return leaf
    return tf.convert_to_tensor(leaf)
