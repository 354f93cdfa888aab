"""JoinedModel: the calls that a user makes on a model, fit and the like, which all workers make together."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams
from keras_dp.batches import as_tensor
from keras_dp.callbacks import InputWait
from keras_dp.feeding import HOST, NO_BATCHES, SliceFeed, empty_prediction_refused
from keras_dp.lockstep import all_variables, described_data, described_model, in_lockstep, synchronize
from keras_dp.shards import with_empty_batches
from keras_dp.workers import current_workers, share_random_state
from keras_dp.wrapper import ModelWrapper, listed


class JoinedModel(ModelWrapper):
    """A `ModelWrapper` that is trained by all workers, each of which feeds its own towers.

    Args:
        inner_model: a `keras.Model` with Keras's own training steps.

    Raises:
        ValueError: if it is not.
    """

    _feed: SliceFeed

    def __init__(self, inner_model: keras.Model):
        super().__init__(inner_model)
        self._workers = current_workers()
        self._predicts_shard = False
        self._is_synchronized = False

    def _facts(self) -> dict[str, Any]:
        """What must be the same on all workers, beside the model, its data and the call's arguments; of JSON's types."""
        raise NotImplementedError

    def _follow_inner_model(self) -> None:
        """Sees to what has become of the inner model since the last call."""
        raise NotImplementedError

    def _is_eager(self) -> bool:
        """Whether steps run on one device, eagerly."""
        raise NotImplementedError

    def _prepare(self, batch: Any) -> None:
        """Creates all variables, from a batch or its type."""
        raise NotImplementedError

    def fit(self, *args: Any, sharded: bool = False, **kwargs: Any) -> keras.callbacks.History:
        """Trains on N towers of each worker; see `keras.Model.fit`.

        Args:
            *args: those of `keras.Model.fit`.
            sharded: whether the datasets, of training and of validation, are those of this worker alone, which the script has
                divided among the workers: their batches together are the global batches.
            **kwargs: those of `keras.Model.fit`.

        Raises:
            ValueError: if there was nothing to train on, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        with self._call(keras.Model.fit, sharded, *args, **kwargs) as call:
            callbacks = listed(call.arguments.get("callbacks"))
            if self._feed.measure_wait(any(isinstance(callback, InputWait) for callback in callbacks)):
                self.train_function = self.test_function = None
            history = super().fit(*call.args[1:], **call.kwargs)
        # A generator that runs dry between epochs ends training, as in Keras; one that never gave a batch is a mistake.
        if history.epoch and not any(history.history.get("loss", ())):
            self._refuse_no_batches("fit")
        return history

    def evaluate(self, *args: Any, sharded: bool = False, **kwargs: Any) -> Any:
        """Evaluates on N towers of each worker; see `keras.Model.evaluate`, and for `sharded`, `fit`.

        Raises:
            ValueError: if there was nothing to evaluate, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        with self._call(keras.Model.evaluate, sharded, *args, **kwargs) as call:
            results = super().evaluate(*call.args[1:], **call.kwargs)
        self._refuse_no_batches("evaluate")
        return results

    def predict(self, *args: Any, sharded: bool = False, rows: str = "all", **kwargs: Any) -> Any:
        """Predicts on N towers of each worker, in the order of the rows; see `keras.Model.predict`, and for `sharded`, `fit`.

        Args:
            *args: those of `keras.Model.predict`.
            sharded: as in `fit`.
            rows: "all" gives every worker the predictions for all rows; "shard" those for its own rows of each batch, which
                are not sent anywhere.
            **kwargs: those of `keras.Model.predict`.

        Raises:
            ValueError: if there was nothing to predict, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        refuse_unknown("rows", rows, ("all", "shard"))
        self._predict_shard(rows == "shard")
        try:
            with self._call(keras.Model.predict, sharded, *args, **kwargs) as call, empty_prediction_refused("predict"):
                return super().predict(*call.args[1:], **call.kwargs)
        finally:
            self._predict_shard(False)

    def _predict_shard(self, wanted: bool) -> None:
        if self._predicts_shard != wanted:
            self._predicts_shard = wanted
            self.predict_function = None

    @contextlib.contextmanager
    def _call(self, method: Callable[..., Any], sharded: bool, *args: Any, **kwargs: Any) -> Iterator[inspect.BoundArguments]:
        """A call of `fit`, `evaluate` or `predict`, with the arguments that it has for this worker."""
        self._follow_inner_model()
        call = inspect.signature(method).bind(self, *args, **kwargs)
        self._show_inner_model(call.arguments.get("callbacks"))
        # fit() evaluates data that it has fed already, with callbacks that it has been given.
        is_within_fit = call.arguments.get("kwargs", {}).get("_use_cached_eval_dataset", False)
        if self._workers.count > 1 and not is_within_fit:
            self._join_workers(method.__name__, call, sharded)
        if sharded:
            for name in ("x", "validation_data"):
                if call.arguments.get(name) is not None:
                    call.arguments[name] = with_empty_batches(call.arguments[name], self._workers, self.steps_per_execution)
        before, self._feed.takes_shards = self._feed.takes_shards, sharded
        try:
            with self._workers.losses_named():
                yield call
        finally:
            self._feed.takes_shards = before
        if self._feed.different_batches is not None:
            self._feed.different_batches.report()

    def _join_workers(self, method: str, call: inspect.BoundArguments, sharded: bool) -> None:
        """Sees to it that all workers make the same call, and to what this one does differently from the first."""
        arguments = {name: value for name, value in call.arguments.items() if name not in ("self", "verbose", "callbacks")}
        facts = {"the method called": method, "sharded": sharded, **self._facts()}
        facts |= described_model(self.inner_model) | {name: described_data(value) for name, value in arguments.items()}
        self._workers.agree(facts)
        share_random_state(self._workers)
        # When training begins, the variables are those that the first worker has restored from a backup.
        self._is_synchronized = method == "fit"
        call.arguments["callbacks"] = in_lockstep(call.arguments.get("callbacks"), self._workers, self)
        if not self._workers.is_chief:
            call.arguments.setdefault("verbose", 0)

    def _synchronize_workers(self) -> None:
        """Gives all workers the first one's variables, once after they were created, and in each call."""
        if self._workers.count > 1 and not self._is_synchronized:
            self._is_synchronized = True
            synchronize(self._workers, all_variables(self.inner_model))

    def _refuse_no_batches(self, method: str) -> None:
        if not keras.ops.any(keras_seams.loss_tracker(self.inner_model).count):
            raise ValueError(NO_BATCHES.format(method))

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of training on one global batch; see `keras.Model.train_on_batch`."""
        with self._workers.losses_named():
            return super().train_on_batch(*self._host_batch(x, y, sample_weight), *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """One step of evaluation on one global batch; see `keras.Model.test_on_batch`."""
        with self._workers.losses_named():
            return super().test_on_batch(*self._host_batch(x, y, sample_weight), *args, **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """The outputs for one global batch; see `keras.Model.predict_on_batch`."""
        with self._workers.losses_named():
            return super().predict_on_batch(*self._host_batch(x))

    def _host_batch(self, *batch: Any) -> tuple[Any, ...]:
        """A batch of arrays as tensors on the host, where it is cut into slices."""
        self._follow_inner_model()
        with tf.device(HOST):
            batch = keras.tree.map_structure(as_tensor, batch)
        if not self._is_eager():
            self._prepare(batch)
        return batch

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model, see `keras.Model.save`; of several workers, the first one does."""
        if self._workers.is_chief:
            self.inner_model.save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model's weights, see `keras.Model.save_weights`; of several workers, the first one does."""
        if self._workers.is_chief:
            self.inner_model.save_weights(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the inner model, see `keras.Model.export`; of several workers, the first one does."""
        if self._workers.is_chief:
            self.inner_model.export(*args, **kwargs)


def refuse_unknown(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises a ValueError for an argument that is none of those known."""
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}. Received: {name}={value!r}")
