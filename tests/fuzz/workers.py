"""Run workers as threads of one process, whose steps exchange tensors in memory."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.workers.collectives import OneWorker

_SECONDS = 120


class Meeting:
    """The exchanges between W workers, each of which has the same number on all workers.

    Args:
        count: W.
    """

    def __init__(self, count: int):
        self.count = count
        self._barriers: dict[int, threading.Barrier] = defaultdict(lambda: threading.Barrier(count, timeout=_SECONDS))
        self._brought: dict[int, list[Any]] = defaultdict(lambda: [None] * count)
        self._lock = threading.Lock()
        self._is_over = False

    def exchange(self, number: int, index: int, own: np.ndarray) -> list[np.ndarray]:
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

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs the workers' functions at the same time, and returns for each its result or its error."""
        self._is_over = False
        self._barriers.clear()

        def result(function: Callable[[], Any]) -> Any:
            try:
                return function()
            except Exception as error:
                self._end()
                return error

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(result, functions))

    def _end(self) -> None:
        """Ends the waiting for a worker that has failed."""
        with self._lock:
            self._is_over = True
            for barrier in self._barriers.values():
                barrier.abort()


class InMemory(OneWorker):
    """The collectives of one of the workers of a meeting; see `Collectives` for the methods.

    Args:
        meeting: the meeting.
        index: the number of this worker.
    """

    def __init__(self, meeting: Meeting, index: int):
        self.index, self.count = index, meeting.count
        self._meeting = meeting
        # TensorFlow does not keep the functions of operations that are copied to another graph.
        self._exchanges: list[Callable[..., Any]] = []

    def sum(self, x: Any) -> Any:
        return self._exchanged(x, sum, x.shape)

    def sum_all(self, tensors: Sequence[Any]) -> list[Any]:
        return [None if tensor is None else self.sum(tensor) for tensor in tensors]

    def counts(self, own: Any) -> Any:
        return self.sum(tf.one_hot(self.index, self.count, dtype=tf.int32) * tf.cast(own, tf.int32))

    def stack(self, x: Any) -> Any:
        return self._exchanged(x, np.stack, [self.count, *x.shape])

    def gather(self, x: Any, counts: Any = None) -> Any:
        return self._exchanged(x, np.concatenate, [None, *x.shape[1:]])

    def _exchanged(self, x: Any, joined: Callable[[list[np.ndarray]], Any], shape: Any) -> Any:
        number = len(self._exchanges)

        def exchange(own: np.ndarray) -> np.ndarray:
            return np.asarray(joined(self._meeting.exchange(number, self.index, own)), own.dtype)

        self._exchanges.append(exchange)
        result = tf.numpy_function(exchange, [x], x.dtype)
        result.set_shape(shape)
        return result
