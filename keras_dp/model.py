"""Define DataParallelModel, which users wrap their model in."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.argument_names import suggesting_names
from keras_dp.batch_normalization.synchronized import batch_norms
from keras_dp.batches.input_strategy import NO_BATCHES, InputStrategy, empty_prediction_refused
from keras_dp.batches.input_wait import InputWait
from keras_dp.batches.nesting import map_leaves
from keras_dp.batches.other_rows import naming_other_rows
from keras_dp.batches.shards import with_empty_batches
from keras_dp.batches.slicing import BATCH_SIZE, Slice, as_tensor, is_cut, known_rows, own_rows, rows_of_batches
from keras_dp.batches.whole_tensors import chosen_whole
from keras_dp.choices import refuse_unknown
from keras_dp.compiled import CompiledWrapper
from keras_dp.devices import announcement, variable_homes
from keras_dp.devices.available import are_gpus, available_devices, parameter_device_name, tower_devices
from keras_dp.keras_internals import keras_models
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.partition.inspecting.explanation import Explanation
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.reports.explaining import explained, explanation_of, warn_of_gathered_rows
from keras_dp.reports.report import Report
from keras_dp.reports.reporting import report_of
from keras_dp.steps.towers import TowerSteps
from keras_dp.steps.trainer_functions import PredictFunction, StepFunction
from keras_dp.steps.verification import verification
from keras_dp.workers.group import current_workers
from keras_dp.workers.joint_calls import Call, calls_of
from keras_dp.wrapping.wrapper import has_own_step, listed, refuse_strategy

Logs = dict[str, Any]

_STEPS = {"fit": "train", "evaluate": "test", "predict": "predict"}

logger = logging.getLogger("keras_dp")


class DataParallelModel(CompiledWrapper):
    """Trains a Keras model on several devices at once, with the result of one device.

    >>> import keras, keras_dp
    >>> inner_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> parallel = keras_dp.DataParallelModel(inner_model, devices=1)
    >>> parallel.compile("sgd", "mse")

    `fit`, `evaluate`, `predict`, the `*_on_batch` methods and callbacks work as on any Keras model. Each global batch of B
    rows is cut into N slices. A tower on each device computes its part of the loss of the global batch. The gradients are
    summed and applied once, where the variables live.

    Training changes the inner model's own variables. `save`, `export`, checkpoints and pickles save the inner model, so that
    the files load without keras_dp, on machines with other devices; wrap the model that they load. Copies and clones in the
    same process, by `copy.deepcopy` or `keras.models.clone_model`, are wrappers with the same arguments.

    Args:
        inner_model: any `keras.Model`, built or not.
        devices: None for all GPUs, or all logical CPUs if there is no GPU; an integer n for the first n of these; or names
            such as "GPU:0".
        parameter_device: the device where the variables live, and where gradients are summed and applied. None leaves the
            variables where they are. A device's name moves them there. "sharded" spreads them over the towers' devices,
            balanced by bytes.
        batch_norm: "sync" normalizes with the moments of the global batch, as one device does. "local" and "first" normalize
            each slice with its own moments. "local" updates the moving statistics with the moments of the global batch,
            "first" with the moments of the first tower.
        gradient_dtype: "bfloat16" or "float16" to send gradients from the towers in half the bytes, at the cost of exactness.
            A worker sums its towers' gradients in the variable's dtype; the sums over several workers use this dtype.
            None sends gradients in their own dtype.
        whole: names of tensors of a batch that are not cut into slices. Such a tensor has other rows than the batch, as the
            edges of graphs beside their nodes, or is the same for all rows. A name is a key of a dictionary, such as "edges",
            or a path from the batch (x, y, sample_weight), such as "0/edges" or "1". It names all tensors below it. Training
            refuses names that no tensor has had so far. If all tensors of a batch stay whole, its step runs once, on one
            device. Tensors also stay whole, with a warning, if the types of a dataset say that every batch has other numbers of
            rows of them than of most tensors.
        pack_copies: whether the tensors that devices send each other travel in few large messages, and small sums in one hop:
            each tower adds the parts of all towers by itself. GPUs need microseconds for each message, whatever its size. None
            does so between GPUs only: logical CPUs share their memory.
        verify: whether the first step of each trace is compared with the same step on one device. A difference is an error that
            names the operation, and leaves the weights as before. None asks the environment variable KERAS_DP_VERIFY.

    Raises:
        ValueError: if the model cannot be trained on towers, or a device does not exist.
    """

    train_function: Any
    test_function: Any
    predict_function: Any

    @suggesting_names
    def __init__(
        self,
        inner_model: keras.Model,
        devices: int | Sequence[str] | None = None,
        parameter_device: str | None = None,
        batch_norm: choices.BatchNorm = "sync",
        gradient_dtype: choices.GradientType = None,
        whole: Sequence[str] = (),
        pack_copies: choices.PackCopies = None,
        verify: bool | None = None,
    ):
        refuse_unknown("batch_norm", batch_norm, choices.BatchNorm)
        refuse_unknown("gradient_dtype", gradient_dtype, choices.GradientType)
        refuse_unknown("pack_copies", pack_copies, choices.PackCopies)
        super().__init__(inner_model)
        self._devices = tuple(tower_devices(devices))
        self._wanted_device = None if parameter_device is None else parameter_device_name(parameter_device)
        self._told_eager = False
        self._is_inside_step = False
        self._announced = self._told_called = False
        self._told_gathered = False
        self._workers = current_workers()
        self._joint_calls = calls_of(self._workers)
        self._predicts_shard = False
        self._eager: dict[str, bool] = {}  # whether a step's function runs eagerly
        self._made: dict[str, Any] = {}  # the function that was made last for each step
        self._loops: list[str] = []
        self._feed = InputStrategy(self._devices, self._is_eager, self._prepare, self._workers.collectives, chosen_whole(whole))
        packs = are_gpus(self._devices) if pack_copies is None else pack_copies
        self._steps = TowerSteps(
            inner_model, self._feed, batch_norm, gradient_dtype, packs, self._optimizer_of_step, self._variables_made
        )
        self._verification = verification(verify, self._steps)
        self._remember(
            devices=self.devices,
            parameter_device=parameter_device,
            batch_norm=batch_norm,
            gradient_dtype=gradient_dtype,
            whole=whole,
            pack_copies=pack_copies,
            verify=verify,
        )
        self._place_variables()
        self._follow_inner_model()

    def __repr__(self) -> str:
        return f"<DataParallelModel name={self.name}, built={self.built}, {announcement.towers(self._devices)}>"

    @suggesting_names
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

        All arguments but `sharded` work as in `keras.Model.fit`. A batch is the global batch of B rows.

        Args:
            x: inputs, or batches.
            y: targets.
            batch_size: B.
            epochs: the epoch at which training ends.
            verbose: "auto", 0, 1 or 2.
            callbacks: one callback or several.
            validation_split: the part of the rows, from the end, that is kept for validation.
            validation_data: data to evaluate after each epoch.
            shuffle: whether rows are shuffled before each epoch.
            class_weight: a weight for each class.
            sample_weight: a weight for each row.
            initial_epoch: the epoch at which training begins.
            steps_per_epoch: the number of batches in an epoch.
            validation_steps: the number of batches in an evaluation.
            validation_batch_size: the number of rows in a batch of an evaluation.
            validation_freq: the number of epochs between evaluations, or a list of the epochs after which to evaluate.
            sharded: whether the training and validation datasets are this worker's own shards, which the script has divided
                among the workers. The workers' batches together are the global batches then.

        Returns:
            The history, as in `keras.Model.fit`.

        Raises:
            ValueError: if there is nothing to train on, or the workers' calls differ.
            WorkerLostError: if a worker is lost.
        """
        with self._call("fit", _given(DataParallelModel.fit, locals()), sharded) as arguments:
            is_asked = any(isinstance(callback, InputWait) for callback in listed(arguments.get("callbacks")))
            if self._feed.waiting.measure(is_asked):
                self._forget_traces()
            self._announce(arguments)
            self._steps.slow_steps.is_wanted = arguments.get("verbose") != 0 and self._workers.is_chief
            calls = self._steps.calls
            try:
                history = super().fit(arguments.pop("x", None), **arguments)
            finally:
                self._steps.slow_steps.is_wanted = False
        # As in Keras, a generator that ends between epochs ends training. A generator without any batch is a mistake.
        if history.epoch and not any(history.history.get("loss", ())):
            self._refuse_no_batches("fit", calls)
        return history

    @suggesting_names
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

        All arguments but `sharded` work as in `keras.Model.evaluate`.

        Args:
            x: inputs, or batches.
            y: targets.
            batch_size: B, the number of rows in a batch.
            verbose: "auto", 0, 1 or 2.
            sample_weight: a weight for each row.
            steps: the number of batches to take.
            callbacks: one callback or several.
            return_dict: whether to return the results by name.
            sharded: as in `fit`.
            **kwargs: further arguments that Keras's `fit` passes.

        Returns:
            The loss and the metrics, as in `keras.Model.evaluate`.

        Raises:
            ValueError: if there is nothing to evaluate, or the workers' calls differ.
            WorkerLostError: if a worker is lost.
        """
        with self._call("evaluate", {**_given(DataParallelModel.evaluate, locals()), **kwargs}, sharded) as arguments:
            calls = self._steps.calls
            results = super().evaluate(arguments.pop("x", None), **arguments)
        self._refuse_no_batches("evaluate", calls)
        return results

    @suggesting_names
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

        All arguments but `sharded` and `rows` work as in `keras.Model.predict`.

        Args:
            x: inputs, or batches.
            batch_size: B, the number of rows in a batch.
            verbose: "auto", 0, 1 or 2.
            steps: the number of batches to take.
            callbacks: one callback or several.
            sharded: as in `fit`.
            rows: "all" returns the predictions for all rows on every worker. "shard" returns only the predictions for
                this worker's rows of each batch.

        Returns:
            The outputs, as in `keras.Model.predict`.

        Raises:
            ValueError: if there is nothing to predict, or the workers' calls differ.
            WorkerLostError: if a worker is lost.
        """
        refuse_unknown("rows", rows, choices.Rows)
        self._predict_shard(rows == "shard" and self._workers.count > 1)
        try:
            given = _given(DataParallelModel.predict, locals())
            with self._call("predict", given, sharded) as arguments, empty_prediction_refused("predict"):
                return super().predict(arguments.pop("x"), **arguments)
        finally:
            self._predict_shard(False)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Runs one training step on one global batch; see `keras.Model.train_on_batch`."""
        with self._workers.reporting_lost_workers():
            batch = self._host_batch(x, y, sample_weight, method="fit")
            self._feed.usual_rows = known_rows(batch, self._feed.whole)
            return super().train_on_batch(*batch, class_weight=class_weight, return_dict=return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Runs one evaluation step on one global batch; see `keras.Model.test_on_batch`."""
        with self._workers.reporting_lost_workers():
            return super().test_on_batch(*self._host_batch(x, y, sample_weight, method="evaluate"), return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one global batch; see `keras.Model.predict_on_batch`."""
        with self._workers.reporting_lost_workers():
            return super().predict_on_batch(*self._host_batch(x, method="predict"))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model, on the chief alone; see `keras.Model.save`."""
        if self._workers.is_chief:
            self.inner_model.save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model's weights, on the chief alone; see `keras.Model.save_weights`."""
        if self._workers.is_chief:
            self.inner_model.save_weights(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the inner model, on the chief alone; see `keras.Model.export`."""
        if self._workers.is_chief:
            self.inner_model.export(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Quantizes the inner model, and makes the towers follow it; see `keras.Model.quantize`."""
        self.inner_model.quantize(*args, **kwargs)
        self._follow_inner_model()

    def reset_metrics(self) -> None:
        """Makes the towers follow changes of the inner model, and resets all metrics. Keras calls it before each epoch."""
        self._steps.slow_steps.pause()
        self._follow_inner_model()
        self.inner_model.reset_metrics()

    def summary(
        self,
        line_length: int | None = None,
        positions: Any = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Any = None,
    ) -> None:
        """Prints the inner model's summary and the towers' devices; see `keras.Model.summary`."""
        self.inner_model.summary(line_length, positions, print_fn, expand_nested, show_trainable, layer_range)
        (print_fn or print)(f" Devices: {announcement.towers(self._devices)}")

    def explain(self, batch: Any, step: choices.Step = "train") -> Explanation:
        """Explains how a step is partitioned: where towers meet, how many bytes they send, and what is computed once.

        Counts the share of the arithmetic that towers divide among themselves. The step is traced for it, also with other
        numbers of rows: Python code in the step runs more often. The states of `random` and NumPy remain as they are.

        >>> import keras, keras_dp, numpy as np
        >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
        >>> parallel.compile("sgd", "mse")
        >>> parallel.explain((np.ones((8, 4)), np.ones((8, 1)))).once
        []

        Args:
            batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight).
            step: "train", "test" or "predict".
        """
        refuse_unknown("step", step, choices.Step)
        return explanation_of(self.tower_steps, batch, step)

    def report(self, batch: Any = None) -> Report:
        """Reports how a training step runs on the devices: what each computes and sends, and how much faster that can be.

        Traces the step, and runs it once; all variables are restored afterwards. With several workers, all must call it.

        >>> import keras, keras_dp, numpy as np
        >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
        >>> parallel.compile("sgd", "mse")
        >>> parallel.report((np.ones((8, 4)), np.ones((8, 1)))).verdict
        'There is one device, which computes all.'

        Args:
            batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and
                zeros, with the types of the batches that the model was last trained with.

        Raises:
            ValueError: if the model is not compiled or runs eagerly, or needs a batch: it was not trained yet, or its batches
                differ in more than their rows.
        """
        return report_of(self, batch, self._feed.usual_rows)

    @property
    def devices(self) -> list[str]:
        """The N devices that run towers."""
        return list(self._devices)

    @property
    def num_towers(self) -> int:
        """N, the number of towers."""
        return len(self._devices)

    @property
    def parameter_device(self) -> str:
        """The home of the variables: a device, several devices if they are spread, or "sharded"."""
        if self._wanted_device is not None:
            return self._wanted_device
        homes = {variable_homes.home(variable): None for variable in self.inner_model.weights}
        return ", ".join(homes) or available_devices()[0]

    @property
    def tower_steps(self) -> TowerSteps:
        """The inner model's steps on N towers, in its current state; for tools that inspect steps or run them differently."""
        self._follow_inner_model()
        return self._steps

    @tower_steps.setter
    def tower_steps(self, steps: TowerSteps) -> None:
        self._steps = steps

    @property
    def distribute_strategy(self) -> InputStrategy:
        """The input strategy that feeds the towers; Keras's trainer takes it for a `tf.distribute` strategy."""
        return self._feed

    def train_step(self, data: Any) -> Logs:
        """Runs one training step on N slices."""
        return self._step("train", data)

    def test_step(self, data: Any) -> Logs:
        """Runs one evaluation step on N slices."""
        return self._step("test", data)

    def predict_step(self, data: Any) -> Any:
        """Returns the outputs for N slices, in the order of the global batch."""
        return self._step("predict", data)

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that `fit` calls, unless it exists; see `keras.Model.make_train_function`."""
        if self._is_unmade("train", force):
            with self._read_by_keras():
                super().make_train_function(force=True)
            self.train_function = self._made["train"] = self._on_towers(self.train_function, self.train_step, "train")

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that `evaluate` calls, unless it exists; see `keras.Model.make_test_function`."""
        if self._is_unmade("test", force):
            with self._read_by_keras():
                super().make_test_function(force=True)
            self.test_function = self._made["test"] = self._on_towers(self.test_function, self.test_step, "test")

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that `predict` calls, unless it exists; see `keras.Model.make_predict_function`."""
        if self._is_unmade("predict", force):
            with self._read_by_keras():
                super().make_predict_function(force=True)
            self._eager["predict"] = self._is_eager()
            if not self._eager["predict"]:
                self.predict_function = PredictFunction(self.predict_function, self._steps, self._verification)
            self._made["predict"] = self.predict_function

    def _step(self, name: choices.Step, data: Any) -> Any:
        """Runs a step on N slices in a compiled function, or, eagerly, the inner model's own step on the whole batch."""
        if self._is_inside_step or not (tf.executing_eagerly() or self._is_eager() or is_cut(data)):
            return self._set_steps.run_replaced(f"{name}_step", data)
        if self._is_eager():
            if name == "train" and self.optimizer is not None and self.optimizer.accumulate == "rows":
                raise ValueError(
                    'accumulate="rows" weights the gradients of towers, and run_eagerly=True runs none. Compile with '
                    'accumulate="batches", or without run_eagerly. Received: run_eagerly=True'
                )
            return self._on_one_device(getattr(self.inner_model, f"{name}_step"), data)
        if tf.executing_eagerly():
            # The user called the step directly, with a batch.
            data = self._on_host(data)
            getattr(self, f"make_{name}_function")()
            return getattr(self, f"{name}_function")([data] if name == "predict" else iter([data]))
        return self._run_on_towers(name, data)

    def _run_on_towers(self, name: choices.Step, slices: Sequence[Slice]) -> Any:
        known = self._joint_calls.variables_of(self.inner_model)
        shards = name == "predict" and self._predicts_shard
        result, partition = self._steps.run(name, slices, "shard" if shards else "all")
        self._joint_calls.synchronize_others(known, partition.variables)
        if name == "train" and not self._told_gathered:
            rows = partition.propagation.batch_rows or self._feed.usual_rows or BATCH_SIZE
            self._told_gathered = warn_of_gathered_rows(explained(partition, self._steps, rows))
        return own_rows(result, slices) if shards else result

    def _optimizer_of_step(self) -> DataParallelOptimizer | None:
        # Keras sets the attribute when the model is compiled.
        return self.optimizer if hasattr(self.inner_model, "optimizer") else None

    def _is_eager(self) -> bool:
        is_eager = self.run_eagerly or tf.config.functions_run_eagerly()
        if is_eager and self._workers.count > 1:
            raise ValueError(
                "run_eagerly=True is for debugging: it runs the inner model on one device of one worker. Run the script "
                f"without TF_CONFIG. Received: run_eagerly=True on {self._workers.count} workers"
            )
        return is_eager

    def _on_one_device(self, step: Any, data: Any) -> Any:
        if not self._told_eager:
            self._told_eager = True
            logger.warning(
                "The inner model runs eagerly on one device, without towers, so that it can be debugged line by line. "
                'The result is the same as with batch_norm="sync".'
            )
        self._is_inside_step = True
        try:
            return step(data)
        finally:
            self._is_inside_step = False

    @contextlib.contextmanager
    def _call(self, method: str, arguments: dict[str, Any], sharded: bool) -> Iterator[dict[str, Any]]:
        """Wraps a call of `fit`, `evaluate` or `predict`, and yields its arguments for this worker."""
        refuse_strategy()
        if arguments.get("x") is None:
            raise ValueError(f"{method}() needs data: arrays, a dataset, a PyDataset or a generator. Received: x=None")
        self._follow_inner_model()
        self._show_inner_model(arguments.get("callbacks"))
        # fit() validates with a dataset and callbacks that it has prepared already.
        is_within_fit = arguments.get("_use_cached_eval_dataset", False)
        if not is_within_fit:
            call = Call(
                method,
                sharded,
                self.devices,
                self.parameter_device,
                self._steps.batch_norm,
                self._steps.gradient_dtype,
                self.steps_per_execution,
                "shard" if self._predicts_shard else "all",
            )
            self._joint_calls.begin(call, self.inner_model, self, arguments)
        if sharded:
            for name in ("x", "validation_data"):
                if name in arguments:
                    arguments[name] = with_empty_batches(arguments[name], self._workers, self.steps_per_execution)
        before, self._feed.takes_shards = self._feed.takes_shards, sharded
        cut_before, self._feed.cuts_in_step = self._feed.cuts_in_step, method == "predict"
        had_names, self._feed.has_all_names = self._feed.has_all_names, self._has_all_names(method)
        self._loops.append(method)
        try:
            with self._workers.reporting_lost_workers(), naming_other_rows():
                yield arguments
                if self._feed.different_batches is not None and method != "fit":
                    # The epochs of `fit` have reported theirs.
                    self._feed.different_batches.report()
        finally:
            self._loops.pop()
            self._feed.takes_shards, self._feed.has_all_names = before, had_names
            self._feed.cuts_in_step = cut_before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the inner model's outputs, computed on one device."""
        is_symbolic = any(isinstance(value, keras.KerasTensor) for value in keras.tree.flatten((args, kwargs)))
        if self.num_towers > 1 and not (self._told_called or self._loops or is_symbolic):
            self._told_called = True
            logger.info(
                "Calling the model computes on one device, and a loop of your own that does so trains there. The towers run in "
                "fit, evaluate, predict and the *_on_batch methods: in a loop, call train_on_batch(x, y)."
            )
        return super().__call__(*args, **kwargs)

    def _announce(self, arguments: dict[str, Any]) -> None:
        data = arguments.get("x"), arguments.get("batch_size")
        rows = None if self._feed.takes_shards else rows_of_batches(*data, self._feed.named)
        self._feed.usual_rows = rows
        if self._announced or arguments.get("verbose") == 0 or self._is_eager() or not self._workers.is_chief:
            return
        self._announced = True
        batch_norm = self._steps.batch_norm if batch_norms(self.inner_model) else None
        spread = keras_models.is_built(self.inner_model) and variable_homes.should_spread(self.inner_model, self._devices)
        logger.info(announcement.training(self._devices, self._workers.count, rows, batch_norm, spread))

    def _refuse_no_batches(self, method: str, calls: int) -> None:
        """Raises a ValueError if no step has run since there were so many calls of steps. Eager steps are not counted."""
        if self._steps.calls == calls and not self._is_eager():
            raise ValueError(NO_BATCHES.format(method))

    def _predict_shard(self, wanted: bool) -> None:
        if self._predicts_shard != wanted:
            self._predicts_shard = wanted
            self.predict_function = None

    def _has_all_names(self, method: str) -> bool:
        """Returns whether the data of a method have all tensors that `whole` names.

        The data of training have them. A step of the user's own may evaluate other data.
        """
        return method == "fit" or (method == "evaluate" and not has_own_step(self.inner_model))

    def _host_batch(self, *batch: Any, method: str) -> tuple[Any, ...]:
        """Returns a batch of arrays as tensors on the host, where it is cut into slices."""
        refuse_strategy()
        before, self._feed.has_all_names = self._feed.has_all_names, self._has_all_names(method)
        try:
            return self._on_host(batch)
        finally:
            self._feed.has_all_names = before

    def _on_host(self, batch: Any) -> Any:
        self._follow_inner_model()
        if self._is_eager():
            with tf.device(HOST):
                return map_leaves(as_tensor, batch)
        return self._steps.on_host(batch)

    def _prepare(self) -> None:
        """Makes variables that exist ready for a step: in their places, and equal on all workers."""
        self._place_variables()
        self._joint_calls.synchronize(self.inner_model)

    def _variables_made(self) -> None:
        """Places the variables that the first trace of a step has made, before the second one."""
        self._place_variables()
        if getattr(self.inner_model, "optimizer", None) is not None:
            variable_homes.place_state(self.inner_model.optimizer)

    def _place_variables(self) -> None:
        """Moves the variables of a built model to the parameter device, unless they are there."""
        if self._wanted_device is not None and keras_models.is_built(self.inner_model):
            variable_homes.place(self.inner_model, self._wanted_device, self.devices)
        if self._steps.forget_moved():
            self._forget_traces()

    def _is_unmade(self, name: choices.Step, force: bool) -> bool:
        """Returns whether a step's function has to be made: by force, for the first time, or since eagerness has changed."""
        function = getattr(self, f"{name}_function")
        if force or function is None:
            return True
        if function is not self._made.get(name) and f"make_{name}_function" not in self._own_loops:
            raise ValueError(
                f"{name}_function was set, and takes whole batches, where towers take slices. Set {name}_step in place of it, "
                f"or override it in the model's class. Received: {name}_function={function}"
            )
        return self._eager.get(name) != self._is_eager()

    def _on_towers(
        self, function: Callable[[Any], Any], step: Callable[[Any], Any], name: choices.Step
    ) -> Callable[[Any], Any]:
        self._eager[name] = self._is_eager()
        if self._eager[name]:
            return function
        return StepFunction(function, step, self._steps, self.steps_per_execution, name, self._verification)

    def _towers_compiled(self) -> None:
        if self.optimizer is not None and self._wanted_device is not None:
            variable_homes.place_state(self.inner_model.optimizer)
        self._joint_calls.forget()

    def _forget_traces(self) -> None:
        """Makes all steps retrace, including those of a running `fit`, `evaluate` or `predict`."""
        keras_models.forget_traces(self)
        for method in self._loops:
            getattr(self, f"make_{_STEPS[method]}_function")()


def _given(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a Keras method that differ from its defaults, by name.

    Tools that patch Keras's methods read these arguments, and add others by name. Such tools (mlflow) expect the data, `x`, as
    the first positional argument.
    """
    parameters = inspect.signature(method).parameters.values()
    of_keras = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return {p.name: arguments[p.name] for p in of_keras if arguments[p.name] is not p.default}
