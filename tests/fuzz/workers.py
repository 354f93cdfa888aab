"""Run workers as threads of one process, whose steps exchange tensors in memory."""

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from keras_dp.workers.collectives import OneWorker

_SECONDS = 120


class Meeting:
    """The exchanges between workers, each of which has the same number on all of them."""

    def __init__(self, count):
        self.count = count
        self._barriers = defaultdict(lambda: threading.Barrier(count, timeout=_SECONDS))
        self._brought = defaultdict(lambda: [None] * count)
        self._lock = threading.Lock()
        self._is_over = False

    def exchange(self, number, index, own):
        """Returns the arrays of all workers, once all have come."""
        with self._lock:
            barrier, brought = self._barriers[number], self._brought[number]
            if self._is_over:
                raise threading.BrokenBarrierError
        brought[index] = own
        barrier.wait()
        everywhere = list(brought)
        # None brings the array of its next step before all have taken these.
        barrier.wait()
        return everywhere

    def run(self, functions):
        """Runs the workers' functions at the same time, and returns their outcomes. None waits for one that has failed."""

        def outcome(function):
            found = function()
            if found.error:
                with self._lock:
                    self._is_over = True
                    for barrier in self._barriers.values():
                        barrier.abort()
            return found

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(outcome, functions))


class InMemory(OneWorker):
    """The collectives of one of the workers of a meeting; see `Collectives` for the methods."""

    def __init__(self, meeting, index):
        self.index, self.count = index, meeting.count
        self._meeting = meeting
        # TensorFlow does not keep the functions of operations that are copied to another graph.
        self._exchanges = []

    def sum(self, x):
        return self._exchanged(x, sum, x.shape)

    def sum_all(self, tensors):
        return [None if tensor is None else self.sum(tensor) for tensor in tensors]

    def counts(self, own):
        return self.sum(tf.one_hot(self.index, self.count, dtype=tf.int32) * tf.cast(own, tf.int32))

    def stack(self, x):
        return self._exchanged(x, np.stack, [self.count, *x.shape])

    def gather(self, x, counts=None):
        return self._exchanged(x, np.concatenate, [None, *x.shape[1:]])

    def _exchanged(self, x, joined, shape):
        number = len(self._exchanges)

        def exchange(own):
            return np.asarray(joined(self._meeting.exchange(number, self.index, own)), own.dtype)

        self._exchanges.append(exchange)
        result = tf.numpy_function(exchange, [x], x.dtype)
        result.set_shape(shape)
        return result
