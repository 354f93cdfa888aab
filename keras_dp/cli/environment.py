"""Describe the machine and the versions of a measurement."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_dp.version import __version__


def environment() -> dict[str, Any]:
    """Returns the processor, its cores, the GPUs and the versions, by name."""
    gpus = tf.config.list_physical_devices("GPU")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus],
        "python": platform.python_version(),
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "keras_dp": __version__,
    }


def _processor() -> str:
    # On Linux, the standard library only knows the architecture.
    information = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", information.read_text()) if information.exists() else None
    return model[1] if model else platform.processor() or platform.machine()
