"""Check that all workers read the same global batches."""

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dp.batches.slicing import SameBatch, Slice
from keras_dp.workers.collectives import OneWorker

Tensor = Any

SAMPLED_ELEMENTS = 4096  # at most, of each tensor
_LARGEST_PRIME_BELOW_2_20 = 2**20 - 3
_PRIME = 0x9E3779B1

logger = logging.getLogger("keras_dp")


class DifferentBatches:
    """Counts the steps in which the workers' global batches differ, and the steps in which their numbers of rows differ.

    Args:
        collectives: the collectives of the workers.
        device: the device that holds the counts.
    """

    def __init__(self, collectives: OneWorker, device: str):
        self._collectives = collectives
        self._told = False
        with tf.device(device):
            self._steps = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def check(self, batch: SameBatch, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """Counts the step if the workers' digests or numbers of rows differ. Returns the slices without their source."""
        own = tf.cast(tf.stack([batch.digest, slices[0].batch_rows]), tf.int64)
        total, squares = tf.unstack(self._collectives.sum(tf.stack([own, own * own])))
        # The variance of W equal numbers is 0.
        differ = squares * self._collectives.count != total * total
        self._steps.assign_add(tf.cast(differ, tf.int64))
        return tuple(part._replace(source=()) for part in slices)

    def report(self) -> None:
        """Logs a warning if there were such steps since the last report, and resets the counts. The chief says it once.

        Raises:
            ValueError: on all workers, if numbers of rows differed, which augmentation cannot explain.
        """
        steps, other_rows = self._steps.numpy().tolist()
        self._steps.assign([0, 0])
        if other_rows:
            raise ValueError(
                f"The workers were given global batches with different numbers of rows in {other_rows} steps, so the results "
                "are wrong. All workers must read the same data. If each worker reads its own part, pass sharded=True."
            )
        if steps and not self._told and not self._collectives.index:
            self._told = True
            logger.warning(
                "The workers were given different batches in %d steps. Each worker took its rows of its own batch, so some "
                "rows may have been used twice and others not at all. If each worker reads its own part of the data, as after "
                "dataset.shard(), pass sharded=True. Otherwise make datasets after connect_workers(), give shuffle() a seed, "
                "and list files in the same order. Ignore this warning if only random augmentation differs.",
                steps,
            )


def digest(batch: Any) -> Tensor:
    """Returns a checksum of a batch, an int32 scalar, from a sample of the elements of each tensor."""
    tensors = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(leaf)]
    prints = [_fingerprint(_sample(tf.reshape(tensor, [-1]))) for tensor in tensors]
    number = tf.bitcast(_fingerprint(tf.concat(prints, axis=0)), tf.int64)
    return tf.cast(number % _LARGEST_PRIME_BELOW_2_20, tf.int32)


def _sample(flat: Tensor) -> Tensor:
    """Returns up to `SAMPLED_ELEMENTS` elements of a vector, from scattered positions: all of them if there are no more."""
    size = tf.size(flat, tf.int64)
    places = tf.range(tf.minimum(size, SAMPLED_ELEMENTS)) * _PRIME % tf.maximum(size, 1)
    return tf.gather(flat, places)


def _fingerprint(elements: Tensor) -> Tensor:
    """Returns a fingerprint of a vector: 8 bytes, uint8."""
    return tf.raw_ops.Fingerprint(data=elements[tf.newaxis], method="farmhash64")[0]
