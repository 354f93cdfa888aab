"""Devices: which there are, which run towers, and where variables live."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def use_logical_cpus(count: int) -> None:
    """Splits the host's CPU into `count` logical devices, "CPU:0" to "CPU:<count - 1>".

    For trying things out and for tests on machines without GPUs: the logical devices share the CPU's cores. Call it before
    TensorFlow does anything else.

    Args:
        count: how many logical CPUs there will be, at least 1.

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
    """The logical devices that can run towers, as "GPU:0" or "CPU:0"."""
    return [short_name(d.name) for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]


def tower_devices(devices: int | Sequence[str] | None) -> list[str]:
    """The devices that run the towers.

    Args:
        devices: None for all GPUs, or all logical CPUs if there is no GPU; an integer n for the first n of those; or names.

    Raises:
        ValueError: if there are no such devices, or one is named twice.
    """
    default = [name for name in available_devices() if name.startswith("GPU")] or available_devices()
    if devices is None:
        return default
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ValueError(f"A DataParallelModel needs at least one tower. Received: devices={devices}")
        if devices > len(default):
            raise ValueError(
                f"There are only {len(default)} devices to run towers on: {', '.join(default)}. Received: devices={devices}. "
                "Use fewer, or split the CPU with keras_dp.use_logical_cpus(n) at the top of the script."
            )
        return default[:devices]
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not all(isinstance(d, str) for d in devices):
        raise ValueError(f'`devices` must be None, an integer or a list of names such as "GPU:0". Received: devices={devices!r}')
    if not devices:
        raise ValueError(f"A DataParallelModel needs at least one tower. Received: devices={devices!r}")
    names = [existing_device(name) for name in devices]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Each tower needs a device of its own. Received {', '.join(repeated)} more than once: {devices!r}")
    return names


def existing_device(name: str) -> str:
    """The short form of a device's name, if there is such a device.

    Raises:
        ValueError: if there is none.
    """
    short = short_name(name)
    if short not in available_devices():
        raise ValueError(f"There is no device {name!r}. The devices are: {', '.join(available_devices())}.")
    return short


def short_name(device: str) -> str:
    """ "GPU:0" for "/job:localhost/replica:0/task:0/device:GPU:0", "gpu:0" and the like."""
    return device.split("device:")[-1].lstrip("/").upper()


def home(variable: Any) -> str:
    """The device on which a `keras.Variable` or a `tf.Variable` lives."""
    return short_name(native(variable).device)


def native(variable: Any) -> tf.Variable:
    """The `tf.Variable` behind a `keras.Variable`; a `tf.Variable` itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value
