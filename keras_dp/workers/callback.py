"""Make all workers begin `fit`, change state and stop training together."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.keras_optimizers import optimized_variables, optimizers_of
from keras_dp.keras_internals.versions import callback_classes
from keras_dp.workers.group import WorkerGroup, share_random_state
from keras_dp.workers.synchronization import refuse_different, synchronize
from keras_dp.wrapping.own_training import listed

# These write files, or send data to a server.
_WRITERS = callback_classes(
    *("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint", "RemoteMonitor", "TensorBoard")
)


State = Callable[[], Sequence[keras.Variable | tf.Variable]]


class SameStateCallback(keras.callbacks.Callback):
    """Checks, when an epoch ends, that all workers have trained the same model: nothing must have changed state on one alone.

    It is the first callback, so that those of the user's have not changed anything at the end of the epoch.

    Args:
        group: the workers.
        state: returns all variables that training uses.
    """

    def __init__(self, group: WorkerGroup, state: State):
        super().__init__()
        self._group, self._state = group, state

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises an error if the workers' batches or variables differ."""
        self.model.distribute_strategy.different_batches.report()
        refuse_different(self._group, self._state())


class WorkersCallback(keras.callbacks.Callback):
    """Gives all workers the chief's state and epoch as training begins, and after the callbacks of each epoch.

    It is the last callback, so that the chief has restored its backup before all workers begin. Training ends on all workers
    where one worker ends it.

    Args:
        group: the workers.
        model: the model inside the wrapper.
        state: returns all variables that training uses.
    """

    def __init__(self, group: WorkerGroup, model: keras.Model, state: State):
        super().__init__()
        self._group, self._inside, self._state = group, model, state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the chief's variables and initial epoch to all workers."""
        self._build_optimizers()
        synchronize(self._group, self._state())
        (begin, *_) = self._exchange(keras_models.initial_epoch(self.model))
        keras_models.set_initial_epoch(self.model, begin)

    def _build_optimizers(self) -> None:
        """Makes the variables of optimizers on all workers if one has them, such as a chief that has restored a backup."""
        optimizers, weights = optimizers_of(self._inside), self._inside.trainable_variables
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        own = [optimized_variables(optimizer) if optimizer.built else None for optimizer in optimizers]
        built = [None if kept is None else [numbers.get(id(variable)) for variable in kept] for kept in own]
        everywhere = self._exchange(built)
        self._group.agree({"the number of optimizers": len(built)})
        for optimizer, of_workers in zip(optimizers, zip(*everywhere, strict=True), strict=True):
            known = next((kept for kept in of_workers if kept is not None and None not in kept), None)
            if known is not None and not optimizer.built:
                optimizer.build([weights[number] for number in known])

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcasts the chief's random state, with which Keras shuffles, to all workers."""
        share_random_state(self._group)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends training on all workers if a callback of any worker ends it, and gives all the chief's state."""
        self.model.stop_training = any(self._exchange(bool(self.model.stop_training)))
        synchronize(self._group, self._state())

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


def with_workers_callbacks(callbacks: Any, group: WorkerGroup, wrapper: keras.Model, model: keras.Model, state: State) -> Any:
    """Puts the workers' own callbacks around those of a call, and removes those that write files, except on the chief.

    Args:
        callbacks: the argument of the call.
        group: the workers.
        wrapper: the model that is called.
        model: the model inside it.
        state: returns all variables that training uses.
    """
    first, last = SameStateCallback(group, state), WorkersCallback(group, model, state)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        first.set_model(wrapper)
        last.set_model(wrapper)
        kept = [callback for callback in callbacks.callbacks if not isinstance(callback, SameStateCallback | WorkersCallback)]
        callbacks.callbacks = [first, *_without_writers(kept, group), last]
        return callbacks
    return [first, *_without_writers(listed(callbacks), group), last]


def _without_writers(callbacks: Sequence[keras.callbacks.Callback], group: WorkerGroup) -> list[keras.callbacks.Callback]:
    return [callback for callback in callbacks if group.is_chief or not isinstance(callback, _WRITERS)]
