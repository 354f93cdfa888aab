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

import tensorflow as tf

# `tf.distribute` strategies number their groups from 1, and workers theirs from 1 and 1001.
_FIRST_GROUP = 2**30
_SECONDS = 60.0  # The first collective of a group begins with NCCL's own start, which takes seconds.

# A module that is imported again begins at another place: a key stays with the shape that it was first used for.
_COLLECTIVES = itertools.count(random.SystemRandom().randrange(2**30))


def keys_of_collective(devices: Sequence[str]) -> list[int]:
    """Returns what TensorFlow knows a new collective by: the number of its devices, the key of their group, and its own key."""
    group = zlib.crc32(" ".join(sorted(devices)).encode()) % _FIRST_GROUP
    return [len(devices), _FIRST_GROUP + group, next(_COLLECTIVES)]


@functools.cache
def by_rank(devices: tuple[str, ...]) -> list[str]:
    """Returns the devices of a group in the order of their ranks.

    TensorFlow ranks GPUs by the links between them (collective_param_resolver_local.cc, OrderTaskDeviceMap), so that only a
    collective can tell: each device gives its number, and gets those of all.

    Raises:
        tf.errors.OpError: if the devices cannot run collectives.
    """
    size, group, own = keys_of_collective(devices)

    def numbers() -> list[Any]:
        gathered = []
        for number, device in enumerate(devices):
            with tf.device(device):
                keys = {"group_size": size, "group_key": group, "instance_key": own, "communication_hint": "nccl"}
                given = tf.constant([number], tf.float32)
                gathered.append(tf.raw_ops.CollectiveGatherV2(input=given, ordering_token=[], timeout_seconds=_SECONDS, **keys))
        return gathered

    # A `tf.function` would run one collective after the other, and each would wait for the others.
    with tf.init_scope():
        ranked, *_ = tf.compat.v1.wrap_function(numbers, [])()
        return [devices[int(number)] for number in ranked.numpy()]
