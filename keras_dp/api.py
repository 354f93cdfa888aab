"""List the public names, and refuse Keras on another backend than TensorFlow."""

import os

WRONG_BACKEND = (
    "keras_dp needs Keras on TensorFlow. Set KERAS_BACKEND=tensorflow in the environment, or the backend in "
    "~/.keras/keras.json, before Keras is imported. Received: backend {}"
)

try:
    import keras
except ModuleNotFoundError as error:
    if error.name in ("keras", "tensorflow"):
        raise
    raise ImportError(
        f"{WRONG_BACKEND.format(repr(os.environ.get('KERAS_BACKEND')))}, which needs a package that is missing: {error.name}"
    ) from error

if keras.config.backend() != "tensorflow":
    raise ImportError(WRONG_BACKEND.format(repr(keras.config.backend())))

from keras_dp.keras_internals import versions

versions.refuse_old_versions()

from keras_dp import callbacks, console, optimizers, schedules
from keras_dp.batch_normalization.synchronized import SyncBatchNormalization, convert_batch_norm
from keras_dp.devices.available import use_logical_cpus
from keras_dp.model import DataParallelModel
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.recalibration import recalibrate_batch_norm
from keras_dp.reports.communication import communication_report
from keras_dp.reports.step_check import check_step
from keras_dp.workers.group import WorkerGroup, WorkerLostError, connect_workers

__all__ = [
    "DataParallelModel",
    "DataParallelOptimizer",
    "SyncBatchNormalization",
    "WorkerGroup",
    "WorkerLostError",
    "callbacks",
    "check_step",
    "communication_report",
    "connect_workers",
    "convert_batch_norm",
    "optimizers",
    "recalibrate_batch_norm",
    "schedules",
    "use_logical_cpus",
]

console.show_messages()
