"""keras_dp: data-parallel training for Keras 3 on TensorFlow, with one device's result."""

import keras

if keras.config.backend() != "tensorflow":
    raise ImportError(
        "keras_dp needs Keras on TensorFlow. Set KERAS_BACKEND=tensorflow in the environment before Keras is imported. "
        f"Received: backend {keras.config.backend()!r}"
    )

from keras_dp import callbacks, optimizers, schedules
from keras_dp.communication import communication_report
from keras_dp.model import DataParallelModel
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.placement import use_logical_cpus
from keras_dp.recalibration import recalibrate_batch_norm
from keras_dp.sync_batch_norm import SyncBatchNormalization, convert_batch_norm
from keras_dp.towers import cross_tower_sum
from keras_dp.workers import WorkerGroup, WorkerLostError, connect_workers

__all__ = [
    "DataParallelModel",
    "DataParallelOptimizer",
    "SyncBatchNormalization",
    "WorkerGroup",
    "WorkerLostError",
    "callbacks",
    "communication_report",
    "connect_workers",
    "convert_batch_norm",
    "cross_tower_sum",
    "optimizers",
    "recalibrate_batch_norm",
    "schedules",
    "use_logical_cpus",
]
