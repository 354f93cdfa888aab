"""Import the public names, and refuse Keras on another backend than TensorFlow."""

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

from keras_dp import callbacks as callbacks
from keras_dp import optimizers as optimizers
from keras_dp import schedules as schedules
from keras_dp.batch_normalization.synchronized import SyncBatchNormalization as SyncBatchNormalization
from keras_dp.batch_normalization.synchronized import convert_batch_norm as convert_batch_norm
from keras_dp.devices.available import use_logical_cpus as use_logical_cpus
from keras_dp.model import DataParallelModel as DataParallelModel
from keras_dp.optimizer import DataParallelOptimizer as DataParallelOptimizer
from keras_dp.recalibration import recalibrate_batch_norm as recalibrate_batch_norm
from keras_dp.reports.communication import communication_report as communication_report
from keras_dp.reports.explain import explain as explain
from keras_dp.reports.find_slices import find_slices as find_slices
from keras_dp.reports.reporting import report as report
from keras_dp.reports.step_check import check_step as check_step
from keras_dp.workers.group import WorkerGroup as WorkerGroup
from keras_dp.workers.group import WorkerLostError as WorkerLostError
from keras_dp.workers.group import connect_workers as connect_workers
