"""JoinedModel: the calls that a user makes on a model, fit and the like, which all workers make together."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices, keras_seams
from keras_dp.any_rows import AnyRows, StepFunction
from keras_dp.batches import as_tensor, refuse_other_rows
from keras_dp.callbacks import InputWait
from keras_dp.choices import refuse_unknown
from keras_dp.feeding import HOST, NO_BATCHES, SliceFeed, empty_prediction_refused
from keras_dp.lockstep import all_variables, described_data, described_model, in_lockstep, synchronize
from keras_dp.shards import with_empty_batches
from keras_dp.workers import current_workers, share_random_state
from keras_dp.wrapper import ModelWrapper, has_own_step, listed, refuse_strategy

_STEPS = {"fit": "train", "evaluate": "test", "predict": "predict"}


class JoinedModel(ModelWrapper):
    """A `ModelWrapper` that is trained by all workers, each of which feeds its own towers.

    Args:
        inner_model: a `keras.Model` with Keras's own training steps.

    Raises:
        ValueError: if it is not.
    """

    _feed: SliceFeed
    train_function: Any
    test_function: Any
    predict_function: Any

    def __init__(self, inner_model: keras.Model):
        super().__init__(inner_model)
        self._workers = current_workers()
        self._predicts_shard = False
        self._is_synchronized = False
        self._synchronized: set[Any] = set()
        self._loops: list[str] = []

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

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        *,
        sharded: bool = False,
    ) -> keras.callbacks.History:
        """Trains on N towers of each worker.

        The arguments are those of `keras.Model.fit`, and one more.

        Args:
            x: as the following ones, as in `keras.Model.fit`; a batch is the global batch of B rows.
            y: targets.
            batch_size: B.
            epochs: the epoch at which training ends.
            verbose: "auto", 0, 1 or 2.
            callbacks: one or several.
            validation_split: the part of the rows, from the end, that is kept for validation.
            validation_data: to evaluate after each epoch.
            shuffle: whether rows are shuffled before each epoch.
            class_weight: a weight for each class.
            sample_weight: a weight for each row.
            initial_epoch: the epoch at which training begins.
            steps_per_epoch: batches in an epoch.
            validation_steps: batches in an evaluation.
            validation_batch_size: rows in a batch of an evaluation.
            validation_freq: the epochs between evaluations, or those after which to evaluate.
            sharded: whether the datasets, of training and of validation, are those of this worker alone, which the script has
                divided among the workers: their batches together are the global batches.

        Returns:
            The history, as in `keras.Model.fit`.

        Raises:
            ValueError: if there was nothing to train on, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        with self._call("fit", _given(JoinedModel.fit, locals()), sharded) as arguments:
            callbacks = listed(arguments.get("callbacks"))
            if self._feed.measure_wait(any(isinstance(callback, InputWait) for callback in callbacks)):
                self._forget_traces()
            self._announce(arguments)
            history = super().fit(arguments.pop("x", None), **arguments)
        # A generator that runs dry between epochs ends training, as in Keras; one that never gave a batch is a mistake.
        if history.epoch and not any(history.history.get("loss", ())):
            self._refuse_no_batches("fit")
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        *,
        sharded: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluates on N towers of each worker.

        Args:
            x: as the following ones, as in `keras.Model.evaluate`.
            y: targets.
            batch_size: B, the rows in a batch.
            verbose: "auto", 0, 1 or 2.
            sample_weight: a weight for each row.
            steps: how many batches to take.
            callbacks: one or several.
            return_dict: whether to return the numbers by name.
            sharded: as in `fit`.
            **kwargs: what Keras's `fit` passes on to it.

        Returns:
            The loss and the metrics, as in `keras.Model.evaluate`.

        Raises:
            ValueError: if there was nothing to evaluate, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        with self._call("evaluate", {**_given(JoinedModel.evaluate, locals()), **kwargs}, sharded) as arguments:
            results = super().evaluate(arguments.pop("x", None), **arguments)
        self._refuse_no_batches("evaluate")
        return results

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        *,
        sharded: bool = False,
        rows: choices.Rows = "all",
    ) -> Any:
        """Predicts on N towers of each worker, in the order of the rows.

        Args:
            x: as the following ones, as in `keras.Model.predict`.
            batch_size: B, the rows in a batch.
            verbose: "auto", 0, 1 or 2.
            steps: how many batches to take.
            callbacks: one or several.
            sharded: as in `fit`.
            rows: "all" gives every worker the predictions for all rows; "shard" those for its own rows of each batch, which
                are not sent anywhere.

        Returns:
            The outputs, as in `keras.Model.predict`.

        Raises:
            ValueError: if there was nothing to predict, or workers do not do the same.
            WorkerLostError: if a worker is lost.
        """
        refuse_unknown("rows", rows, choices.Rows)
        self._predict_shard(rows == "shard")
        try:
            given = _given(JoinedModel.predict, locals())
            with self._call("predict", given, sharded) as arguments, empty_prediction_refused("predict"):
                return super().predict(arguments.pop("x"), **arguments)
        finally:
            self._predict_shard(False)

    def _predict_shard(self, wanted: bool) -> None:
        if self._predicts_shard != wanted:
            self._predicts_shard = wanted
            self.predict_function = None

    @contextlib.contextmanager
    def _call(self, method: str, arguments: dict[str, Any], sharded: bool) -> Iterator[dict[str, Any]]:
        """A call of `fit`, `evaluate` or `predict`: gives the arguments that it has for this worker."""
        refuse_strategy()
        self._follow_inner_model()
        self._show_inner_model(arguments.get("callbacks"))
        # fit() evaluates data that it has fed already, with callbacks that it has been given.
        is_within_fit = arguments.get("_use_cached_eval_dataset", False)
        if self._workers.count > 1 and not is_within_fit:
            self._join_workers(method, arguments, sharded)
        if sharded:
            for name in ("x", "validation_data"):
                if name in arguments:
                    arguments[name] = with_empty_batches(arguments[name], self._workers, self.steps_per_execution)
        before, self._feed.takes_shards = self._feed.takes_shards, sharded
        self._loops.append(method)
        try:
            with self._workers.losses_named():
                yield arguments
        finally:
            self._loops.pop()
            self._feed.takes_shards = before
        if self._feed.different_batches is not None:
            self._feed.different_batches.report()

    def _announce(self, arguments: dict[str, Any]) -> None:
        """Says which devices train, before they do."""
        raise NotImplementedError

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function of `fit`, if there is none; see `keras.Model.make_train_function`."""
        if self.train_function is None or force:
            super().make_train_function(force=True)
            self.train_function = self._for_any_rows(self.train_function, self.train_step)

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function of `evaluate`, if there is none; see `keras.Model.make_test_function`."""
        if self.test_function is None or force:
            super().make_test_function(force=True)
            self.test_function = self._for_any_rows(self.test_function, self.test_step)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function of `predict`, if there is none; see `keras.Model.make_predict_function`."""
        if self.predict_function is None or force:
            super().make_predict_function(force=True)
            if not self._is_eager():
                self.predict_function = AnyRows(self.predict_function, self._feed)

    def _for_any_rows(self, function: Callable[[Any], Any], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return function if self._is_eager() else StepFunction(function, step, self._feed, self.steps_per_execution)

    def _forget_traces(self) -> None:
        """Has all steps traced anew, also those that a loop under way goes on with."""
        self.train_function = self.test_function = self.predict_function = None
        for method in self._loops:
            getattr(self, f"make_{_STEPS[method]}_function")()

    def reset_metrics(self) -> None:
        """Resets all metrics, as Keras does before each epoch, and sees to what has become of the inner model before it."""
        self._follow_inner_model()
        self.inner_model.reset_metrics()

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes the inner model, see `keras.Model.quantize`, and has the towers compute with what it has become."""
        self.inner_model.quantize(*args, **kwargs)
        self._follow_inner_model()

    def _join_workers(self, method: str, arguments: dict[str, Any], sharded: bool) -> None:
        """Sees to it that all workers make the same call, and to what this one does differently from the first."""
        shared = {name: value for name, value in arguments.items() if name not in ("verbose", "callbacks")}
        facts = {"the method called": method, "sharded": sharded, **self._facts()}
        facts |= described_model(self.inner_model) | {name: described_data(value) for name, value in shared.items()}
        self._workers.agree(facts)
        share_random_state(self._workers)
        # When training begins, the variables are those that the first worker has restored from a backup.
        self._is_synchronized = method == "fit"
        arguments["callbacks"] = in_lockstep(arguments.get("callbacks"), self._workers, self)
        if not self._workers.is_chief:
            arguments.setdefault("verbose", 0)

    def _synchronize_workers(self) -> None:
        """Gives all workers the first one's variables, once after they were created, and in each call."""
        if self._workers.count > 1 and not self._is_synchronized:
            self._is_synchronized = True
            synchronize(self._workers, all_variables(self.inner_model))

    def _synchronize_others(self, variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the first one's values of variables of which a step alone knows, such as those that it makes.

        All workers come to these when they first run the step; whoever traces it once more comes to no others.
        """
        others = [variable for variable in variables if variable.ref() not in self._synchronized]
        if others:
            self._synchronized.update(variable.ref() for variable in others)
            with tf.init_scope():
                synchronize(self._workers, others)

    def _refuse_no_batches(self, method: str) -> None:
        # A step of the user's own need not track a loss.
        if not has_own_step(self.inner_model) and not keras.ops.any(keras_seams.loss_tracker(self.inner_model).count):
            raise ValueError(NO_BATCHES.format(method))

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """One step of training on one global batch; see `keras.Model.train_on_batch`."""
        with self._workers.losses_named():
            batch = self._host_batch(x, y, sample_weight)
            return super().train_on_batch(*batch, class_weight=class_weight, return_dict=return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """One step of evaluation on one global batch; see `keras.Model.test_on_batch`."""
        with self._workers.losses_named():
            return super().test_on_batch(*self._host_batch(x, y, sample_weight), return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """The outputs for one global batch; see `keras.Model.predict_on_batch`."""
        with self._workers.losses_named():
            return super().predict_on_batch(*self._host_batch(x))

    def _host_batch(self, *batch: Any) -> tuple[Any, ...]:
        """A batch of arrays as tensors on the host, where it is cut into slices."""
        refuse_strategy()
        self._follow_inner_model()
        with tf.device(HOST):
            batch = keras.tree.map_structure(as_tensor, batch)
        if not self._is_eager():
            refuse_other_rows(batch, self._feed.whole)
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


def _given(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a Keras method that differ from its defaults, by name.

    Tools that patch Keras's methods look at what they are given, and add to it by name; the data, `x`, they look for in the
    first place (mlflow).
    """
    parameters = inspect.signature(method).parameters.values()
    of_keras = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return {p.name: arguments[p.name] for p in of_keras if arguments[p.name] is not p.default}
