"""Cut each global batch into slices in the input pipeline, in place of a `tf.distribute` strategy."""

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.nesting import flatten, pack
from keras_dp.batches.other_rows import FoundWhole, refuse_other_rows
from keras_dp.batches.same_batches import DifferentBatches, digest
from keras_dp.batches.shards import cut_shards, placed
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, cut, holds_no_rows, is_cut, typed_by_batch, whole_batch, with_known_rows
from keras_dp.batches.waiting import Waiting
from keras_dp.batches.whole_tensors import WholeNames, WholeTensors
from keras_dp.devices.available import are_gpus
from keras_dp.error_notes import add_note
from keras_dp.keras_internals.tensorflow_runtime import before_prefetch
from keras_dp.partition.tensorflow_internals import HOST, outside_of_traces
from keras_dp.workers.collectives import OneWorker
from keras_dp.wrapping.in_trace import tracing

logger = logging.getLogger("keras_dp")

_CUT_FUNCTIONS = 16  # as many types of batches as training and evaluation are likely to alternate between

NO_BATCHES = (
    "{}() was given no batch at all: the dataset or generator is empty. If it was already read to its end, create it again."
)


@contextlib.contextmanager
def empty_prediction_refused(method: str) -> Iterator[None]:
    """Raises a ValueError in place of the UnboundLocalError of Keras's `predict` for a dataset or generator without batches."""
    try:
        yield
    except UnboundLocalError as error:
        if "batch_outputs" not in str(error):
            raise
        raise ValueError(NO_BATCHES.format(method)) from error


@contextlib.contextmanager
def _single_rows_explained(shapes: Sequence[tf.TensorShape]) -> Iterator[None]:
    """Adds a note to errors of a model that speak of shapes: the elements may be single rows instead of batches."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # Keras appends the arguments of the layer, with their shapes, to the user's own words.
        said = str(error).partition("Arguments received by")[0]
        names_shape = any(word in said for word in ("incompatible", "rank", "ndim", "input shape"))
        if names_shape and all(shape[0] is not None for shape in shapes):
            add_note(error, "keras_dp: if the dataset gives single rows, make batches of them: dataset.batch(32).")
        raise


class InputStrategy:
    """Distributes datasets and runs steps, as the `tf.distribute` strategy of Keras's trainer.

    Keras's own data adapters, `steps_per_execution`, validation and callbacks work with it unchanged. All other attributes come
    from TensorFlow's default strategy, as for a model that is not distributed. Tools look at the strategy under which a model
    was made, to find out whether they may write files.

    Args:
        devices: the devices of the N towers; a batch is cut into one slice for each.
        is_eager: a function that returns whether steps run eagerly; batches then stay whole.
        prepare: a function that is called before a step is traced.
        run_on_slices: runs a step on N slices, in the function that is being traced.
        call_step: runs a step that is called eagerly, in a function; None if none is.
        collectives: the collectives of the workers; each worker cuts its own part of every batch.
        whole: the tensors of a batch that the user does not want to be cut.
        shares: the shares of the towers in the rows of a batch; None if they are alike.

    Attributes:
        named: the tensors of a batch that the user does not want to be cut.
        whole: the tensors of the current data that are not cut: those that are named, and those of which the data's types say
            that they have other rows.
        feeds_trainer: whether Keras's trainer takes the next datasets. A program that takes one by itself sees whole batches.
        takes_shards: whether the next datasets hold only this worker's own batches.
        shard_types: the types of the slices of the last dataset that held only this worker's own batches.
        cuts_in_step: whether steps cut the batches of the next datasets. TensorFlow traces such a step by the type of the whole
            batch, as it does for one device.
        usual_rows: B in most batches of the next data; None if it is not known.
        has_all_names: whether the next data have all tensors that are named, as those of training do.
        different_batches: the count of batches that differ between workers; None for a single worker.
        waiting: the time for which steps have waited for their input.
    """

    def __init__(
        self,
        devices: Sequence[str],
        is_eager: Callable[[], bool],
        prepare: Callable[[], None],
        run_on_slices: Callable[[Callable[[Any], Any], Sequence[Slice]], Any],
        call_step: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any] | None = None,
        collectives: OneWorker | None = None,
        whole: WholeTensors | None = None,
        shares: Shares | None = None,
    ):
        self.devices = tuple(devices)
        self.is_eager = is_eager
        self.prepare = prepare
        self.run_on_slices = run_on_slices
        self._call_step = call_step
        self.collectives = collectives or OneWorker()
        self.named = self.whole = whole or WholeTensors()
        self.shares = shares or Shares.alike(len(self.devices))
        self.feeds_trainer = True
        self.takes_shards = False
        self.shard_types: Any = None
        self.cuts_in_step = False
        self.usual_rows: int | None = None
        self.has_all_names = False
        self.different_batches = DifferentBatches(self.collectives, HOST) if self.collectives.count > 1 else None
        self.waiting = Waiting(is_costly=are_gpus(devices))
        self._cut_functions: deque[tuple[tuple[Any, str, Any], Any]] = deque(maxlen=_CUT_FUNCTIONS)
        self._shapes: list[tf.TensorShape] = []  # of the tensors in the last dataset that are cut
        self._names = WholeNames(self.named.names)
        self._found = FoundWhole()
        self._told_no_rows = False
        self._default_strategy = tf.distribute.get_strategy()

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_default_strategy"), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of TensorFlow's default strategy, for `isinstance`."""
        return type(self._default_strategy)

    @property
    def num_towers(self) -> int:
        """N, the number of slices into which a worker cuts its part of a batch."""
        return len(self.devices)

    @contextlib.contextmanager
    def feeding(self, **flags: bool) -> Iterator[None]:
        """Sets attributes of this object for the data of one call."""
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        try:
            yield
        finally:
            vars(self).update(before)

    def see(self, batch: Any, finds_whole: bool = False) -> None:
        """Learns from a batch of tensors, or of their types, which tensors of the current data are not cut.

        Args:
            batch: the batch.
            finds_whole: whether tensors with other rows stay whole although they are not named. Only types can be trusted to
                say the same of all batches.

        Raises:
            ValueError: if the data are for training, and lack a tensor that is named.
        """
        self._names.see(batch, self.has_all_names)
        self.whole = self._found.add_to(self.named, batch) if finds_whole else self.named
        if not self._told_no_rows and self.num_towers > 1 and not self.named.names and holds_no_rows(batch):
            self._told_no_rows = True
            logger.warning(
                "The batch holds numbers without rows, which towers cannot divide: one device computes the step, with the same "
                "result. If these are single rows, make batches of them: dataset.batch(32)."
            )

    def cut(self, batch: Any) -> tuple[Slice, ...]:
        """Returns this worker's N slices of a global batch."""
        return _cut_own_rows(batch, *self._part())

    def cut_as_of_dataset(self, batch: Any) -> tuple[Slice, ...]:
        """Returns this worker's N slices of a batch, with the types that the slices of a dataset's batches have."""
        self.whole = self.named
        with tf.device(HOST):
            return typed_by_batch(_cut_own_rows(batch, *self._part()))

    def _part(self) -> tuple[Shares, int, int, WholeTensors]:
        """Returns the towers' shares, the index of this worker, the number of workers, and what is not cut."""
        return self.shares, self.collectives.index, self.collectives.count, self.whole

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Turns a dataset of batches into a dataset of N `Slice`s each.

        The next batch is read and cut while the towers work on the last one, unless the dataset's options forbid it.

        Raises:
            ValueError: if the dataset is known to be empty, or holds shards and tensors that are not cut.
        """
        if dataset.cardinality() == 0:
            raise ValueError(
                "The dataset is empty: there is no batch to train on, evaluate or predict. Check its source, and everything "
                f"that filters or skips its elements. Received: {dataset.element_spec}"
            )
        if self.is_eager() or not self.feeds_trainer:
            return dataset
        shapes = [spec.shape for spec in self.named.cut_leaves(dataset.element_spec).values()]
        self._shapes = [shape for shape in shapes if shape.rank is not None]
        are_shards = self.takes_shards and self.collectives.count > 1
        if are_shards and self.named.names:
            raise ValueError(
                "With sharded=True each worker reads its own data, but tensors that are not cut must be the same for all. "
                f"Leave sharded out and give all workers the same data. Received: whole={list(self.named.names)}"
            )
        self.see(dataset.element_spec, finds_whole=not are_shards)
        refuse_other_rows(dataset.element_spec, self.whole)
        self.prepare()
        if self.cuts_in_step and not are_shards:
            return dataset
        # The slices are read ahead in place of the batches: Python code that makes batches runs no further ahead than in Keras.
        source, ahead = _read_ahead(dataset)
        if are_shards:
            sliced = cut_shards(source, self.shares)
            self.shard_types = sliced.element_spec
        else:
            sliced = source.map(self._cutting(dataset.element_spec))
        options = tf.data.Options()
        if dataset.options().autotune.enabled is None:
            # Autotuning sometimes stalls the start of an epoch for a second, far longer than a cut takes.
            options.autotune.enabled = False
        sliced = sliced.with_options(options)
        return sliced if ahead is None else sliced.prefetch(ahead)

    def _cutting(self, types: Any) -> Callable[..., tuple[Slice, ...]]:
        """Returns the function that cuts batches of some types. TensorFlow traces it once, and not in each call of `fit`."""
        # Equal types may be of other structures: dictionaries in another order, a named tuple and a tuple. Their text shows it.
        key = types, repr(types), self._part()
        kept = next((kept for kept in self._cut_functions if kept[0] == key), None)
        if kept is None:
            # TensorFlow may keep the function alive, so the function must not refer to this object, which refers to the model.
            part = self._part()
            # tf.data passes a batch that is a tuple as several arguments.
            is_tuple = type(types) is tuple
            function = tf.function(
                lambda *batch: typed_by_batch(_cut_own_rows(batch if is_tuple else batch[0], *part)), autograph=False
            )
            kept = key, function
            self._cut_functions.append(kept)
        return kept[1]

    def run(self, step: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Runs a step on N slices of its arguments; arguments that did not come through the input pipeline are cut first."""
        if not any(map(is_array, flatten((args, kwargs)))) and not any(map(is_cut, args)):
            # There is nothing to divide.
            with tracing():
                return step(*args, **(kwargs or {}))
        if self.is_eager():
            args = [whole_batch([part.data for part in arg], arg, arg[0].whole) if is_cut(arg) else arg for arg in args]
            self.waiting.batch_is_there(args)
            result = step(*args, **(kwargs or {}))
            self.waiting.step_ends(result)
            return result
        if tf.executing_eagerly() and self._call_step is not None:
            return self._call_step(step, args, kwargs or {})
        step, batch = _step_of_batch(step, args, kwargs or {})
        self.waiting.batch_is_there(batch)
        if is_cut(batch):
            self.whole = batch[0].whole
        elif not self.cuts_in_step:
            self.whole = self.named
        # The model may have changed since its data were distributed: a callback may have compiled it again.
        with outside_of_traces():
            self.prepare()
        with tf.device(HOST):
            if is_cut(batch):
                slices = with_known_rows(batch, self.shares, self.collectives.index, self.collectives.count)
            else:
                slices = _cut_own_rows(batch, *self._part())
            slices = self._joined(slices)
        with _single_rows_explained(self._shapes):
            result = self.run_on_slices(step, slices)
        self.waiting.step_ends(result)
        return result

    def _joined(self, slices: tuple[Slice, ...]) -> tuple[Slice, ...]:
        """Returns slices of the global batch; the workers first compare or join their batches where necessary."""
        if slices[0].is_of_shard:
            return placed(slices, self.collectives)
        if self.different_batches is not None:
            self.different_batches.note(slices[0].digest, slices[0].batch_rows)
        return slices


def _step_of_batch(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[Any], Any], Any]:
    """Turns a step and its arguments into a step of one batch, and that batch.

    One argument is the batch. Several are a tuple of it, with named ones as a dictionary at its end. Arguments that are no
    tensors or arrays are part of the step.
    """
    given = args[0] if len(args) == 1 and not kwargs else (*args, *([dict(kwargs)] if kwargs else []))
    if is_cut(given):
        return step, given
    if given is args[0] and _holds_arrays(given):
        return step, given
    is_data = [_is_data(leaf) for leaf in flatten(given)]

    @functools.wraps(step, updated=())
    def of_batch(batch: Any) -> Any:
        leaves = zip(is_data, flatten(given), flatten(batch), strict=True)
        filled = pack(given, [leaf if is_of_batch else constant for is_of_batch, constant, leaf in leaves])
        if len(args) == 1 and not kwargs:
            return step(filled)
        return step(*filled[: len(args)], **(filled[-1] if kwargs else {}))

    return of_batch, pack(given, [leaf if kept else None for kept, leaf in zip(is_data, flatten(given), strict=True)])


def _holds_arrays(batch: Any) -> bool:
    """Returns whether a nested batch holds tensors and arrays alone, and no numbers of Python or other objects."""
    return all(map(_is_data, flatten(batch)))


def _is_data(leaf: Any) -> bool:
    is_absent = leaf is None or isinstance(leaf, tf.experimental.Optional)
    return is_absent or is_array(leaf)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf of a batch is a tensor or an array."""
    return bool(tf.is_tensor(leaf)) or hasattr(leaf, "__array__")


def _read_ahead(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, int | None]:
    """Returns a dataset without its prefetch, and how many batches may be read ahead; None if its options allow none."""
    prefetched = before_prefetch(dataset)
    if prefetched is not None:
        return prefetched
    options = dataset.options()
    optimizations = options.experimental_optimization
    said = (options.autotune.enabled, optimizations.inject_prefetch, optimizations.apply_default_optimizations)
    return dataset, None if False in said else 1


def _cut_own_rows(batch: Any, shares: Shares, worker: int, workers: int, whole: WholeTensors) -> tuple[Slice, ...]:
    own = cut(batch, shares, worker, workers, whole)
    checksum = digest(batch) if workers > 1 else ()
    return tuple(part._replace(digest=checksum) for part in own)
