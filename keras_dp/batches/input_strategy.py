"""Cut each global batch into slices in the input pipeline, in place of a `tf.distribute` strategy."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.same_batches import CheckedSlice, DifferentBatches, digest
from keras_dp.batches.shards import ShardSlice, as_slices, cut_shards
from keras_dp.batches.slicing import Slice, cut, known_rows, refuse_other_rows, whole_batch
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.workers.collectives import OneWorker

HOST = "CPU:0"

_KINDS = (Slice, CheckedSlice, ShardSlice)

NO_BATCHES = (
    "{}() was given no batch at all: the dataset or generator is empty. One that was read to its end before must be made anew."
)


@contextlib.contextmanager
def empty_prediction_refused(method: str) -> Iterator[None]:
    """Raises a ValueError where Keras's `predict` stumbles over a dataset or generator without a single batch."""
    try:
        yield
    except UnboundLocalError as error:
        if "batch_outputs" not in str(error):
            raise
        raise ValueError(NO_BATCHES.format(method)) from error


@contextlib.contextmanager
def _single_rows_explained(shapes: Sequence[tf.TensorShape]) -> Iterator[None]:
    """Says, in errors of a model that is given a dataset's elements, that these may be rows in place of batches."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if shapes and all(shape[0] is not None for shape in shapes):
            error.add_note("keras_dp: if the dataset gives single rows, make batches of them: dataset.batch(32).")
        raise


class InputStrategy:
    """Answers what Keras's trainer asks of its `tf.distribute` strategy: it distributes datasets and runs steps.

    Keras's own data adapters, `steps_per_execution`, validation and callbacks work unchanged through it. Whatever else is asked
    of it, TensorFlow's default strategy answers, as for a model that is not distributed at all: tools look at the strategy
    under which a model was made, to find out whether they may write files.

    Args:
        devices: of the N towers, for which a batch is cut into slices.
        is_eager: says whether steps run eagerly, in which case batches stay whole.
        prepare: called with the type of a dataset's batches, before any step is traced.
        collectives: of the workers, each of which takes its shard of every batch, and cuts that.
        whole: says which tensors of a batch are not cut.

    Attributes:
        takes_shards: whether the datasets to come hold the batches of this worker alone.
        different_batches: counts those that are not the same on all workers; None for a worker alone.
        prefetches: whether each tower's next slice is sent to its device while the towers work on the last one: if all are
            GPUs, since CPUs share the host's memory, and the dataset may be read ahead. Tensors that only a host can hold,
            such as strings, stay there.
        seconds_waited: how long steps have waited for their input; None if that is not measured.
        known_rows: how many rows each batch has that comes now, if that is known before there is one.
    """

    def __init__(
        self,
        devices: Sequence[str],
        is_eager: Callable[[], bool],
        prepare: Callable[[Any], None],
        collectives: OneWorker | None = None,
        whole: WholeTensors | None = None,
    ):
        self.devices = tuple(devices)
        self.is_eager = is_eager
        self.prepare = prepare
        self.collectives = collectives or OneWorker()
        self.whole = whole or WholeTensors()
        self.takes_shards = False
        self.different_batches = DifferentBatches(self.collectives, HOST) if self.collectives.count > 1 else None
        self.prefetches = all(device.startswith("GPU") for device in devices)
        self.seconds_waited: tf.Variable | None = None
        self.known_rows: int | None = None
        self._shapes: list[tf.TensorShape] = []  # of what the last dataset gives
        self._default_strategy = tf.distribute.get_strategy()

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_default_strategy"), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For `isinstance`: that of TensorFlow's default strategy."""
        return type(self._default_strategy)

    @property
    def num_towers(self) -> int:
        """N, the number of slices to cut a batch into."""
        return len(self.devices)

    def cut(self, batch: Any) -> tuple[Slice, ...]:
        """This worker's N slices of a global batch."""
        return _cut_shard(batch, self.num_towers, self.collectives.index, self.collectives.count, self.whole)

    def measure_wait(self, wanted: bool) -> bool:
        """Has steps measure how long they wait for input, or not; whether that is new, so that they need to be traced anew."""
        is_new = wanted != (self.seconds_waited is not None)
        if is_new:
            with tf.device(HOST):
                self.seconds_waited = tf.Variable(0.0, dtype=tf.float64, trainable=False) if wanted else None
        return is_new

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset | tf.distribute.DistributedDataset:
        """The dataset of batches as a dataset of N `Slice`s each.

        The next batch is read and cut while the towers work on the last one, unless TensorFlow itself would not read it.

        Raises:
            ValueError: if the dataset is known to be empty, or has tensors that are not cut beside shards.
        """
        if dataset.cardinality() == 0:
            raise ValueError(
                "The dataset is empty: there is no batch to train on, evaluate or predict. Look at what it is made of, and at "
                f"what filters or skips its elements. Received: {dataset.element_spec}"
            )
        if self.is_eager():
            return dataset
        shapes = [spec.shape for spec in self.whole.cut_leaves(dataset.element_spec).values()]
        self._shapes = [shape for shape in shapes if shape.rank is not None]
        are_shards = self.takes_shards and self.collectives.count > 1
        if are_shards and self.whole.names:
            raise ValueError(
                "With sharded=True each worker has data of its own, and tensors that are not cut must be the same for all. "
                f"Leave it out, and give all workers the same data. Received: whole={list(self.whole.names)}"
            )
        # How many rows the workers' shards have together is not known.
        self.known_rows = None if are_shards else known_rows(dataset.element_spec, self.whole)
        refuse_other_rows(dataset.element_spec, self.whole)
        with _single_rows_explained(self._shapes):
            self.prepare(dataset.element_spec)
        # tf.data hands over a batch that is a tuple as so many arguments.
        is_tuple = type(dataset.element_spec) is tuple
        # TensorFlow may keep the function: it must not keep the model alive, which this object refers to.
        num_towers, index, count, whole = self.num_towers, self.collectives.index, self.collectives.count, self.whole
        has_devices = self.prefetches and all(map(_fits_on_devices, tf.nest.flatten(dataset.element_spec)))
        if are_shards:
            sliced = cut_shards(dataset, num_towers)
        else:
            sliced = dataset.map(
                # To convert it would take a second, and the function has nothing to convert.
                tf.autograph.experimental.do_not_convert(
                    lambda *batch: _cut_and_digest(batch if is_tuple else batch[0], num_towers, index, count, whole)
                )
            )
        options = tf.data.Options()
        if dataset.options().autotune.enabled is None:
            # Autotuning stalls the start of an epoch for a second now and then, far longer than a cut takes.
            options.autotune.enabled = False
        sliced = sliced.with_options(options)
        if not _reads_ahead(dataset):
            return sliced
        sliced = sliced.prefetch(1)
        return _prefetch_to(self.devices, sliced) if has_devices else sliced

    def run(self, step: Callable[[Any], Any], args: tuple[Any]) -> Any:
        """Runs a step on N slices; a batch that did not come through the input pipeline is cut first."""
        (batch,) = args
        if isinstance(batch, _KINDS):
            batch = _strategy(self.devices).experimental_local_results(batch)
        if self.seconds_waited is not None:
            begin = tf.timestamp()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                self.seconds_waited.assign_add(tf.timestamp() - begin)
        if not self.is_eager():
            if not _is_cut(batch):
                self.known_rows = known_rows(batch, self.whole)
            # Whatever has become of the model since its data were distributed: a callback may have compiled it again.
            with tf.init_scope():
                self.prepare(batch[0].data if _is_cut(batch) else batch)
            with tf.device(HOST):
                batch = batch if _is_cut(batch) else self.cut(batch)
        elif _is_cut(batch):
            batch = whole_batch([part.data for part in batch], batch, self.whole)
        if _is_cut(batch) and self.different_batches is not None:
            with tf.device(HOST):
                if isinstance(batch[0], ShardSlice):
                    batch = as_slices(batch, self.collectives)
                elif isinstance(batch[0], CheckedSlice):
                    batch = self.different_batches.check(batch)
        with _single_rows_explained(self._shapes):
            return step(batch)


def _reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether TensorFlow reads a batch while the last one is worked on: unless its options say that it should not."""
    options = dataset.options()
    optimizations = options.experimental_optimization
    said = (options.autotune.enabled, optimizations.inject_prefetch, optimizations.apply_default_optimizations)
    return False not in said or isinstance(dataset, type(dataset.prefetch(1)))


def _fits_on_devices(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and (spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype == tf.bool)


def _prefetch_to(devices: tuple[str, ...], dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
    """The slices that follow each other, one on each device, sent there before they are asked for."""

    def one_by_one(*slices: Slice | CheckedSlice | ShardSlice) -> tf.data.Dataset:
        return functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, slices))

    options = tf.distribute.InputOptions(experimental_fetch_to_device=True, experimental_per_replica_buffer_size=1)
    return _strategy(devices).distribute_datasets_from_function(lambda context: dataset.flat_map(one_by_one), options)


@functools.cache
def _strategy(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """Only feeds the devices: nothing runs under it."""
    strategy = tf.distribute.MirroredStrategy(devices)
    # A batch has a slice for each device, always, so that no device needs to ask whether there is one for it.
    strategy.extended.experimental_enable_get_next_as_optional = False
    return strategy


def _is_cut(batch: Any) -> bool:
    return isinstance(batch, tuple) and bool(batch) and isinstance(batch[0], _KINDS)


def _cut_shard(batch: Any, num_towers: int, index: int, count: int, whole: WholeTensors) -> tuple[Slice, ...]:
    return cut(batch, num_towers * count, range(num_towers * index, num_towers * (index + 1)), whole)


def _cut_and_digest(
    batch: Any, num_towers: int, index: int, count: int, whole: WholeTensors
) -> tuple[Slice | CheckedSlice, ...]:
    slices = _cut_shard(batch, num_towers, index, count, whole)
    if count == 1:
        return slices
    of_batch = digest(batch)
    return tuple(CheckedSlice(*part, of_batch) for part in slices)
