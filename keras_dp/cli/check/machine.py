"""Look at the versions and the devices."""

import os
import shutil
import subprocess

import keras
import tensorflow as tf
from packaging.version import Version

from keras_dp import installation
from keras_dp.cli.check.findings import Finding
from keras_dp.cli.environment import environment
from keras_dp.devices import nvidia
from keras_dp.devices.available import available_devices
from keras_dp.devices.platforms import current_platform
from keras_dp.keras_internals import versions

_BUSY_MEGABYTES = 500
BLACKWELL = (10, 0)
NOT_BUILT_FOR = (
    "TensorFlow's packages up to 2.21 have no kernels for GPUs of the Blackwell kind, such as RTX 50: operations may fail or "
    "end the process, those that XLA compiles first. Try compile(..., jit_compile=False), or a container of NVIDIA's: see "
    "docs/install.md."
)


def versions_found() -> Finding:
    """Compares the versions with those that keras_dp is tested with."""
    facts = environment()
    seen = ", ".join(f"{name} {facts[name]}" for name in ("keras_dp", "keras", "tensorflow", "python"))
    pairs = ((keras.__version__, versions.KERAS), (tf.__version__, versions.TENSORFLOW))
    if any(Version(found).release >= untested for found, (_, untested) in pairs):
        return Finding("versions", "warn", seen, "keras_dp is not tested with versions as new as these: watch the next lines.")
    return Finding("versions", "pass", f"{seen}, on {current_platform().name}", data=facts)


def devices_found() -> Finding:
    """Compares the GPUs that TensorFlow sees with those of the driver."""
    facts = environment()
    gpus, in_machine = facts["gpus"], nvidia.count_gpus()
    hidden = nvidia.why_hidden() if not gpus else None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        seen = f"the driver has {in_machine} GPU(s), and TensorFlow, {_wanted()}, sees none"
        return Finding("devices", "fail", seen, hidden)
    if not gpus:
        seen = f"no GPU; {facts['processor']} with {facts['cores']} cores, split into {len(available_devices())} logical CPUs"
        here = current_platform()
        install = f"If there are GPUs: {installation.command('cuda')}." if here.has_cuda else ""
        advice = f"Training on logical CPUs shows whether results are right. {here.advice} {install}"
        return Finding("devices", "warn", seen, " ".join(advice.split()))
    seen = f"{len(gpus)} GPU(s): {', '.join(gpus)}"
    if len(gpus) < in_machine:
        advice = f"CUDA_VISIBLE_DEVICES={visible} hides the others." if visible else "Is another version of CUDA installed?"
        return Finding("devices", "warn", f"{seen}, of {in_machine} in the machine", advice)
    newest = max(map(_compute_capability, tf.config.list_physical_devices("GPU")), default=(0, 0))
    if newest >= BLACKWELL:
        return Finding("devices", "warn", f"{seen}, of compute capability {newest[0]}.{newest[1]}", NOT_BUILT_FOR)
    if gpus_differ():
        advice = "They differ, and each step waits for the slowest. rows= gives it fewer rows, and devices= leaves it out."
        return Finding("devices", "warn", seen, advice)
    return Finding("devices", "pass", f"{seen}; TensorFlow is {_wanted()}")


def gpus_differ() -> bool:
    """Returns whether there are GPUs of several kinds."""
    return len(set(environment()["gpus"])) > 1


def _compute_capability(gpu: tf.config.PhysicalDevice) -> tuple[int, int]:
    """Returns the version of a GPU's instructions, such as (9, 0); (0, 0) if it is not known."""
    return tuple(tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)))


def _wanted() -> str:
    """Says for which versions of CUDA and cuDNN TensorFlow was built."""
    built = tf.sysconfig.get_build_info()
    if not built.get("is_cuda_build"):
        return "built without CUDA"
    return f"built for CUDA {built.get('cuda_version')} and cuDNN {built.get('cudnn_version')}"


def memory_of_others() -> Finding | None:
    """Looks for other programs that use the GPUs; None without NVIDIA's driver."""
    if not tf.config.list_physical_devices("GPU") or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total,driver_version", "--format=csv,noheader,nounits"]
    asked = subprocess.run(query, capture_output=True, text=True, timeout=30)
    rows = [line.split(", ") for line in asked.stdout.splitlines() if line.count(", ") == len(query[1].split(",")) - 1]
    if asked.returncode or not rows:
        return Finding("memory", "warn", f"nvidia-smi failed: {' '.join((asked.stdout + asked.stderr).split())[:200]}")
    used = {index: (int(megabytes), int(total)) for index, megabytes, total, _ in rows if megabytes.isdecimal()}
    seen = ", ".join(f"GPU {index}: {megabytes:,} of {total:,} MB used" for index, (megabytes, total) in used.items())
    if any(megabytes > _BUSY_MEGABYTES for megabytes, _ in used.values()):
        return Finding("memory", "warn", seen, "Other programs use these GPUs: nvidia-smi lists them.")
    return Finding("memory", "pass", f"{seen}; driver {rows[0][3]}")
