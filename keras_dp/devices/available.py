"""Find the devices that can run towers, and refuse others."""

import functools
import logging
import numbers
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dp import installation
from keras_dp.choices import question
from keras_dp.devices import nvidia

logger = logging.getLogger("keras_dp")


SHARDED = "sharded"


def use_logical_cpus(count: int) -> None:
    """Splits the host's CPU into `count` logical devices, "CPU:0" to "CPU:<count - 1>".

    Use it for experiments and tests on machines without GPUs. The logical devices share the CPU's cores. Call it before
    TensorFlow does anything else.

    >>> import keras, keras_dp
    >>> keras_dp.use_logical_cpus(4)
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> keras_dp.DataParallelModel(model).devices
    ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']

    Args:
        count: the number of logical CPUs, at least 1.

    Raises:
        ValueError: if `count` is not a positive integer.
        RuntimeError: if TensorFlow has already started with another number of logical CPUs.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"use_logical_cpus() needs a positive integer. Received: count={count!r}")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing != count:
            raise RuntimeError(
                "use_logical_cpus() must be called before TensorFlow does anything else, at the top of the script. "
                f"Received: count={count}, while TensorFlow has already started with {existing} logical CPU(s)."
            ) from error


def available_devices() -> list[str]:
    """Lists the logical devices that can run towers, such as "GPU:0" or "CPU:0"."""
    return [short_name(d.name) for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]


def tower_devices(devices: int | Sequence[str] | None) -> list[str]:
    """Returns the devices that run the towers.

    Args:
        devices: None for all GPUs, or all logical CPUs if there is no GPU; an integer n for the first n of them; or names.

    Raises:
        ValueError: if a device does not exist, or is named twice.
    """
    if devices is None or (isinstance(devices, numbers.Integral) and not isinstance(devices, bool)):
        return _first_devices(devices if devices is None else int(devices))
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not all(isinstance(d, str) for d in devices):
        hint = _names_of_numbers(devices)
        raise ValueError(
            f'`devices` must be None, an integer or a list of names such as "GPU:0".{hint} Received: devices={devices!r}'
        )
    if not devices:
        raise ValueError(f"A DataParallelModel needs at least one tower. Received: devices={devices!r}")
    names = [existing_device(name) for name in devices]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Each tower needs a device of its own. Received {', '.join(repeated)} more than once: {devices!r}")
    return names


def _first_devices(count: int | None) -> list[str]:
    """Returns the first GPUs, or logical CPUs if there is no GPU; all if `count` is None."""
    if count is not None and count < 1:
        raise ValueError(f"A DataParallelModel needs at least one tower. Received: devices={count}")
    cpus = [name for name in available_devices() if name.startswith("CPU")]
    gpus = [name for name in available_devices() if name.startswith("GPU")]
    if not gpus:
        _warn_of_hidden_gpus()
    if count is not None and count > len(gpus or cpus):
        if gpus:
            seen = f"TensorFlow sees {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, {in_words(gpus)}."
            raise ValueError(f"{seen} Received: devices={count}. Give a smaller number, or None for all GPUs.")
        raise ValueError(
            "TensorFlow sees no GPU. On a machine with GPUs, install the CUDA libraries: "
            f"{installation.command('cuda')}. To try "
            f"{count} towers without GPUs, split the CPU: call keras_dp.use_logical_cpus({count}) at the top of the script. "
            f"Received: devices={count}, and the CPU as {in_words(cpus)}."
        )
    return (gpus or cpus)[:count]


def _names_of_numbers(devices: Any) -> str:
    """Returns a question that suggests names for a list of numbers; empty if it is none."""
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not is_list or not devices or not all(isinstance(number, int) for number in devices):
        return ""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f" Did you mean devices={[f'{kind}:{number}' for number in devices]}?"


def _warn_of_hidden_gpus() -> None:
    reason = nvidia.why_hidden() if not tf.config.list_physical_devices("GPU") else None
    if reason is not None:
        _warn_once(f"This machine has GPUs, and TensorFlow sees none of them: the towers run on the CPU. {reason}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def in_words(devices: Sequence[str]) -> str:
    """Joins the names of devices in words.

    >>> in_words(["GPU:0", "GPU:1"]), in_words(["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
    ('GPU:0 and GPU:1', 'GPU:0 to GPU:3')
    """
    first, *others = devices
    kind, _, number = first.partition(":")
    if len(others) > 2 and others == [f"{kind}:{int(number) + i}" for i in range(1, len(devices))]:
        return f"{first} to {others[-1]}"
    return " and ".join(filter(None, [", ".join(devices[:-1]), devices[-1]]))


def are_gpus(devices: Sequence[str]) -> bool:
    """Returns whether all devices are GPUs.

    >>> are_gpus(["GPU:0", "GPU:1"]), are_gpus(["GPU:0", "CPU:0"])
    (True, False)
    """
    return all(device.startswith("GPU") for device in devices)


def parameter_device_name(name: str) -> str:
    """Returns the short name of a device, or "sharded".

    Raises:
        ValueError: if it is neither.
    """
    if name == SHARDED:
        return name
    try:
        return existing_device(name)
    except ValueError as error:
        raise ValueError(f"{error} {SHARDED!r} is possible, too.{question(name, [SHARDED])}") from None


def existing_device(name: str) -> str:
    """Returns the short form of a device's name.

    Raises:
        ValueError: if there is no such device.
    """
    short = short_name(name)
    devices = available_devices()
    if short not in devices:
        no_gpu = short.startswith("GPU") and not any(device.startswith("GPU") for device in devices)
        hint = f" TensorFlow sees no GPU; on a machine with GPUs, {installation.command('cuda')}." if no_gpu else ""
        raise ValueError(f"There is no device {name!r}. The devices are: {', '.join(devices)}.{hint}")
    return short


def short_name(device: str) -> str:
    """Returns the form "GPU:0" of "/job:localhost/replica:0/task:0/device:GPU:0", "gpu:0" and the like.

    "/job:worker/replica:0/task:0", on which TensorFlow puts Python functions, is that worker's host: "CPU:0".
    """
    if re.search(r"/task:\d+$", device):
        return "CPU:0"
    return device.split("device:")[-1].lstrip("/").upper()
