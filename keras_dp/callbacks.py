"""Collect the public callbacks."""

from keras_dp.batches.input_wait import InputWait
from keras_dp.large_batches.momentum_correction import MomentumCorrection
from keras_dp.large_batches.warmup import LearningRateWarmup

__all__ = ["InputWait", "LearningRateWarmup", "MomentumCorrection"]
