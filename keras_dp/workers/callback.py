"""Keep the workers' calls of `fit` together: the same start, rates and stop."""

import json
from collections.abc import Sequence
from typing import Any

import keras

from keras_dp.keras_internals import keras_models, keras_optimizers
from keras_dp.keras_internals.keras_optimizers import innermost_optimizers
from keras_dp.workers.group import WorkerGroup, share_random_state
from keras_dp.workers.synchronization import all_variables, synchronize
from keras_dp.wrapping.wrapper import listed

# These write files, or send what they would write.
_WRITERS = (
    *(keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint),
    *(keras.callbacks.OrbaxCheckpoint, keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard),
)


class WorkersCallback(keras.callbacks.Callback):
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
        (begin, *_) = self._exchange(keras_models.initial_epoch(self.model))
        keras_models.set_initial_epoch(self.model, begin)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives all workers the random state of the first one, by which Keras shuffles."""
        share_random_state(self._group)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training on all workers, if a callback of one of them ends it; the first one's learning rate is that of all."""
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
        """Training gets on."""
        self._group.note_progress()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluation gets on."""
        self._group.note_progress()

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Prediction gets on."""
        self._group.note_progress()

    def _exchange(self, value: Any) -> list[Any]:
        with self._group.reporting_lost_workers():
            return [json.loads(message) for message in self._group.collectives.exchange(json.dumps(value).encode())]


def with_workers_callback(callbacks: Any, group: WorkerGroup, model: keras.Model) -> Any:
    """Returns callbacks for `fit` and the like: with `WorkersCallback`, without those that write where another worker does."""
    together = WorkersCallback(group)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        together.set_model(model)
        kept = [callback for callback in callbacks.callbacks if not isinstance(callback, WorkersCallback)]
        callbacks.callbacks = [*_without_writers(kept, group), together]
        return callbacks
    return [*_without_writers(listed(callbacks), group), together]


def _without_writers(callbacks: Sequence[keras.callbacks.Callback], group: WorkerGroup) -> list[keras.callbacks.Callback]:
    return [callback for callback in callbacks if group.is_chief or not isinstance(callback, _WRITERS)]
