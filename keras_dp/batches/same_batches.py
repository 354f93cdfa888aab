"""Check that all workers read the same global batches."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_dp.batches.slicing import Slice
from keras_dp.workers.collectives import OneWorker

Tensor = Any

SAMPLED_ELEMENTS = 4096  # of each tensor
_LARGEST_PRIME_BELOW_2_20 = 2**20 - 3
_PRIME = 0x9E3779B1

logger = logging.getLogger("keras_dp")


class CheckedSlice(NamedTuple):
    """A `Slice`, and a digest of the global batch that it was cut from.

    Attributes:
        data: as in `Slice`.
        begin: as in `Slice`.
        rows: as in `Slice`.
        batch_rows: as in `Slice`.
        digest: an int32 scalar, the same for the same batch.
    """

    data: Any
    begin: Tensor
    rows: Tensor
    batch_rows: Tensor
    digest: Tensor


class DifferentBatches:
    """Counts the steps in which the workers were given different global batches, or batches with different numbers of rows.

    Args:
        collectives: of the workers.
        device: where to count.
    """

    def __init__(self, collectives: OneWorker, device: str):
        self._collectives = collectives
        with tf.device(device):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def check(self, slices: Sequence[CheckedSlice]) -> tuple[Slice, ...]:
        """The slices of one step; whether all workers have the same digest and number of rows is counted beside it."""
        own = tf.cast(tf.stack([slices[0].digest, slices[0].batch_rows]), tf.int64)
        total, squares = tf.unstack(self._collectives.sum(tf.stack([own, own * own])))
        # W numbers have no variance if they are the same.
        differ = squares * self._collectives.count != total * total
        self._steps.assign_add(tf.cast(differ, tf.int64))
        return tuple(Slice(*checked[:-1]) for checked in slices)

    def report(self) -> None:
        """Says how many such steps there were since the last time, if any.

        Raises:
            ValueError: on all workers, if batches had different numbers of rows, which no augmentation explains.
        """
        steps, other_rows = self._steps.numpy().tolist()
        self._steps.assign([0, 0])
        if other_rows:
            raise ValueError(
                f"The workers were given global batches with different numbers of rows in {other_rows} steps, so that what was "
                "computed is wrong. All must read the same data; data that are divided already need sharded=True."
            )
        if steps:
            logger.warning(
                "The workers were given different batches in %d steps, of which each kept its own rows: some rows "
                "may have been used twice, and others not at all. Make datasets after connect_workers(), give shuffle() a "
                "seed, and list files in one order. If only random augmentation differs, all is well.",
                steps,
            )


def digest(batch: Any) -> Tensor:
    """A number for a batch, an int32 scalar, from a sample of the elements of each of its tensors."""
    tensors = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(leaf)]
    prints = [_fingerprint(_sample(tf.reshape(tensor, [-1]))) for tensor in tensors]
    number = tf.bitcast(_fingerprint(tf.concat(prints, axis=0)), tf.int64)
    return tf.cast(number % _LARGEST_PRIME_BELOW_2_20, tf.int32)


def _sample(flat: Tensor) -> Tensor:
    """Some elements, from places without a pattern; all, in another order, if they are few."""
    size = tf.size(flat, tf.int64)
    places = tf.range(tf.minimum(size, SAMPLED_ELEMENTS)) * _PRIME % tf.maximum(size, 1)
    return tf.gather(flat, places)


def _fingerprint(elements: Tensor) -> Tensor:
    """8 bytes, uint8, of the elements of a vector."""
    return tf.raw_ops.Fingerprint(data=elements[tf.newaxis], method="farmhash64")[0]
