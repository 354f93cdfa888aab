"""Callbacks: the learning rate and the momentum of large batches, and how long towers wait for input."""

from keras_dp.batches.input_wait import InputWait
from keras_dp.large_batches.momentum_correction import MomentumCorrection
from keras_dp.large_batches.warmup import LearningRateWarmup

__all__ = ["InputWait", "LearningRateWarmup", "MomentumCorrection"]
