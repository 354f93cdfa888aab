"""Find NVIDIA's GPUs by the files of their driver, even where TensorFlow sees none."""

import os
from pathlib import Path

from keras_dp import installation

DRIVER = Path("/proc/driver/nvidia/gpus")
DRIVER_OF_WINDOWS = Path("/usr/lib/wsl/lib/libcuda.so.1")  # in the Windows Subsystem for Linux


def count_gpus() -> int:
    """Counts the GPUs; 1 in the Windows Subsystem for Linux, where only Windows knows their number."""
    return len(list(DRIVER.glob("*"))) or int(DRIVER_OF_WINDOWS.exists())


def why_hidden() -> str | None:
    """Says why TensorFlow sees none of this machine's GPUs, and what to do; None if there are none, or the user hides them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count_gpus() or (visible is not None and visible.strip().startswith("-")):
        return None
    if visible is not None and not visible.strip():
        return "CUDA_VISIBLE_DEVICES is empty, which hides them: unset it, or set it to -1 to hide them on purpose."
    return f"TensorFlow lacks the libraries of CUDA, or they do not fit the driver: {installation.command('cuda')}"
