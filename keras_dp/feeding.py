"""Feed towers: cut each global batch into slices on the host, in the input pipeline."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_dp.batches import Slice, cut

HOST = "CPU:0"

NO_BATCHES = "{}() was given no batch at all: the dataset or generator is empty."


@contextlib.contextmanager
def empty_prediction_refused(method: str) -> Iterator[None]:
    """Raises a ValueError where Keras's `predict` stumbles over a dataset or generator without a single batch."""
    try:
        yield
    except UnboundLocalError as error:
        if "batch_outputs" not in str(error):
            raise
        raise ValueError(NO_BATCHES.format(method)) from error


class SliceFeed:
    """Answers what Keras's trainer asks of its `tf.distribute` strategy: it distributes datasets and runs steps.

    Keras's own data adapters, `steps_per_execution`, validation and callbacks work unchanged through it.

    Args:
        num_towers: N, the number of slices to cut a batch into.
        is_eager: says whether steps run eagerly, in which case batches stay whole.
        prepare: called with the type of a dataset's batches, before any step is traced.
    """

    def __init__(self, num_towers: int, is_eager: Callable[[], bool], prepare: Callable[[Any], None]):
        self.num_towers = num_towers
        self.is_eager = is_eager
        self.prepare = prepare

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset of batches as a dataset of N `Slice`s each.

        Raises:
            ValueError: if the dataset is known to be empty.
        """
        if dataset.cardinality() == 0:
            raise ValueError(
                f"The dataset is empty: there is no batch to train on, evaluate or predict. Received: {dataset.element_spec}"
            )
        if self.is_eager():
            return dataset
        self.prepare(dataset.element_spec)
        # tf.data hands over a batch that is a tuple as so many arguments.
        is_tuple = type(dataset.element_spec) is tuple
        # TensorFlow may keep the function: it must not keep the model alive, which this object refers to.
        num_towers = self.num_towers
        dataset = dataset.map(lambda *batch: cut(batch if is_tuple else batch[0], num_towers))
        options = tf.data.Options()
        if dataset.options().autotune.enabled is None:
            # Autotuning stalls the start of an epoch for a second now and then, far longer than a cut takes.
            options.autotune.enabled = False
        return dataset.with_options(options).prefetch(1)

    def run(self, step: Callable[[Any], Any], args: tuple[Any]) -> Any:
        """Runs a step on N slices; a batch that did not come through the input pipeline is cut first."""
        (batch,) = args
        if not self.is_eager() and not _is_cut(batch):
            with tf.init_scope():
                self.prepare(batch)
            with tf.device(HOST):
                batch = cut(batch, self.num_towers)
        return step(batch)


def _is_cut(batch: Any) -> bool:
    return isinstance(batch, tuple) and bool(batch) and isinstance(batch[0], Slice)
