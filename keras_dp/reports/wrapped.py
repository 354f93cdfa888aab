"""Define the face of a `DataParallelModel` that reports look at."""

from typing import Any, Protocol, TypeGuard

import keras

from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.steps.towers import TowerSteps


class Wrapped(Protocol):
    """Names the part of `DataParallelModel`, a room above, that reports use; see there."""

    inner_model: keras.Model
    optimizer: DataParallelOptimizer | None
    compiled: bool
    run_eagerly: bool
    trainable_weights: list[keras.Variable]
    variables: list[keras.Variable]
    metrics: list[keras.metrics.Metric]

    @property
    def tower_steps(self) -> TowerSteps:
        """The inner model's steps on N towers."""

    @property
    def devices(self) -> list[str]:
        """The N devices that run towers."""

    @property
    def num_towers(self) -> int:
        """N, the number of towers."""

    def train_step(self, data: Any) -> Any:
        """Runs one training step on N slices."""


def is_wrapped(model: Any) -> TypeGuard[Wrapped]:
    """Returns whether a model is a `DataParallelModel`."""
    return hasattr(type(model), "tower_steps")
