"""Collect the public learning-rate schedules."""

from keras_dp.large_batches.warmup import WarmupThen

__all__ = ["WarmupThen"]
