"""Copy known numbers between devices: on some machines they change on their way."""

import functools
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.devices.available import in_words

_BYTES = 1 << 20

BROKEN = (
    "Direct copies between these GPUs are broken, often by the IOMMU or by ACS of PCIe: turn these off in the BIOS or on the "
    "kernel's command line, and train on one of the GPUs until then."
)


@functools.cache
def refuse_broken_copies(devices: tuple[str, ...]) -> None:
    """Copies random numbers both ways between all pairs of GPUs.

    Where a machine redirects direct copies between GPUs, they may end without an error, and leave other numbers behind:
    https://github.com/pytorch/pytorch/issues/84803, https://github.com/tensorflow/tensorflow/issues/57893.

    Args:
        devices: the names of devices. Those that are no GPUs are left out.

    Raises:
        RuntimeError: if numbers change on their way.
    """
    # Memory may still hold the numbers of the copy before: each direction has its own.
    random = np.random.default_rng(0)
    pairs = itertools.permutations(dict.fromkeys(device for device in devices if device.startswith("GPU")), 2)
    wrong = [pair for pair in pairs if not arrives(random.integers(0, 256, _BYTES, dtype=np.uint8), *pair)]
    if wrong:
        ways = ", ".join(f"{source} to {target}" for source, target in wrong)
        raise RuntimeError(f"Numbers change on their way from {ways}. {BROKEN} Received: {in_words([*dict.fromkeys(devices)])}")


def arrives(numbers: np.ndarray, source: str, target: str) -> bool:
    """Returns whether numbers stay the same in a copy from one device to another."""
    with tf.init_scope():
        return np.array_equal(numbers, copied(placed(numbers, source), target).numpy())


def placed(numbers: np.ndarray, device: str) -> Any:
    """Returns a tensor on a device."""
    with tf.device(device):
        return tf.identity(tf.constant(numbers))


def copied(tensor: Any, device: str) -> Any:
    """Returns a copy of a tensor on a device."""
    with tf.device(device):
        return tf.identity(tensor)
