"""Run a step of a Keras model on slices of a nested batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches.slicing import Slice, row_spec, whole_batch
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.partition.step import Argument, Partition, RowCounts, run_partitioned
from keras_dp.steps.across_workers import AcrossWorkers, refuse_strings
from keras_dp.workers.collectives import OneWorker

Tensor = Any


def run_on_slices(
    step: Callable[[Any], Any],
    slices: Sequence[Slice],
    whole: WholeTensors,
    known_rows: int | None,
    devices: Sequence[str],
    home: str,
    collectives: OneWorker,
    jit_compile: bool = False,
    pack_copies: bool = False,
) -> tuple[Any, Partition]:
    """Runs a step, written for one device and a whole batch, on N slices of a batch.

    Args:
        step: a function that takes a batch and returns nested tensors, such as `keras.Model.train_step`.
        slices: the N slices of the batch.
        whole: the tensors that were not cut.
        known_rows: the number of rows of each batch, as in `arguments_of`.
        devices: the devices of the N towers.
        home: the device of operations that run once.
        collectives: the collectives of the workers, each of which has N towers.
        jit_compile: whether XLA compiles the towers' operations between exchanges.
        pack_copies: whether the tensors that devices send each other share messages.

    Returns:
        The step's result for the whole batch, and the step's partition.
    """
    of_batch, arguments = arguments_of(step, slices, whole, known_rows, collectives)
    across = AcrossWorkers(collectives) if collectives.count > 1 else None
    return run_partitioned(of_batch, arguments, rows_of(slices), devices, home, across, jit_compile, pack_copies)


def rows_of(slices: Sequence[Slice]) -> RowCounts:
    """Returns the numbers of the towers' rows."""
    return RowCounts(slices[0].batch_rows, [part.begin for part in slices], [part.rows for part in slices])


def arguments_of(
    step: Callable[[Any], Any],
    slices: Sequence[Slice],
    whole: WholeTensors,
    known_rows: int | None,
    collectives: OneWorker | None = None,
) -> tuple[Callable[..., Any], list[Argument]]:
    """Turns a step on a nested batch into a step on flat tensors, and returns it with these tensors.

    Args:
        step: a function that takes a batch.
        slices: the slices of the batch.
        whole: the tensors that were not cut.
        known_rows: the number of rows of each batch, for a step that asks for it while it is traced. Such a step takes whole
            batches. None for a step that takes any number of rows, and can be partitioned.
        collectives: the collectives of the workers that have slices of the batch; None if `slices` are all its slices.
    """
    parts = [keras.tree.flatten(part.data) for part in slices]
    arguments: list[Argument] = []
    counts = []
    for stays, *leaves in zip(whole.of(slices[0].data), *parts, strict=True):
        made = _whole_arguments(leaves[0]) if stays else _arguments(leaves, slices, collectives or OneWorker())
        if known_rows is not None:
            made = [_of_known_rows(argument, known_rows) if argument.slices else argument for argument in made]
        arguments += made
        counts.append(len(made))

    def of_batch(*tensors: Tensor) -> Any:
        following = iter(tensors)
        leaves = [_filled(leaf, [next(following) for _ in range(count)]) for leaf, count in zip(parts[0], counts, strict=True)]
        return step(keras.tree.pack_sequence_as(slices[0].data, leaves))

    return of_batch, arguments


def _whole_arguments(leaf: Any) -> list[Argument]:
    """Returns the tensors of a leaf that is not cut; none if it is not a tensor."""
    tensors = tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []
    return [
        Argument(tf.TensorSpec(tensor.shape, tensor.dtype), functools.partial(tf.identity, tensor), None) for tensor in tensors
    ]


def _arguments(leaves: Sequence[Any], slices: Sequence[Slice], collectives: OneWorker) -> list[Argument]:
    """Returns the tensors of a leaf of the batch: one, or the components of a ragged or sparse tensor, which stays whole."""
    if not tf.is_tensor(leaves[0]):
        return []

    @functools.cache
    def whole() -> Any:
        if collectives.count > 1:
            refuse_strings(leaves[0])
        return collectives.gather(whole_batch(leaves, slices))

    if isinstance(leaves[0], tf.Tensor):
        return [Argument(row_spec(leaves[0]), whole, list(leaves))]
    components = tf.nest.flatten(leaves[0], expand_composites=True)
    specs = [tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype) for tensor in components]

    def component(i: int) -> Tensor:
        return tf.nest.flatten(whole(), expand_composites=True)[i]

    return [Argument(spec, functools.partial(component, i), None) for i, spec in enumerate(specs)]


def _of_known_rows(argument: Argument, rows: int) -> Argument:
    """Turns an argument into the whole tensor, which is traced for `rows` rows and checked to have them."""
    spec = tf.TensorSpec([rows, *argument.spec.shape[1:]], argument.spec.dtype)

    def whole() -> Tensor:
        tensor = argument.whole()
        is_as_traced = tf.debugging.assert_equal(
            tf.shape(tensor)[0],
            rows,
            f"The step asks for the number of rows while it is traced, and was traced for batches of {rows} rows. Use "
            "keras.ops.shape(x)[0] in the step, or compile the model again before it takes batches of another size.",
        )
        with tf.control_dependencies([] if is_as_traced is None else [is_as_traced]):
            checked = tf.identity(tensor)
        checked.set_shape(spec.shape)
        return checked

    return Argument(spec, whole, None)


def _filled(leaf: Any, tensors: list[Tensor]) -> Any:
    if not tf.is_tensor(leaf):
        return None
    if isinstance(leaf, tf.Tensor):
        return tensors[0]
    return tf.nest.pack_sequence_as(row_spec(leaf), tensors, expand_composites=True)
