"""Collect the public optimizers."""

from keras_dp.large_batches.lars import LARS
from keras_dp.large_batches.weight_decay import exclude_from_weight_decay

__all__ = ["LARS", "exclude_from_weight_decay"]
