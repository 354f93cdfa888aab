"""Number the devices that run TensorFlow's collectives together, and the collectives.

TensorFlow matches the parts of a collective by two keys, for the life of the process: one of the group of devices, and one of
the collective itself. It gives each device of a group a rank, the place of its tensor among those of all.
"""

import functools
import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# `tf.distribute` strategies number their groups from 1, and workers theirs from 1 and 1001.
_FIRST_GROUP = 2**30
_TIMES = 2**16  # of a number in a trial: NCCL moves long messages otherwise than short ones.
_SECONDS = 60.0  # The first collective of a group begins with NCCL's own start, which takes seconds.

# A module that is imported again begins at another place: a key stays with the shape that it was first used for.
_COLLECTIVES = itertools.count(random.SystemRandom().randrange(2**30))


def keys_of_collective(devices: Sequence[str]) -> list[int]:
    """Returns what TensorFlow knows a new collective by: the number of its devices, the key of their group, and its own key."""
    group = zlib.crc32(" ".join(sorted(devices)).encode()) % _FIRST_GROUP
    return [len(devices), _FIRST_GROUP + group, next(_COLLECTIVES)]


@functools.cache
def by_rank(devices: tuple[str, ...]) -> list[str]:
    """Returns the devices of a group in the order of their ranks, after a trial of both collectives.

    TensorFlow ranks GPUs by the links between them (collective_param_resolver_local.cc, OrderTaskDeviceMap), so that only a
    collective can tell: each device gives its number, and gets those of all. Then it gives each other one a number of its own.
    Between GPUs of a machine that is not set up for direct copies, NCCL may move wrong numbers without an error
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html, "PCI Access Control Services").

    Raises:
        tf.errors.OpError: if the devices cannot run collectives, or these move wrong numbers.
    """
    size = len(devices)
    gathered = _numbers_of(tf.raw_ops.CollectiveGatherV2, devices, [[number] for number in range(size)])
    if sorted(gathered[0]) != list(range(size)) or not np.array_equal(gathered, [gathered[0]] * size):
        raise _wrong("an all-gather", gathered)
    order = gathered[0].astype(int).tolist()
    # The number at the index of a rank goes to the device of this rank.
    exchanged = _numbers_of(tf.raw_ops.CollectiveAllToAllV2, devices, np.arange(size * size).reshape(size, size).tolist())
    if not np.array_equal(exchanged, [[size * sender + order.index(number) for sender in order] for number in range(size)]):
        raise _wrong("an all-to-all", exchanged)
    return [devices[number] for number in order]


def _numbers_of(collective: Any, devices: Sequence[str], given: Sequence[Sequence[int]]) -> Any:
    """Returns the numbers that each device gets if each gives some, each of them many times: nan where a number changes."""
    size, group, own = keys_of_collective(devices)

    def exchange() -> list[Any]:
        results = []
        for device, numbers in zip(devices, given, strict=True):
            with tf.device(device):
                keys = {"group_size": size, "group_key": group, "instance_key": own, "communication_hint": "nccl"}
                message = tf.repeat(tf.constant(numbers, tf.float32)[:, tf.newaxis], _TIMES, axis=1)
                results.append(collective(input=message, ordering_token=[], timeout_seconds=_SECONDS, **keys))
        return results

    # A `tf.function` would run one collective after the other, and each would wait for the others.
    with tf.init_scope():
        results = np.stack([result.numpy() for result in tf.compat.v1.wrap_function(exchange, [])()])
    return np.where((results == results[..., :1]).all(-1), results[..., 0], np.nan)


def _wrong(collective: str, numbers: Any) -> tf.errors.OpError:
    return tf.errors.DataLossError(None, None, f"{collective} of known numbers gave {numbers.tolist()}")
