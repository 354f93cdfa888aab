"""DataParallelModel: one Keras model, trained on several devices with one device's result."""

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dp import announcement, choices, keras_seams, placement
from keras_dp.batches import (
    BATCH_SIZE,
    Slice,
    as_tensor,
    cut,
    known_rows,
    own_rows,
    own_spec,
    refuse_other_rows,
    row_spec,
    rows_of_batches,
)
from keras_dp.calls import JoinedModel
from keras_dp.choices import refuse_unknown
from keras_dp.feeding import HOST, SliceFeed
from keras_dp.lockstep import all_variables
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.partition.explanation import Explanation, explain
from keras_dp.partition.picture import bytes_in_words
from keras_dp.partition.step import partition_of
from keras_dp.partitioned_step import arguments_of, run_on_slices
from keras_dp.plain_step import plain_step
from keras_dp.plain_training import PlainTraining
from keras_dp.sync_batch_norm import batch_norms
from keras_dp.unknown_rows import UnknownRows
from keras_dp.whole_tensors import WholeTensors
from keras_dp.wrapper import has_own_compile, has_own_step, refuse_strategy

Tensor = Any
Logs = dict[str, Any]
Result = TypeVar("Result")

logger = logging.getLogger("keras_dp")


class DataParallelModel(JoinedModel):
    """Trains a Keras model on several devices at once, with the result of one device.

    >>> import keras, keras_dp
    >>> inner_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> parallel = keras_dp.DataParallelModel(inner_model, devices=1)
    >>> parallel.compile("sgd", "mse")

    `fit`, `evaluate`, `predict`, the `*_on_batch` methods and callbacks work as on any Keras model. Each global batch of B
    rows is cut into N slices; a tower on each device computes its part of the loss of the global batch, and the gradients
    are summed and applied once, where the variables live.

    The inner model is the product: its variables are the ones that are trained, and `save`, `export` and checkpoints are its
    own, so that what is saved loads without keras_dp.

    Args:
        inner_model: any `keras.Model`, built or not.
        devices: None for all GPUs, or all logical CPUs if there is no GPU; an integer n for the first n of those; or names
            such as "GPU:0".
        parameter_device: where the variables live, and where gradients are summed and applied: None for where the variables
            are; a device's name, to which they are moved; or "sharded" for each on one of the towers' devices, balanced by
            bytes.
        batch_norm: "sync" normalizes with the moments of the global batch, as one device does. "local" normalizes each slice
            with its own moments and keeps the moving statistics of the global batch; "first" keeps those of the first tower.
        loss_scope: has no effect any more, and warns if it is not "auto": whatever a loss does with the rows of a batch, it
            is the loss of the global batch.
        gradient_dtype: "bfloat16" or "float16" to send gradients from the towers in half the bytes, at the cost of exactness;
            those of a worker's towers are summed in the variable's dtype, those of several workers on the way, in this one.
            None sends them as they are.
        whole: names of tensors of a batch that are not cut into slices, since they have other rows than the batch, such as the
            edges of graphs beside their nodes, or are the same for all rows: keys of dictionaries and indices of tuples, or
            several of those that follow each other, such as "edges" or "0/edges".

    Raises:
        ValueError: if the model cannot be trained on towers, or there are no such devices.
    """

    def __init__(
        self,
        inner_model: keras.Model,
        devices: int | Sequence[str] | None = None,
        parameter_device: str | None = None,
        batch_norm: choices.BatchNorm = "sync",
        loss_scope: choices.LossScope = "auto",
        gradient_dtype: choices.GradientType = None,
        whole: Sequence[str] = (),
    ):
        refuse_unknown("batch_norm", batch_norm, choices.BatchNorm)
        refuse_unknown("loss_scope", loss_scope, choices.LossScope)
        refuse_unknown("gradient_dtype", gradient_dtype, choices.GradientType)
        if loss_scope != "auto":
            warnings.warn(
                "`loss_scope` has no effect any more: every loss, rows compared with each other or not, is that of the global "
                f"batch, of which towers compute their parts. Leave it out. Received: loss_scope={loss_scope!r}",
                DeprecationWarning,
                stacklevel=2,
            )
        super().__init__(inner_model)
        self._batch_norm = batch_norm
        self._gradient_dtype = gradient_dtype
        self._whole = self._chosen_whole(whole)
        self._devices = tuple(placement.tower_devices(devices))
        self._wanted_device = None if parameter_device is None else placement.parameter_device(parameter_device)
        self._told_eager = False
        self._announced = False
        self._told_gathered = False
        self._unknown_rows = UnknownRows()
        self._batch_rows: int | None = None
        self._plain_training = PlainTraining(inner_model)
        self._jit_compile = False
        # Keras would track a metric as this model's own, and refuses that once a model is quantized.
        self._compiled_with: Callable[[], keras.metrics.Metric | None] = lambda: None
        self._combining_optimizer: DataParallelOptimizer | None = None
        self._traced_layers: dict[keras.Layer, tuple[type, str | None]] = {}
        self._feed = SliceFeed(self._devices, self._is_eager, self._prepare, self._workers.collectives, self._whole)
        self._remember(
            devices=self.devices,
            parameter_device=parameter_device,
            batch_norm=batch_norm,
            loss_scope=loss_scope,
            gradient_dtype=gradient_dtype,
            whole=whole,
        )
        self._place_variables()
        self._follow_inner_model()

    def __repr__(self) -> str:
        return f"<DataParallelModel name={self.name}, built={self.built}, {announcement.towers(self._devices)}>"

    def train_step(self, data: Any) -> Logs:
        """One step of training on N slices."""
        return self._step("train", data)

    def test_step(self, data: Any) -> Logs:
        """One step of evaluation on N slices."""
        return self._step("test", data)

    def predict_step(self, data: Any) -> Any:
        """The outputs for N slices, in the order of the global batch."""
        return self._step("predict", data)

    def _step(self, name: choices.Step, data: Any) -> Any:
        """A step on N slices in a compiled function; running eagerly, it is the inner model's own step on the whole batch."""
        if self._is_eager():
            if name == "train" and self.optimizer is not None and self.optimizer.accumulate == "rows":
                raise ValueError(
                    'accumulate="rows" weights the gradients of towers, and run_eagerly=True runs none. Compile with '
                    'accumulate="batches", or without run_eagerly. Received: run_eagerly=True'
                )
            return self._on_one_device(getattr(self.inner_model, f"{name}_step"), data)
        if tf.executing_eagerly():
            # It was called directly, with a batch.
            with tf.device(HOST):
                data = keras.tree.map_structure(as_tensor, data)
            refuse_other_rows(data, self._whole)
            self._follow_inner_model()
            getattr(self, f"make_{name}_function")()
            return getattr(self, f"{name}_function")([data] if name == "predict" else iter([data]))
        return self._run_on_towers(name, data)

    def _chosen_whole(self, names: Sequence[str]) -> WholeTensors:
        if isinstance(names, str) or not all(isinstance(name, str) and name.strip("/") for name in names):
            raise ValueError(f'`whole` lists names of tensors of a batch, such as whole=["edges"]. Received: whole={names!r}')
        return WholeTensors(tuple(names))

    def _run_on_towers(self, step: choices.Step, slices: Sequence[Slice]) -> Any:
        """Runs a step ("train", "test" or "predict") of the inner model as it is, partitioned by rows."""
        run = self._plain_step(step)
        collectives = self._workers.collectives
        known = {variable.value.ref() for variable in all_variables(self.inner_model)} if collectives.count > 1 else set()
        result, partition = self._unknown_rows.trace(
            lambda rows: run_on_slices(
                run, slices, self._whole, rows, self.devices, self._home(), collectives, self._jit_compile
            ),
            self._feed.known_rows,
        )
        if collectives.count > 1:
            self._synchronize_others([variable for variable in partition.variables if variable.ref() not in known])
            if step == "predict" and self._predicts_shard:
                result = own_rows(result, slices)
        if step == "train" and not self._told_gathered:
            self._tell_gathered(explain(partition, self.devices, self._home(), self._batch_rows or BATCH_SIZE))
        return result

    def _plain_step(self, name: choices.Step) -> Callable[[Any], Any]:
        optimizer = self.optimizer if name == "train" else None
        return plain_step(self.inner_model, name, optimizer, self._batch_norm, self._gradient_dtype, self._whole)

    def _tell_gathered(self, explanation: Explanation) -> None:
        """Warns, once, of operations for which many rows are gathered."""
        for once in explanation.notable():
            self._told_gathered = True
            logger.warning(
                "%s gathers %s of rows in each step, and is computed once: %s%s. An operation on each row by itself, or a sum "
                "over rows, would stay on the towers; print(parallel.explain(batch)) lists all that is gathered.",
                *(once.type, bytes_in_words(once.bytes or 0), once.reason, f" ({once.line})" if once.line else ""),
            )

    def explain(self, batch: Any, step: choices.Step = "train") -> Explanation:
        """Says how a step is partitioned: where towers meet, how many bytes that takes, which operations are computed once.

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
        slices = self._slices_of(batch)
        run, batch_rows = self._plain_step(step), int(slices[0].batch_rows)
        partition = self._unknown_rows.trace(
            lambda rows: partition_of(*arguments_of(run, slices, self._whole, rows), self.devices, self._home()), batch_rows
        )
        return explain(partition, self.devices, self._home(), batch_rows, self._jit_compile)

    def _slices_of(self, batch: Any) -> Sequence[Slice]:
        """The N slices of an eager batch, with all variables created."""
        self._follow_inner_model()
        with tf.device(HOST):
            batch = keras.tree.map_structure(as_tensor, batch)
        self._prepare(batch)
        with tf.device(HOST):
            return cut(batch, self.num_towers, whole=self._whole)

    def _home(self) -> str:
        """The device of whatever a partitioned step does once: where the first variable lives."""
        weights = self.inner_model.weights
        return placement.home(weights[0]) if weights else self._devices[0]

    def _announce(self, arguments: dict[str, Any]) -> None:
        rows = None if self._feed.takes_shards else rows_of_batches(arguments.get("x"), arguments.get("batch_size"))
        self._batch_rows = rows
        if self._announced or arguments.get("verbose") == 0 or self._is_eager() or not self._workers.is_chief:
            return
        self._announced = True
        batch_norm = self._batch_norm if batch_norms(self.inner_model) else None
        logger.info(announcement.training(self._devices, self._workers.count, rows, batch_norm))

    def summary(
        self,
        line_length: int | None = None,
        positions: Any = None,
        print_fn: Callable[[str], Any] | None = None,
        expand_nested: bool = False,
        show_trainable: bool = False,
        layer_range: Any = None,
    ) -> None:
        """Prints the inner model's summary, and on which devices the towers are; see `keras.Model.summary`."""
        self.inner_model.summary(line_length, positions, print_fn, expand_nested, show_trainable, layer_range)
        (print_fn or print)(f" Devices: {announcement.towers(self._devices)}")

    def _prepare(self, batch: Any) -> None:
        """Creates all variables, before any step is traced: TensorFlow traces a function twice that makes some."""
        model = self.inner_model
        if has_own_step(model):
            self._place_variables()
            self._synchronize_workers()
            return
        rows = known_rows(batch, self._whole)
        self._unknown_rows.trace(functools.partial(self._build_for, batch), rows)
        keras_seams.seed_states(model)
        self._synchronize_workers()

    def _build_for(self, batch: Any, rows: int | None) -> None:
        """Builds the inner model, its metrics and its optimizer for batches of a number of rows, or, if that is None, any."""
        model, stays = self.inner_model, iter(self._whole.of(batch))
        specs = keras.tree.map_structure(lambda leaf: own_spec(leaf) if next(stays) else row_spec(leaf, rows), batch)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(specs)
        keras_seams.build(model, x)
        self._place_variables()
        if self.compiled and (y is not None or (model.loss is None and keras_seams.compile_metrics(model) is None)):
            keras_seams.symbolic_build(model, specs)

    def _place_variables(self) -> None:
        """Moves the variables of a built model to where they should live."""
        if self._wanted_device is not None and keras_seams.is_built(self.inner_model):
            placement.place(self.inner_model, self._wanted_device, self.devices)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "devices": self.devices,
            "parameter_device": self.parameter_device,
            "batch_norm": self._batch_norm,
        }
        return facts | {"gradient_dtype": self._gradient_dtype, "steps_per_execution": self.steps_per_execution}

    def _is_eager(self) -> bool:
        is_eager = self.run_eagerly or tf.config.functions_run_eagerly()
        if is_eager and self._workers.count > 1:
            raise ValueError(
                "run_eagerly=True runs the inner model on one device of one worker, to be debugged. Run the script without "
                f"TF_CONFIG for that. Received: run_eagerly=True on {self._workers.count} workers"
            )
        return is_eager

    def _on_one_device(self, step: Any, data: Any) -> Any:
        if not self._told_eager:
            self._told_eager = True
            logger.warning(
                "run_eagerly: the inner model runs on one device, without towers, so that it can be debugged line by line. "
                'The result is that of batch_norm="sync".'
            )
        return step(data)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the inner model with the arguments of its own `compile`, and the towers around it.

        Args:
            *args: of the inner model's `compile`. An optimizer is any of Keras, or a `DataParallelOptimizer` around one.
            **kwargs: the same. `jit_compile=True` has XLA compile each tower's operations for its own device, between the sums
                over the towers; the default, "auto", compiles none.
        """
        refuse_strategy()
        self._jit_compile = kwargs.get("jit_compile") is True
        if has_own_compile(self.inner_model):
            self._compile_as_it_is(args, kwargs)
        else:
            self._compile(*args, **kwargs)

    def _compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        if optimizer is not None and not isinstance(optimizer, DataParallelOptimizer):
            optimizer = DataParallelOptimizer(optimizer)
        elif optimizer is not None and optimizer.parameter_device not in (None, self.parameter_device):
            raise ValueError(
                "The model and the optimizer have different parameter devices; give it to the model alone. Received: "
                f"{self.parameter_device!r} for the model and {optimizer.parameter_device!r} for the optimizer."
            )
        self.inner_model.compile(optimizer and optimizer.inner_optimizer, *args, **kwargs)
        self._use_compiled(optimizer)

    def _compile_as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles an inner model that has a `compile` of its own."""

        def inner(value: Any) -> Any:
            return value.inner_optimizer if isinstance(value, DataParallelOptimizer) else value

        self.inner_model.compile(*map(inner, args), **{name: inner(value) for name, value in kwargs.items()})
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, DataParallelOptimizer)]
        innermost = self.inner_model.optimizer and keras_seams.innermost(self.inner_model.optimizer)
        taken = (optimizer for optimizer in given if keras_seams.innermost(optimizer) is innermost)
        self._use_compiled(next(taken, self.optimizer))

    def _use_compiled(self, optimizer: DataParallelOptimizer | None) -> None:
        """Takes up how the inner model was compiled."""
        self.inner_model.train_function = self._plain_training
        if optimizer is not None:
            # Mixed precision may have wrapped it in a LossScaleOptimizer.
            optimizer.inner_optimizer = self.inner_model.optimizer
            self._combining_optimizer = optimizer
        self._compile_towers()

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the inner model as it was when it gave this `get_compile_config()`, and the towers around it."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.inner_model.built and self.inner_model.optimizer is not None:
            self.inner_model.optimizer.build(self.inner_model.trainable_variables)

    def _follow_inner_model(self) -> None:
        """Compiles the towers, if the inner model was compiled by itself; traces them anew, if its layers were converted."""
        model = self.inner_model
        if model.compiled and keras_seams.loss_tracker(model) is not self._compiled_with():
            self._compile_towers()
        kinds = {layer: (type(layer), layer.quantization_mode) for layer in keras_seams.flatten_layers(model)}
        if any(kinds.get(layer, kind) != kind for layer, kind in self._traced_layers.items()):
            self._forget_traces()
        self._traced_layers = kinds

    def _compile_towers(self) -> None:
        model = self.inner_model
        optimizer = self.optimizer
        if optimizer is not None and self._wanted_device is not None:
            placement.place_state(model.optimizer)
        super().compile(
            optimizer,
            run_eagerly=model.run_eagerly,
            steps_per_execution=model.steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self._forget_traces()
        self._compiled_with = weakref.ref(keras_seams.loss_tracker(model))
        self._is_synchronized = False
        self._synchronized.clear()

    @property
    def optimizer(self) -> Any:
        """A `DataParallelOptimizer` around the inner model's optimizer; None if that is compiled without one."""
        inner_optimizer = self.inner_model.optimizer
        if inner_optimizer is None:
            return None
        if self._combining_optimizer is None or self._combining_optimizer.inner_optimizer is not inner_optimizer:
            self._combining_optimizer = DataParallelOptimizer(inner_optimizer)
        return self._combining_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, DataParallelOptimizer):
            self._combining_optimizer, optimizer = optimizer, optimizer.inner_optimizer
        if getattr(self.inner_model, "optimizer", None) is not optimizer:
            self.inner_model.optimizer = optimizer

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
        """Where the variables live: a device, several if they are spread, or "sharded"."""
        if self._wanted_device is not None:
            return self._wanted_device
        homes = {placement.home(variable): None for variable in self.inner_model.weights}
        return ", ".join(homes) or placement.available_devices()[0]

    @property
    def distribute_strategy(self) -> SliceFeed:
        """What Keras's trainer takes for a `tf.distribute` strategy: it feeds the towers."""
        return self._feed

    @property
    def jit_compile(self) -> bool:
        """False: XLA would compile the step of several devices for one of them."""
        return False

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        pass
