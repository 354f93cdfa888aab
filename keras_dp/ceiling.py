"""IndependentTowers: the ceiling that data parallelism is measured against."""

from typing import Any
from unittest import mock

import tensorflow as tf

from keras_dp.model import DataParallelModel
from keras_dp.tower_result import TowerResult
from keras_dp.towers import Tower


class IndependentTowers(DataParallelModel):
    """The towers of a `DataParallelModel` with every sum over them cut, so that none waits for another one.

    They compute what they always compute, each for its slice; the first one's gradients are applied. What a step of
    `DataParallelModel` takes longer is all that data parallelism costs. It trains nothing of use: for `fit` in benchmarks.
    """

    def _stamp(self, *arguments: Any) -> list[TowerResult]:
        with mock.patch.object(Tower, "mark", lambda tower, x: tf.identity(x)):
            first, *others = super()._stamp(*arguments)
        done = [tf.group(*(leaf for leaf in _tensors(other))) for other in others]
        with tf.control_dependencies(done):
            return [tf.nest.map_structure(_unless_none, first, expand_composites=True)]

    def _update_metrics(self, variables: Any, towers: Any, slices: Any, total: Any) -> Any:
        return super()._update_metrics(variables, towers, slices[:1], total)


def _tensors(result: TowerResult) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(result, expand_composites=True) if leaf is not None]


def _unless_none(leaf: Any) -> Any:
    return None if leaf is None else tf.identity(leaf)
