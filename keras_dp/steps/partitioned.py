"""Run a step of a Keras model on slices of a nested batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_dp import choices
from keras_dp.arithmetic.share import ArithmeticOfRows, arithmetic_of_rows
from keras_dp.batches.nesting import flatten, pack
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, own_spec, traced_spec, whole_batch
from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.row_counts import USUAL_ROWS, RowCounts
from keras_dp.partition.step import Argument, Partition, partition_of, run_partitioned
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.trace import Trace
from keras_dp.steps.across_workers import AcrossWorkers
from keras_dp.workers.collectives import OneWorker

Tensor = Any


@dataclasses.dataclass(frozen=True)
class StepOnSlices:
    """A traced step, and the slices of the batch that it is to run on.

    Attributes:
        trace: the trace of the step, as one device runs it.
        arguments: the tensors of the batch.
        rows: the numbers of rows of the batch and of each slice.
        target: the devices, of the towers that have rows alone.
    """

    trace: Trace
    arguments: Sequence[Argument]
    rows: RowCounts
    target: Target

    def run(self) -> tuple[Any, Partition]:
        """Runs the step. Returns its result for the whole batch, and its partition."""
        return run_partitioned(self.trace, self.arguments, self.rows, self.target)

    def partition(self) -> Partition:
        """Partitions the step without running it."""
        return partition_of(self.trace, self.arguments, self.rows, self.target)

    def arithmetic(self, partition: Partition) -> ArithmeticOfRows | None:
        """Counts the arithmetic of rows, on towers and once.

        Traces the step with twice as many rows, and once more with its own rows: Python code in the step leaves behind what it
        leaves in a trace of its own. Returns None if the step takes no other number of rows.

        Args:
            partition: the partition of this step.
        """
        specs = [argument.spec for argument in self.arguments]
        try:
            with_more_rows = self.trace.of([_with_twice_the_rows(argument) for argument in self.arguments])
        except Exception:
            # The step of the user, which may be written for one number of rows alone.
            return None
        finally:
            self.trace.of(specs)
        return arithmetic_of_rows(partition, with_more_rows)


def on_slices(
    step: Callable[[Any], Any],
    slices: Sequence[Slice],
    shares: Shares,
    target: Callable[[], Target],
    collectives: OneWorker | None = None,
    variables_made: Callable[[], None] = lambda: None,
    usual_rows: int | None = None,
    result_rows: choices.Rows = "all",
) -> StepOnSlices:
    """Traces a step, written for one device and a whole batch, to run on N slices of a batch.

    Args:
        step: a function that takes a batch and returns nested tensors, such as `keras.Model.train_step`.
        slices: the N slices of the batch.
        shares: the shares by which each worker cut its slices.
        target: returns the devices of the N towers, and home, once the step has its variables.
        collectives: the collectives of the workers that have slices of the batch; None if `slices` are all its slices.
        variables_made: is called when a first trace has made variables, before a second one.
        usual_rows: B in most batches; None if it is not known.
        result_rows: "all", or "shard" if results that are known to have rows need not have those of other workers.
    """
    collectives = collectives or OneWorker()
    rows = rows_of(slices, shares, collectives, usual_rows)
    of_batch, arguments = arguments_of(step, slices, collectives)
    trace = Trace(of_batch, [argument.spec for argument in arguments], variables_made)
    if collectives.count > 1:
        # The parts of a ragged or sparse tensor have other rows than the tensor.
        keeps_rows = result_rows == "shard" and trace.is_dense
        across = AcrossWorkers(collectives, keeps_rows)
        return StepOnSlices(trace, arguments, rows, dataclasses.replace(target(), across=across))
    of_all = target()
    if rows.known is not None:
        # Towers that are known to have no rows take no part.
        used = [tower for tower, own in enumerate(rows.own_rows) if own]
        arguments = [_of_towers(argument, used) for argument in arguments]
        begins, own_rows = ([numbers[tower] for tower in used] for numbers in (rows.begins, rows.own_rows))
        rows = dataclasses.replace(rows, begins=begins, own_rows=own_rows)
        of_used = dataclasses.replace(of_all, devices=[of_all.devices[tower] for tower in used])
        return StepOnSlices(trace, arguments, rows, of_used)
    return StepOnSlices(trace, arguments, rows, of_all)


def _with_twice_the_rows(argument: Argument) -> tf.TensorSpec:
    spec = argument.spec
    if argument.slices is None or spec.shape[0] is None:
        return spec
    return tf.TensorSpec([2 * spec.shape[0], *spec.shape[1:]], spec.dtype)


def _of_towers(argument: Argument, towers: Sequence[int]) -> Argument:
    if argument.slices is None:
        return argument
    return dataclasses.replace(argument, slices=[argument.slices[tower] for tower in towers])


def rows_of(slices: Sequence[Slice], shares: Shares, collectives: OneWorker, usual_rows: int | None = None) -> RowCounts:
    """Returns the numbers of the towers' rows, as integers if the number of rows of the batch is known.

    The arguments are those of `on_slices`.
    """
    batch_rows, workers = slices[0].batch.shape[0], collectives.count
    usual_rows = usual_rows if batch_rows is None else batch_rows
    tower_rows = USUAL_ROWS if usual_rows is None else max(shares.sizes(usual_rows, workers))
    if batch_rows is None:
        numbers = slices[0].batch_rows, [part.begin for part in slices], [part.rows for part in slices]
        return RowCounts(*numbers, tower_rows, _worker_rows(slices, workers))
    ranges = shares.ranges(batch_rows, collectives.index, workers)
    numbers = batch_rows, [begin for begin, _ in ranges], [end - begin for begin, end in ranges]
    return RowCounts(*numbers, tower_rows, Shares.alike(workers).sizes(batch_rows) if workers > 1 else None)


def _worker_rows(slices: Sequence[Slice], workers: int) -> Tensor | None:
    """Returns the number of each worker's rows, W numbers: as they say them, or as they cut a batch that all have."""
    if workers == 1:
        return None
    if slices[0].is_of_shard:
        return slices[0].shard_rows
    with tf.device(HOST):
        return tf.stack(Shares.alike(workers).sizes(slices[0].batch_rows))


def arguments_of(
    step: Callable[[Any], Any], slices: Sequence[Slice], collectives: OneWorker
) -> tuple[Callable[..., Any], list[Argument]]:
    """Turns a step on a nested batch into a step on flat tensors, and returns it with these tensors.

    Args:
        step: a function that takes a batch.
        slices: the slices of the batch.
        collectives: the collectives of the workers that have slices of the batch.
    """
    parts = [flatten(part.data) for part in slices]
    batch_rows = slices[0].batch.shape[0]
    arguments: list[Argument] = []
    counts, specs = [], []
    for stays, *leaves in zip(slices[0].whole.of(slices[0].data), *parts, strict=True):
        spec = own_spec(leaves[0]) if stays else traced_spec(leaves[0], batch_rows)
        made = _whole_arguments(leaves[0]) if stays else _arguments(leaves, spec, slices, collectives)
        arguments += made
        counts.append(len(made))
        specs.append(spec)

    def of_batch(*tensors: Tensor) -> Any:
        following = iter(tensors)
        leaves = [_filled(spec, [next(following) for _ in range(count)]) for spec, count in zip(specs, counts, strict=True)]
        return step(pack(slices[0].data, leaves))

    return of_batch, arguments


def _whole_arguments(leaf: Any) -> list[Argument]:
    """Returns the tensors of a leaf that is not cut; none if it is not a tensor."""
    tensors = tf.nest.flatten(leaf, expand_composites=True) if tf.is_tensor(leaf) else []
    return [
        Argument(tf.TensorSpec(tensor.shape, tensor.dtype), functools.partial(tf.identity, tensor), None) for tensor in tensors
    ]


def _arguments(leaves: Sequence[Any], spec: Any, slices: Sequence[Slice], collectives: OneWorker) -> list[Argument]:
    """Returns the tensors of a leaf of the batch: one, or the components of a ragged or sparse tensor, which stays whole."""
    if not tf.is_tensor(leaves[0]):
        return []

    @functools.cache
    def whole() -> Any:
        return collectives.gather(whole_batch(leaves, slices))

    if isinstance(leaves[0], tf.Tensor):
        # A batch of one row is not cut: an axis of one entry may be broadcast.
        return [Argument(spec, whole, None if slices[0].batch.shape[0] == 1 else list(leaves))]

    def component(i: int) -> Tensor:
        return tf.nest.flatten(whole(), expand_composites=True)[i]

    components = tf.nest.flatten(spec, expand_composites=True)
    return [Argument(part, functools.partial(component, i), None) for i, part in enumerate(components)]


def _filled(spec: Any, tensors: list[Tensor]) -> Any:
    """Returns a leaf of a batch that consists of tensors; None for a leaf that is not a tensor."""
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True) if tensors else None
