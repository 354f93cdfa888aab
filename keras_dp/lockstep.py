"""Lockstep: what keeps workers together that each run their own `fit`: the same start, the same variables, the same stop."""

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp import keras_seams
from keras_dp.keras_seams import innermost_optimizers
from keras_dp.workers import WorkerGroup, share_random_state
from keras_dp.wrapper import listed

# These write files, or send what they would write.
_WRITERS = (
    *(keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint),
    *(keras.callbacks.OrbaxCheckpoint, keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard),
)


class Lockstep(keras.callbacks.Callback):
    """Begins training on all workers where the first one begins it, and ends it where one of them ends it.

    It is the last callback, so that what the first worker has restored from a backup is what all begin with.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup):
        super().__init__()
        self._group = group

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Gives all workers the variables and the first epoch of the first worker."""
        synchronize(self._group, all_variables(self.model.inner_model))
        (begin, *_) = self._exchange(keras_seams.initial_epoch(self.model))
        keras_seams.set_initial_epoch(self.model, begin)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives all workers the random state of the first one, by which Keras shuffles."""
        share_random_state(self._group)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training on all workers, if a callback of one of them ends it; the first one's learning rate is that of all."""
        self.model.distribute_strategy.different_batches.report()
        optimizers = [
            optimizer
            for optimizer in innermost_optimizers(self.model.optimizer)
            if keras_seams.has_learning_rate_variable(optimizer)
        ]
        rates = [float(optimizer.learning_rate) for optimizer in optimizers]
        everywhere = self._exchange([bool(self.model.stop_training), rates])
        self.model.stop_training = any(stops for stops, _ in everywhere)
        for optimizer, own, first in zip(optimizers, rates, everywhere[0][1], strict=True):
            if own != first:
                optimizer.learning_rate = first

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Training gets on."""
        self._group.note_progress()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluation gets on."""
        self._group.note_progress()

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Prediction gets on."""
        self._group.note_progress()

    def _exchange(self, value: Any) -> list[Any]:
        with self._group.losses_named():
            return [json.loads(message) for message in self._group.collectives.exchange(json.dumps(value).encode())]


def in_lockstep(callbacks: Any, group: WorkerGroup, model: keras.Model) -> Any:
    """What `fit` and the like take for callbacks, without those that write where another worker writes, and with `Lockstep`."""
    lockstep = Lockstep(group)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        lockstep.set_model(model)
        kept = [callback for callback in callbacks.callbacks if not isinstance(callback, Lockstep)]
        callbacks.callbacks = [*_without_writers(kept, group), lockstep]
        return callbacks
    return [*_without_writers(listed(callbacks), group), lockstep]


def _without_writers(callbacks: Sequence[keras.callbacks.Callback], group: WorkerGroup) -> list[keras.callbacks.Callback]:
    return [callback for callback in callbacks if group.is_chief or not isinstance(callback, _WRITERS)]


def synchronize(group: WorkerGroup, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    """Gives all workers the first one's values of variables, unless their checksums say that they have them.

    Raises:
        ValueError: on all workers, if the variables of one are others.
        RuntimeError: if the values differ all the same.
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
    with group.losses_named():
        received = group.collectives.broadcast(b"".join(value.tobytes() for value in values))
    offset = 0
    for variable, value in zip(variables, values, strict=True):
        new = np.frombuffer(received, value.dtype, value.size, offset).reshape(value.shape)
        offset += value.nbytes
        if not group.is_chief:
            variable.assign(new)
    if not _same_everywhere(group, variables):
        raise RuntimeError(
            "The workers' variables still differ after the first worker's were sent to all: their network or memory garbles "
            "what it is given."
        )


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Those of a model, its optimizer, its metrics and the generators of its random numbers."""
    optimizer = model.optimizer.variables if getattr(model, "optimizer", None) is not None else []
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    variables = [*model.variables, *optimizer, *metrics, *keras_seams.seed_states(model)]
    return list({id(variable): variable for variable in variables}.values())


def _same_everywhere(group: WorkerGroup, variables: Sequence[tf.Variable]) -> bool:
    checksum = 0
    for variable in variables:
        checksum = zlib.crc32(variable.numpy().tobytes(), checksum)
    with group.losses_named():
        return len(set(group.collectives.exchange(checksum.to_bytes(4, "little")))) == 1


def described_model(model: keras.Model) -> dict[str, Any]:
    """What must be the same on all workers, by names for people."""
    layers = keras_seams.flatten_layers(model)
    facts = {f"layer {i}": _configuration(layer) for i, layer in enumerate(layers)}
    if not model.compiled:
        return facts
    optimizer = {} if model.optimizer is None else _configuration(model.optimizer)
    return facts | {"the optimizer": optimizer, "the loss": _written(model.loss)}


def described_data(value: Any) -> Any:
    """An argument of `fit` and the like, as far as it must be the same on all workers: a checksum of what arrays hold."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return described_data(tf.nest.flatten(value, expand_composites=True))
    if tf.is_tensor(value) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.hasobject:
            return f"an array of shape {list(array.shape)}"
        sample = np.ascontiguousarray(array.flat[:: max(1, array.size // _SAMPLED_ELEMENTS)])
        digest = hashlib.blake2b(sample.tobytes(), digest_size=4).hexdigest()
        return f"{array.dtype} of shape {list(array.shape)}, checksum {digest}"
    if isinstance(value, dict):
        return {str(key): described_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [described_data(item) for item in value]
    return type(value).__name__


_SAMPLED_ELEMENTS = 2**16


def _configuration(thing: Any) -> dict[str, Any]:
    """An object's class and configuration, without names, and without seeds and learning rates, which workers are given."""
    try:
        config = thing.get_config()
    except Exception:  # A user's own class, whose configuration cannot be written down, counts by its name.
        config = {}
    return {"class": type(thing).__name__, **_written(config)}


_LEFT_OUT = ("name", "seed", "layers", "input_layers", "output_layers", "nodes", "build_config")


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        # A rate that is a number is a variable, and given to all; the name of a type counts.
        left_out = _LEFT_OUT if isinstance(value.get("learning_rate"), dict) else (*_LEFT_OUT, "learning_rate")
        kept = {str(key): item for key, item in value.items() if key not in left_out}
        return {key: str(item) if key == "dtype" else _written(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, keras.losses.Loss):
        return _configuration(value)
    return getattr(value, "__name__", type(value).__name__)
