"""Broadcast the chief's values of variables to all workers."""

import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_dp.workers.group import WorkerGroup


def synchronize(group: WorkerGroup, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    """Broadcasts the chief's values of variables to all workers, unless checksums show that all have the same values.

    Raises:
        ValueError: on all workers, if the numbers, dtypes or shapes of their variables differ.
        RuntimeError: if the values still differ afterwards.
    """
    if group.count == 1:
        return
    variables = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    shapes = [f"{np.dtype(v.dtype.as_numpy_dtype).name}{list(v.shape)}" for v in variables]
    group.agree({"the number of variables of model and optimizer": len(shapes)})
    group.agree({f"the shape of variable {i}": shape for i, shape in enumerate(shapes)})
    if _same_everywhere(group, variables):
        return
    values = [variable.numpy() for variable in variables]
    with group.reporting_lost_workers():
        received = group.collectives.broadcast(b"".join(value.tobytes() for value in values))
    offset = 0
    for variable, value in zip(variables, values, strict=True):
        new = np.frombuffer(received, value.dtype, value.size, offset).reshape(value.shape)
        offset += value.nbytes
        if not group.is_chief:
            variable.assign(new)
    if not _same_everywhere(group, variables):
        raise RuntimeError(
            "The workers' variables still differ after the first worker's were sent to all: the network or a machine's memory "
            "corrupts data. Check the hardware."
        )


def refuse_different(group: WorkerGroup, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    """Raises a RuntimeError, on all workers, if their values of variables differ. It names the first variable that does."""
    native = [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
    group.agree({"the number of variables of model and optimizer": len(native)})
    if _same_everywhere(group, native):
        return
    own = b"".join(zlib.crc32(variable.numpy().tobytes()).to_bytes(4, "little") for variable in native)
    with group.reporting_lost_workers():
        everywhere = group.collectives.exchange(own)
    differs = [len({sums[4 * i : 4 * i + 4] for sums in everywhere}) > 1 for i in range(len(native))]
    path = getattr(variables[differs.index(True)], "path", native[differs.index(True)].name)
    raise RuntimeError(
        f"The workers' values of {path!r}, and of {sum(differs) - 1} other variables, differ at the end of an epoch: something "
        "has changed state on one worker alone while they trained, such as a callback that one worker alone runs between "
        "batches. Change state on all workers; or at the end of an epoch, after which all go on with the chief's state. The "
        "weights are this worker's own."
    )


def _same_everywhere(group: WorkerGroup, variables: Sequence[tf.Variable]) -> bool:
    checksum = 0
    for variable in variables:
        checksum = zlib.crc32(variable.numpy().tobytes(), checksum)
    with group.reporting_lost_workers():
        return len(set(group.collectives.exchange(checksum.to_bytes(4, "little")))) == 1
