"""IndependentTowers: the ceiling that data parallelism is measured against."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

from keras_dp.batches import Slice
from keras_dp.model import DataParallelModel
from keras_dp.tower_result import TowerResult, Variables
from keras_dp.towers import Tower

Logs = dict[str, Any]


class IndependentTowers(DataParallelModel):
    """The towers of a `DataParallelModel` with every sum over them cut, so that none waits for another one.

    They compute what they always compute, each for its slice; the first one's gradients are applied. What a step of
    `DataParallelModel` takes longer is all that data parallelism costs. It trains nothing of use: for `fit` in benchmarks.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._sinks = []
        for device in self._devices[1:]:
            with tf.device(device):
                shape = tf.TensorShape(None)
                self._sinks.append(tf.Variable(tf.zeros((), self.compute_dtype), shape=shape, trainable=False))

    def _stamp(self, step: str, variables: Variables, slices: Sequence[Slice]) -> list[TowerResult]:
        with mock.patch.object(Tower, "mark", lambda tower, x: tf.identity(x)):
            first, *others = super()._stamp(step, variables, slices)
        # TensorFlow would not run what nothing is done with.
        for sink, other in zip(self._sinks, others, strict=True):
            for tensor in tf.nest.flatten([other.loss, other.gradients, other.metrics], expand_composites=True):
                if tensor is not None and tensor.dtype == sink.dtype:
                    sink.assign(tensor)
        return [first]

    def _update_metrics(
        self, variables: Variables, towers: list[TowerResult], slices: Sequence[Slice], total: TowerResult
    ) -> Logs:
        return super()._update_metrics(variables, towers, slices[:1], total)
