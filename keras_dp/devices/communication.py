"""Decide whether the towers of one process exchange tensors by copies or by collectives."""

import dataclasses
import functools
import logging
import os
import platform
from collections.abc import Sequence

import tensorflow as tf

from keras_dp.choices import TowerCommunication
from keras_dp.devices.available import in_words
from keras_dp.keras_internals.tensorflow_runtime import registered_kernels
from keras_dp.partition.running.crossings import local_name
from keras_dp.partition.running.groups import by_rank

logger = logging.getLogger("keras_dp")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Holds what decides whether towers can exchange tensors by collectives.

    Attributes:
        devices: the names of the towers' devices.
        workers: the number of workers.
        system: the name of the operating system, as `platform.system` gives it.
        has_nccl: whether TensorFlow was built with NCCL.
        has_pieces: whether a GPU is split into several logical devices.
        grows_memory: whether TensorFlow takes the memory of GPUs bit by bit.
    """

    devices: Sequence[str]
    workers: int = 1
    system: str = "Linux"
    has_nccl: bool = True
    has_pieces: bool = False
    grows_memory: bool = False

    @classmethod
    def of(cls, devices: Sequence[str], workers: int) -> "Facts":
        """Asks the machine and TensorFlow."""
        gpus = tf.config.list_physical_devices("GPU")
        has_nccl = any(kernel.device_type == "GPU" for kernel in registered_kernels("NcclAllReduce"))
        has_pieces = any(len(tf.config.get_logical_device_configuration(gpu) or ()) > 1 for gpu in gpus)
        is_told_to_grow = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
        grows = is_told_to_grow or any(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
        return cls(tuple(devices), workers, platform.system(), has_nccl, has_pieces, grows)


def why_copies(facts: Facts) -> str | None:
    """Returns why towers cannot exchange tensors by collectives, in a sentence; None if nothing is known against it."""
    kinds = {device.partition(":")[0] for device in facts.devices}
    on_gpus = kinds == {"GPU"}
    reasons = {
        f"{facts.workers} workers train together, and collectives are for the towers of a single one.": facts.workers > 1,
        "Each device runs several towers in turns, and collectives are for one tower on each: leave out slices_per_device.": (
            len({*facts.devices}) < len(facts.devices)
        ),
        f"Collectives are for devices of one kind, and the towers run on {in_words(facts.devices)}.": len(kinds) > 1,
        "There is no NCCL for Windows.": on_gpus and facts.system == "Windows",
        "This TensorFlow was built without NCCL.": on_gpus and not facts.has_nccl,
        "A GPU is split into several logical devices, and NCCL wants a card for each tower.": on_gpus and facts.has_pieces,
        "GPUs may stop forever if their memory grows during a collective: leave out tf.config.experimental.set_memory_growth "
        "and the environment variable TF_FORCE_GPU_ALLOW_GROWTH.": on_gpus and facts.grows_memory,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_collectives(communication: TowerCommunication, devices: Sequence[str], workers: int) -> bool:
    """Returns whether towers exchange tensors by collectives: if that was asked for, and works. If not, a warning says why.

    Args:
        communication: as in `DataParallelModel`.
        devices: the names of the towers' devices.
        workers: the number of workers.
    """
    if communication != "nccl" or len({*devices}) == 1:
        return False
    reason = why_copies(Facts.of(devices, workers))
    if reason is None:
        try:
            by_rank(tuple(map(local_name, devices)))
        except tf.errors.OpError as error:
            reason = f"TensorFlow's collectives fail on {in_words(devices)}: {error.message.splitlines()[0]}"
    if reason is not None:
        _warn_once(f'Towers send each other copies, in place of communication="nccl". {reason}')
    return reason is None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
