"""IndependentTowers: the ceiling that data parallelism is measured against."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches import Slice
from keras_dp.model import DataParallelModel
from keras_dp.tower_result import TowerResult, Variables

Logs = dict[str, Any]


class IndependentTowers(DataParallelModel):
    """The towers of a `DataParallelModel` with every sum over them cut, so that none waits for another one.

    They compute what they always compute, each for its slice; the first one's gradients are applied. What a step of
    `DataParallelModel` takes longer is all that data parallelism costs. It trains nothing of use: for `fit` in benchmarks.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._sinks: list[list[tf.Variable]] = []

    def _prepare(self, batch: Any) -> None:
        super()._prepare(batch)
        variables = Variables.of(self.inner_model)
        kept = variables.weights + variables.metrics
        if not self._sinks or len(kept) != len(self._sinks[0]):
            self._sinks = [[_sink(variable, device) for variable in kept] for device in self._devices]

    def _sum_device(self, variables: Variables) -> None:
        return None

    def _stamp(self, step: str, variables: Variables, slices: Sequence[Slice]) -> list[TowerResult]:
        first, *others = super()._stamp(step, variables, slices)
        # TensorFlow does not run what nothing is done with: what the other towers compute is kept somewhere.
        for other, sinks in zip(others, self._sinks[1:], strict=True):
            for sink, result in zip(sinks, [*other.gradients, *other.metrics], strict=False):
                if result is not None:
                    sink.assign(result.values if isinstance(result, tf.IndexedSlices) else result)
        return [first]

    def _update_metrics(
        self, variables: Variables, towers: list[TowerResult], slices: Sequence[Slice], total: TowerResult
    ) -> Logs:
        return super()._update_metrics(variables, towers, slices[:1], total)


def _sink(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(variable.value, shape=tf.TensorShape(None), trainable=False)
