"""Make all workers begin `fit`, set learning rates and stop training together."""

import json
from collections.abc import Sequence
from typing import Any

import keras

from keras_dp.keras_internals import keras_models, keras_optimizers
from keras_dp.keras_internals.keras_optimizers import innermost_optimizers
from keras_dp.keras_internals.versions import callback_classes
from keras_dp.workers.group import WorkerGroup, share_random_state
from keras_dp.workers.synchronization import all_variables, synchronize
from keras_dp.wrapping.wrapper import listed

# These write files, or send data to a server.
_WRITERS = callback_classes(
    *("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
)


class WorkersCallback(keras.callbacks.Callback):
    """Begins training on all workers with the chief's variables and epoch, and ends it on all where one worker ends it.

    It is the last callback, so that the chief has restored its backup before all workers begin.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup):
        super().__init__()
        self._group = group

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the chief's variables and initial epoch to all workers."""
        self._build_optimizer()
        synchronize(self._group, all_variables(self.model.inner_model))
        (begin, *_) = self._exchange(keras_models.initial_epoch(self.model))
        keras_models.set_initial_epoch(self.model, begin)

    def _build_optimizer(self) -> None:
        """Makes the optimizer's variables on all workers if one has them, such as a chief that has restored a backup."""
        model = self.model.inner_model
        optimizer = getattr(model, "optimizer", None)
        is_built = optimizer is not None and bool(optimizer.built)
        if any(self._exchange(is_built)) and optimizer is not None and not is_built:
            optimizer.build(model.trainable_variables)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the chief's random state, with which Keras shuffles, to all workers."""
        share_random_state(self._group)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training on all workers if a callback of any worker ends it, and sets the chief's learning rates on all."""
        self.model.distribute_strategy.different_batches.report()
        optimizers = [
            optimizer
            for optimizer in innermost_optimizers(self.model.optimizer)
            if keras_optimizers.has_learning_rate_variable(optimizer)
        ]
        rates = [float(optimizer.learning_rate) for optimizer in optimizers]
        everywhere = self._exchange([bool(self.model.stop_training), rates])
        self.model.stop_training = any(stops for stops, _ in everywhere)
        for optimizer, own, first in zip(optimizers, rates, everywhere[0][1], strict=True):
            if own != first:
                optimizer.learning_rate = first

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that training makes progress."""
        self._group.note_progress()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that evaluation makes progress."""
        self._group.note_progress()

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that prediction makes progress."""
        self._group.note_progress()

    def _exchange(self, value: Any) -> list[Any]:
        with self._group.reporting_lost_workers():
            return [json.loads(message) for message in self._group.collectives.exchange(json.dumps(value).encode())]


def with_workers_callback(callbacks: Any, group: WorkerGroup, model: keras.Model) -> Any:
    """Appends `WorkersCallback` to the callbacks of a call, and removes those that write files, except on the chief."""
    together = WorkersCallback(group)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        together.set_model(model)
        kept = [callback for callback in callbacks.callbacks if not isinstance(callback, WorkersCallback)]
        callbacks.callbacks = [*_without_writers(kept, group), together]
        return callbacks
    return [*_without_writers(listed(callbacks), group), together]


def _without_writers(callbacks: Sequence[keras.callbacks.Callback], group: WorkerGroup) -> list[keras.callbacks.Callback]:
    return [callback for callback in callbacks if group.is_chief or not isinstance(callback, _WRITERS)]
