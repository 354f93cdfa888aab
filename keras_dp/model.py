"""Define DataParallelModel, which users wrap their model in."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_dp import choices, console
from keras_dp.argument_names import suggesting_names
from keras_dp.batches.input_strategy import empty_prediction_refused
from keras_dp.batches.input_wait import InputWait
from keras_dp.batches.slicing import known_rows
from keras_dp.calls import announce, in_call, on_batch, predicting_shard, refuse_no_batches
from keras_dp.devices import announcement
from keras_dp.keras_internals.cloning import pass_clones_through
from keras_dp.reports.communication import communication_report
from keras_dp.reports.explain import explain
from keras_dp.reports.reporting import report
from keras_dp.reports.step_check import check_step
from keras_dp.steps.towers import TowerSteps
from keras_dp.trainer import TowerTrainer
from keras_dp.wrapping.in_front import InFront
from keras_dp.wrapping.one_state import OWN, Behind, OwnName, is_made, own_of, with_state_of
from keras_dp.wrapping.own_training import listed, watched_methods
from keras_dp.wrapping.refusals import (
    refuse_model_of_its_own,
    refuse_parts_of_steps,
    refuse_strategy,
    refuse_what_cannot_train,
)


class DataParallelModel(Behind, keras.Model):
    """Trains a Keras model on several devices at once, with the result of one device.

    >>> import keras, keras_dp
    >>> inner_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> parallel = keras_dp.DataParallelModel(inner_model, devices=1)
    >>> parallel.compile("sgd", "mse")

    `fit`, `evaluate`, `predict`, the `*_on_batch` methods and callbacks work as on any Keras model. Each global batch of B
    rows is cut into N slices. A tower on each device computes its part of the loss of the global batch. The gradients are
    summed and applied once, where the variables live.

    The wrapper is an instance of the inner model's class, too, and the two have the same attributes: layers, variables, and all
    that a program sets on either. Names that the user's class defines are the user's; `keras_dp.report(parallel)` and the like
    reach what they hide. `save`, `export`, checkpoints and pickles save the inner model, so that the files load without
    keras_dp, on machines with other devices; wrap the model that they load. Copies and clones in the same process, by
    `copy.deepcopy` or `keras.models.clone_model`, are wrappers with the same arguments: from the first wrapper on, the clones
    that Keras makes pass through keras_dp.

    A subclass takes the model as its first argument, and may add what surrounds training. Steps, and all that they call, are
    the model's.

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
        communication: "copies" sends tensors between the devices of this process by TensorFlow's own copies. "nccl" lets NCCL
            move them, with the same results, where each tower sends all others something. Where it cannot, a warning says why,
            and copies are sent. None sends copies.
        verify: whether the first step of each trace is compared with the same step on one device. A difference is an error that
            names the operation, and leaves the weights as before. None asks the environment variable KERAS_DP_VERIFY.
        slices_per_device: into how many slices each device's rows are cut, which it computes one after the other, with the
            same result. The activations of one slice at a time are in memory, unless towers meet in the middle, as they do
            for batch normalization with the moments of the global batch. `keras_dp.find_slices` finds how many fit.
        rows: a share of the rows of each batch for each device, for devices that are not alike. [3, 2] gives the first of two
            devices three rows for each two of the second. The result is the same. None gives all devices as many rows.

    Raises:
        ValueError: if the model cannot be trained on towers, or a device does not exist.
    """

    _keras_dp: TowerTrainer

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object of the class of the model, too."""
        model = args[0] if args else kwargs.get("inner_model")
        if not args and model is None:
            # Python says which argument is missing.
            return object.__new__(cls)
        refuse_what_cannot_train(model)
        _begin()
        # A subclass with an `__init__` of its own decides by itself what a second call does.
        names = {"__init__": _initialize} if cls.__init__ is DataParallelModel.__init__ else {}
        return with_state_of(model, InFront, cls, lambda own_class: names | watched_methods(own_class))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses names of a subclass that nothing would hear: steps, and all that they call, are those of the model inside.

        Raises:
            TypeError: if there is one.
        """
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, InFront):
            refuse_parts_of_steps(cls, cls.__mro__[: cls.__mro__.index(DataParallelModel)])

    @suggesting_names
    def __init__(
        self,
        inner_model: keras.Model,
        devices: int | Sequence[str] | None = None,
        parameter_device: str | None = None,
        batch_norm: choices.BatchNorm = "sync",
        gradient_dtype: choices.GradientType = None,
        whole: Sequence[str] = (),
        communication: choices.TowerCommunication = None,
        verify: bool | None = None,
        slices_per_device: int = 1,
        rows: Sequence[int] | None = None,
    ):
        refuse_model_of_its_own(self, inner_model)
        options = choices.Options(
            devices, parameter_device, batch_norm, gradient_dtype, whole, communication, verify, slices_per_device, rows
        )
        object.__setattr__(self, "_keras_dp", TowerTrainer(self, inner_model, options))

    @classmethod
    def _around(cls, model: keras.Model, options: choices.Options) -> Any:
        """Returns a wrapper of this class around another model. A subclass's own `__init__` may take other arguments."""
        parallel = cls.__new__(cls, model)
        DataParallelModel.__init__(parallel, model, **vars(options))
        return parallel

    def __repr__(self) -> str:
        return f"<DataParallelModel name={self.name}, built={self.built}, {announcement.towers(own_of(self).of_towers)}>"

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Compiles the model, and the towers; see `keras.Model.compile`.

        Args:
            optimizer: any Keras optimizer, or a `DataParallelOptimizer` around one.
            loss: the loss of the global batch.
            loss_weights: a weight for each output's loss.
            metrics: metrics without sample weights.
            weighted_metrics: metrics with sample weights.
            run_eagerly: whether to run on one device, line by line.
            steps_per_execution: the number of batches that a call takes.
            jit_compile: True makes XLA compile each tower's operations between two exchanges, for its own device, and each
                update. The default, "auto", is Keras's: on GPUs, True if all layers support XLA.
            auto_scale_loss: whether to wrap the optimizer in a `LossScaleOptimizer` if the model computes in mixed_float16.

        Raises:
            ValueError: if model and optimizer have different parameter devices.
        """
        refuse_strategy()
        own = own_of(self)
        # Keras keeps the layers of what it compiles, and this model among them would live as long as the one inside.
        keras.Model.compile(
            own.inside,
            own.taken(optimizer),
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )
        own.warn_of_plain_training()
        own.compiled(is_told=jit_compile != "auto")

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the model, and the towers, from a configuration that `get_compile_config()` returned."""
        super().compile_from_config(config)
        # A configuration has Keras's choice in the place of "auto".
        own_of(self).compiled()

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
        own = own_of(self)
        with in_call(own, "fit", _given(DataParallelModel.fit, locals()), sharded) as arguments:
            is_asked = any(isinstance(callback, InputWait) for callback in listed(arguments.get("callbacks")))
            if own.feed.waiting.measure(is_asked):
                own.forget_traces()
            announce(own, arguments)
            own.steps.slow_steps.is_wanted = arguments.get("verbose") != 0 and own.workers.is_chief
            calls = own.steps.calls
            try:
                history = super().fit(arguments.pop("x", None), **arguments)
            finally:
                own.steps.slow_steps.is_wanted = False
        # As in Keras, a generator that ends between epochs ends training. A generator without any batch is a mistake.
        if history.epoch:
            refuse_no_batches(own, "fit", calls)
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
        own = own_of(self)
        with in_call(own, "evaluate", {**_given(DataParallelModel.evaluate, locals()), **kwargs}, sharded) as arguments:
            calls = own.steps.calls
            results = super().evaluate(arguments.pop("x", None), **arguments)
        refuse_no_batches(own, "evaluate", calls)
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
        choices.refuse_unknown("rows", rows, choices.Rows)
        own = own_of(self)
        given, wants_shard = _given(DataParallelModel.predict, locals()), rows == "shard" and own.workers.count > 1
        with (
            predicting_shard(own, wants_shard),
            in_call(own, "predict", given, sharded) as arguments,
            empty_prediction_refused("predict"),
        ):
            return super().predict(arguments.pop("x"), **arguments)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Runs one training step on one global batch; see `keras.Model.train_on_batch`."""
        own = own_of(self)
        with on_batch(own, x, y, sample_weight, method="fit") as batch:
            own.feed.usual_rows = known_rows(batch, own.feed.whole)
            return super().train_on_batch(*batch, class_weight=class_weight, return_dict=return_dict)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
        """Runs one evaluation step on one global batch; see `keras.Model.test_on_batch`."""
        with on_batch(own_of(self), x, y, sample_weight, method="evaluate") as batch:
            return super().test_on_batch(*batch, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs for one global batch; see `keras.Model.predict_on_batch`."""
        with on_batch(own_of(self), x, method="predict") as batch:
            return super().predict_on_batch(*batch)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model, on the chief alone; see `keras.Model.save`."""
        if own_of(self).workers.is_chief:
            super().save(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Saves the inner model's weights, on the chief alone; see `keras.Model.save_weights`."""
        if own_of(self).workers.is_chief:
            super().save_weights(*args, **kwargs)

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Exports the inner model, on the chief alone; see `keras.Model.export`."""
        own = own_of(self)
        if own.workers.is_chief:
            keras.Model.export(own.inside, *args, **kwargs)

    def reset_metrics(self) -> None:
        """Makes the towers follow changes of the inner model, and resets all metrics. Keras calls it before each epoch."""
        own = own_of(self)
        own.steps.slow_steps.pause()
        own.follow()
        super().reset_metrics()

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the model's summary and the towers' devices; see `keras.Model.summary`."""
        super().summary(*args, **kwargs)
        given = inspect.signature(keras.Model.summary).bind(self, *args, **kwargs).arguments
        (given.get("print_fn") or print)(f" Devices: {announcement.towers(own_of(self).of_towers)}")

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that `fit` calls, unless it exists; see `keras.Model.make_train_function`."""
        _make(self, "train", force, super().make_train_function)

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that `evaluate` calls, unless it exists; see `keras.Model.make_test_function`."""
        _make(self, "test", force, super().make_test_function)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that `predict` calls, unless it exists; see `keras.Model.make_predict_function`."""
        _make(self, "predict", force, super().make_predict_function)

    explain = explain
    report = report
    check_step = check_step
    communication_report = communication_report

    @OwnName
    def inner_model(self) -> keras.Model:
        """The model inside, which trains on one device if it is trained by itself."""
        return own_of(self).inside

    @OwnName
    def devices(self) -> list[str]:
        """The devices that run towers."""
        return list(own_of(self).devices)

    @OwnName
    def num_towers(self) -> int:
        """N, the number of towers: one for each slice of each device."""
        return own_of(self).num_towers

    @OwnName
    def parameter_device(self) -> str:
        """The home of the variables: a device, several devices if they are spread, or "sharded"."""
        return own_of(self).parameter_device

    @OwnName
    def tower_steps(self) -> TowerSteps:
        """The inner model's steps on N towers, in its current state; for tools that inspect steps or run them differently."""
        return own_of(self).tower_steps


@functools.cache
def _begin() -> None:
    """Shows the messages of keras_dp, and makes a clone of a wrapper a wrapper: nothing else outside is changed for good."""
    console.show_messages()
    pass_clones_through(lambda model, clone: own_of(model).wrap(clone) if is_made(model) else clone)


# `inspect.signature` and documentation show the arguments.
DataParallelModel.__new__.__wrapped__ = DataParallelModel.__init__  # type: ignore[attr-defined]


@functools.wraps(DataParallelModel.__init__)
def _initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    """Initializes a wrapper the first time. A method of the user's that calls it again initializes the model inside."""
    try:
        inside = object.__getattribute__(self, OWN).inside
    except AttributeError:
        DataParallelModel.__init__(self, *args, **kwargs)
    else:
        type(inside).__init__(inside, *args, **kwargs)


def _make(parallel: DataParallelModel, name: choices.Step, force: bool, make: Callable[..., None]) -> None:
    """Makes the function of a step on towers from the one that Keras makes, unless it exists."""
    own = own_of(parallel)
    own.follow()
    if own.must_make(name, force):
        with own.read_by_keras():
            make(force=True)
        function, step = (getattr(parallel, f"{name}_{kind}") for kind in ("function", "step"))
        setattr(parallel, f"{name}_function", own.made(name, function, step))


def _given(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a Keras method that differ from its defaults, by name.

    Tools that patch Keras's methods read these arguments, and add others by name. Such tools (mlflow) expect the data, `x`, as
    the first positional argument.
    """
    parameters = inspect.signature(method).parameters.values()
    of_keras = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    return {p.name: arguments[p.name] for p in of_keras if arguments[p.name] is not p.default}
