"""Run workers as threads of the test's process, which exchange the tensors of TensorFlow's collectives in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import tensorflow as tf

from keras_dp.workers.collectives import Collectives


def on_workers(count, function, order=None):
    """Runs `function(collectives)` eagerly on `count` workers at the same time, and returns each worker's result.

    The runtime gathers in an order that may differ from the order of the workers.
    """
    runtime = _Runtime(count, order or range(count))

    def run(index):
        try:
            runtime.thread.index = index
            return function(Collectives(index, count))
        except BaseException:
            runtime.barrier.abort()
            raise

    with (
        mock.patch.object(tf.raw_ops, "CollectiveReduceV2", runtime.reduce),
        mock.patch.object(tf.raw_ops, "CollectiveGatherV2", runtime.gather),
        ThreadPoolExecutor(count) as threads,
    ):
        results = [threads.submit(run, index) for index in range(count)]
        errors = [error for result in results if (error := result.exception()) is not None]
        # The error that broke the barrier comes before the errors of a broken barrier.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
    return [result.result() for result in results]


class _Runtime:
    """Checks what TensorFlow's runtime requires: all workers run the same operation, and a key always names the same one."""

    def __init__(self, count, order):
        self.count = count
        self.order = list(order)
        self.thread = threading.local()
        self.barrier = threading.Barrier(count, timeout=20)
        self.brought = [None] * count
        self.uses = {}

    def reduce(self, input, **arguments):  # noqa: A002
        return tf.constant(sum(self.meet("reduce", input, **arguments)), input.dtype)

    def gather(self, input, **arguments):  # noqa: A002
        brought = self.meet("gather", input, **arguments)
        return tf.constant(np.concatenate([brought[i] for i in self.order]))

    def meet(self, kind, tensor, group_size, group_key, instance_key, **_):
        use = (kind, tensor.dtype, tuple(tensor.shape))
        self.brought[self.thread.index] = (int(group_size), int(group_key), int(instance_key), *use, tensor.numpy())
        self.barrier.wait()
        everywhere = list(self.brought)
        self.barrier.wait()
        assert len({brought[:-1] for brought in everywhere}) == 1, everywhere
        assert group_size == self.count
        assert tensor.shape.num_elements() or kind == "reduce", "TensorFlow crashes where it gathers nothing"
        assert self.uses.setdefault(int(instance_key), use) == use
        return [brought[-1] for brought in everywhere]
