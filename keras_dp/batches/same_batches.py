"""Check that all workers read the same global batches."""

import hashlib
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.workers.collectives import OneWorker

Tensor = Any

SAMPLED_ELEMENTS = 4096  # at most, of each tensor
NOTED_STEPS = 2**14  # between two reports
_LARGEST_PRIME_BELOW_2_20 = 2**20 - 3
_PRIME = 0x9E3779B1

logger = logging.getLogger("keras_dp")


class DifferentBatches:
    """Finds the steps in which the workers' global batches, or their numbers of rows, differ.

    Each worker notes its batches. The notes are compared later, so that no step waits for other workers.

    Args:
        collectives: the collectives of the workers.
        device: the device that holds the notes.
    """

    def __init__(self, collectives: OneWorker, device: str):
        self._collectives = collectives
        self._told = False
        with tf.device(device):
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._notes = tf.Variable(tf.zeros([NOTED_STEPS, 2], tf.int64), trainable=False)

    def note(self, of_batch: Tensor, rows: Tensor) -> None:
        """Notes the digest and the number of rows of a step's global batch, in the function that is being traced."""
        place = self._steps % NOTED_STEPS
        own = tf.cast(tf.stack([of_batch, rows]), tf.int64)
        # Steps that share a place are counted as one. If one of them differs, so does their note, but for rare chances.
        self._notes.scatter_nd_update([[place]], [self._notes[place] * _LARGEST_PRIME_BELOW_2_20 + own])
        self._steps.assign_add(1)

    def report(self) -> None:
        """Compares the workers' notes, and forgets them. Logs a warning if batches differed. The chief says it once.

        All workers call it after the same steps.

        Raises:
            ValueError: on all workers, if numbers of rows differed, which augmentation cannot explain.
        """
        noted = self._notes.numpy()[: self._steps.numpy()]
        self._steps.assign(0)
        self._notes.assign(tf.zeros_like(self._notes))
        if len(set(self._collectives.exchange(hashlib.blake2b(noted.tobytes(), digest_size=16).digest()))) == 1:
            return
        everywhere = [
            np.frombuffer(message, np.int64).reshape(-1, 2) for message in self._collectives.exchange(noted.tobytes())
        ]
        known = min(map(len, everywhere))
        differ = np.any([notes[:known] != noted[:known] for notes in everywhere], axis=0)
        steps, other_rows = differ.sum(axis=0).tolist()
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
