"""Learning-rate schedules for large batches: linear scaling, reached by gradual warm-up."""

from keras_dp.large_batches.warmup import WarmupThen

__all__ = ["WarmupThen"]
