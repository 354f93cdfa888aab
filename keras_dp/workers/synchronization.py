"""Broadcast the chief's values of variables to all workers."""

import zlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_dp.keras_internals import keras_models
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


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Lists the variables of a model, its optimizer, its metrics and its random number generators."""
    optimizer = model.optimizer.variables if getattr(model, "optimizer", None) is not None else []
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    variables = [*model.variables, *optimizer, *metrics, *keras_models.seed_states(model)]
    return list({id(variable): variable for variable in variables}.values())


def _same_everywhere(group: WorkerGroup, variables: Sequence[tf.Variable]) -> bool:
    checksum = 0
    for variable in variables:
        checksum = zlib.crc32(variable.numpy().tobytes(), checksum)
    with group.reporting_lost_workers():
        return len(set(group.collectives.exchange(checksum.to_bytes(4, "little")))) == 1
