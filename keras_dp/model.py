"""DataParallelModel: one Keras model, trained on several devices with one device's result."""

import contextlib
import dataclasses
import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dp import announcement, choices, keras_seams, losses, metrics, placement
from keras_dp.batches import (
    BATCH_SIZE,
    Slice,
    as_tensor,
    count_rows,
    cut,
    known_rows,
    own_rows,
    row_spec,
    rows_of_batches,
    whole_batch,
)
from keras_dp.calls import JoinedModel
from keras_dp.choices import refuse_unknown
from keras_dp.feeding import HOST, SliceFeed
from keras_dp.local_batch_norm import local_batch_norm
from keras_dp.lockstep import all_variables
from keras_dp.optimizer import DataParallelOptimizer, sending_gradients_as
from keras_dp.partition.explanation import Explanation, explain
from keras_dp.partition.picture import bytes_in_words
from keras_dp.partition.step import partition_of
from keras_dp.partition.user_lines import user_line_of_error
from keras_dp.partitioned_step import arguments_of, run_on_slices
from keras_dp.plain_training import PlainTraining
from keras_dp.stamping import stamp_towers
from keras_dp.sync_batch_norm import batch_norms, is_synchronized
from keras_dp.tower_result import TowerResult, Variables, all_or_nothing, assign, combine, of_last_rows
from keras_dp.tower_step import TowerStep, asks_for_rows, unknown_rows_explained
from keras_dp.whole_tensors import WholeTensors
from keras_dp.wrapper import has_own_compile, has_own_step, refuse_strategy

Tensor = Any
Logs = dict[str, Any]
Result = TypeVar("Result")

logger = logging.getLogger("keras_dp")


def _on_towers(tower_step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step on N slices in a compiled function; running eagerly, it is the inner model's own step on the whole batch."""
    name = tower_step.__name__.removesuffix("_step")

    @functools.wraps(tower_step)
    def step(model: "DataParallelModel", data: Any) -> Any:
        if model._is_eager():
            if name == "train" and model.optimizer is not None and model.optimizer.accumulate == "rows":
                raise ValueError(
                    'accumulate="rows" weights the gradients of towers, and run_eagerly=True runs none. Compile with '
                    'accumulate="batches", or without run_eagerly. Received: run_eagerly=True'
                )
            return model._on_one_device(getattr(model.inner_model, f"{name}_step"), data)
        if tf.executing_eagerly():
            # It was called directly, with a batch.
            model._follow_inner_model()
            getattr(model, f"make_{name}_function")()
            return getattr(model, f"{name}_function")([data] if name == "predict" else iter([data]))
        if model._engine == "partition":
            return model._run_partitioned(name, data)
        return tower_step(model, data)

    return step


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
        loss_scope: "tower" computes the loss from each tower's own rows, "batch" from the whole gathered batch, on every
            tower. "auto" takes "tower" for the losses of Keras, and "batch" for a loss or a `compute_loss` of your own,
            whose rows might depend on each other. If they do not, "tower" is as exact, and cheaper.
        gradient_dtype: "bfloat16" or "float16" to send gradients from the towers in half the bytes, at the cost of exactness;
            those of a worker's towers are summed in the variable's dtype, those of several workers on the way, in this one.
            None sends them as they are.
        engine: "towers" splits Keras's own steps; "partition" traces any step, of Keras or of your own, as one device runs it,
            and splits its graph by rows. "auto" takes "partition" for models with a step or a `fit` of their own, and for
            batches with `whole` tensors.
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
        engine: choices.Engine = "auto",
        whole: Sequence[str] = (),
    ):
        refuse_unknown("engine", engine, choices.Engine)
        refuse_unknown("batch_norm", batch_norm, choices.BatchNorm)
        refuse_unknown("loss_scope", loss_scope, choices.LossScope)
        refuse_unknown("gradient_dtype", gradient_dtype, choices.GradientType)
        super().__init__(inner_model)
        self._batch_norm = batch_norm
        self._loss_scope = loss_scope
        self._gradient_dtype = gradient_dtype
        self._whole = self._chosen_whole(whole)
        self._engine = self._chosen_engine(engine)
        self._whole = dataclasses.replace(self._whole, scalars=self._engine == "partition")
        self._devices = tuple(placement.tower_devices(devices))
        self._wanted_device = None if parameter_device is None else placement.parameter_device(parameter_device)
        self._told_eager = False
        self._announced = False
        self._told_gathered = False
        self._told_known_rows = False
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
            engine=engine,
            whole=whole,
        )
        self._place_variables()
        self._follow_inner_model()

    def __repr__(self) -> str:
        return f"<DataParallelModel name={self.name}, built={self.built}, {announcement.towers(self._devices)}>"

    @_on_towers
    def train_step(self, data: Any) -> Logs:
        """One step of training on N slices: stamp the towers, sum, apply once."""
        variables = Variables.of(self.inner_model)
        towers = self._stamp("train", variables, data)
        gradients = self.optimizer.combine(
            [tower.gradients for tower in towers], variables.weights, gradient_dtype=self._gradient_dtype
        )
        gradients, total = all_or_nothing((gradients, combine(variables, towers, data, self._workers.collectives)))
        assign(variables, total)
        if variables.weights:
            self.optimizer.apply(gradients, variables.weights, data[0].batch_rows)
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return self._update_metrics(variables, towers, data, total)

    @_on_towers
    def test_step(self, data: Any) -> Logs:
        """One step of evaluation on N slices."""
        variables = Variables.of(self.inner_model)
        towers = self._stamp("test", variables, data)
        total = all_or_nothing(combine(variables, towers, data, self._workers.collectives))
        assign(variables, total)
        return self._update_metrics(variables, towers, data, total)

    @_on_towers
    def predict_step(self, data: Any) -> Any:
        """The outputs for N slices, in the order of the global batch."""
        variables = Variables.of(self.inner_model)
        towers = self._stamp("predict", variables, data)
        assign(variables, combine(variables, towers, data, self._workers.collectives))
        with tf.device(HOST):
            outputs = [tower.y_pred for tower in towers]
            return whole_batch(outputs, data) if self._predicts_shard else self._of_all_workers(outputs, data)

    def _chosen_whole(self, names: Sequence[str]) -> WholeTensors:
        if isinstance(names, str) or not all(isinstance(name, str) and name.strip("/") for name in names):
            raise ValueError(f'`whole` lists names of tensors of a batch, such as whole=["edges"]. Received: whole={names!r}')
        return WholeTensors(tuple(names))

    def _chosen_engine(self, engine: choices.Engine) -> str:
        own = has_own_step(self.inner_model)
        if engine == "towers" and own:
            raise ValueError(
                'engine="towers" splits the steps of Keras, and the model has a train_step(), test_step() or predict_step() of '
                'its own. Leave `engine` out, or give "partition". '
                f"Received: {self.inner_model.name!r} of type {type(self.inner_model).__name__}"
            )
        if engine == "towers" and self._whole.names:
            raise ValueError(
                'engine="towers" cuts all tensors of a batch into slices; leave `engine` out for tensors that stay whole. '
                f"Received: whole={list(self._whole.names)}"
            )
        is_refused = own or self._own_loops or self._whole.names
        return "partition" if engine == "partition" or (engine == "auto" and is_refused) else "towers"

    def _run_partitioned(self, step: str, slices: Sequence[Slice]) -> Any:
        """Runs a step ("train", "test" or "predict") of the inner model as it is, partitioned by rows."""
        run = self._plain_step(step)
        collectives = self._workers.collectives
        known = {variable.value.ref() for variable in all_variables(self.inner_model)} if collectives.count > 1 else set()
        result, partition = self._with_known_rows(
            lambda rows: run_on_slices(run, slices, self._whole, rows, self.devices, self._home(), collectives),
            self._feed.known_rows,
        )
        if collectives.count > 1:
            self._synchronize_others([variable for variable in partition.variables if variable.ref() not in known])
            if step == "predict" and self._predicts_shard:
                result = own_rows(result, slices)
        if step == "train" and not self._told_gathered:
            self._tell_gathered(explain(partition, self.devices, self._home(), self._batch_rows or BATCH_SIZE))
        return result

    def _plain_step(self, name: str) -> Callable[[Any], Any]:
        """A step ("train", "test" or "predict") of the inner model, with whatever is to differ from one device."""
        model = self.inner_model
        run = getattr(model, f"{name}_step")
        optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
        synchronized = [layer for layer in batch_norms(model) if is_synchronized(layer)]
        accumulates_rows = self.optimizer is not None and self.optimizer.accumulate == "rows"
        is_spread = len({placement.home(variable) for variable in model.trainable_weights}) > 1

        def step(data: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for layer in synchronized:
                    # Keras would take E[x^2] - E[x]^2, which is wrong beside a large mean. Partitioned, all are synchronized.
                    stack.enter_context(keras_seams.replaced(layer, "synchronized", False))
                if self._batch_norm != "sync":
                    stack.enter_context(local_batch_norm(self._batch_norm, synchronized))
                if name == "train" and self.optimizer is not None and (accumulates_rows or is_spread):
                    rows = count_rows(data, whole=self._whole) if accumulates_rows else None
                    stack.enter_context(self.optimizer.in_step(rows))
                stack.enter_context(sending_gradients_as(self._gradient_dtype, optimizers))
                return run(data)

        return step

    def _with_known_rows(self, attempt: Callable[[int | None], Result], rows: int | None) -> Result:
        """Tries a step with any number of rows, and, if it asks for the number while it is traced, with the data's own."""
        try:
            with unknown_rows_explained():
                return attempt(None)
        except (TypeError, ValueError) as error:
            if rows is None or not asks_for_rows(error):
                raise
            line = user_line_of_error(error)
        result = attempt(rows)
        if not self._told_known_rows:
            self._told_known_rows = True
            logger.warning(
                "The model runs on one device: a step asks for the number of rows while it is traced%s, and towers have "
                "different ones. keras.ops.shape(x)[0] in place of x.shape[0] leaves it on the towers.",
                f" ({line})" if line else "",
            )
        return result

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
        partition = self._with_known_rows(
            lambda rows: partition_of(*arguments_of(run, slices, self._whole, rows), self.devices, self._home()), batch_rows
        )
        return explain(partition, self.devices, self._home(), batch_rows)

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

    def _stamp(self, step: str, variables: Variables, slices: Sequence[Slice]) -> list[TowerResult]:
        """Runs a step ("train", "test" or "predict") of the inner model as one tower on every device."""
        shared = variables.read(self.inner_model) | {"loss_scale": self._loss_scale() if step == "train" else None}
        sum_device = self._sum_device(variables)

        def stamp(compute_loss: Callable[..., Tensor]) -> list[TowerResult]:
            tower = TowerStep(
                self.inner_model, variables, compute_loss, self._batch_norm, self._gradient_dtype, self._jit_compile
            )
            with unknown_rows_explained():
                return stamp_towers(
                    tower.trace(step),
                    *(shared, slices, self.devices, sum_device, variables.native(), self._workers.collectives),
                )

        if self._loss_scope == "tower":
            return stamp(losses.tower_loss)
        if step != "predict" and (self._loss_scope == "batch" or not losses.split_by_rows(self.inner_model)):
            return stamp(losses.gathered_loss)
        try:
            return stamp(losses.rowwise_loss)
        except losses.NotSplitByRowsError:
            return stamp(losses.gathered_loss)

    def _sum_device(self, variables: Variables) -> str | None:
        return placement.home(variables.weights[0]) if variables.weights else self._devices[0]

    def _loss_scale(self) -> Tensor | None:
        one = tf.ones(())
        scale = self.optimizer.scale_loss(one)
        return None if scale is one else scale

    def _update_metrics(
        self, variables: Variables, towers: list[TowerResult], slices: Sequence[Slice], total: TowerResult
    ) -> Logs:
        model = self.inner_model
        keras_seams.loss_tracker(model).update_state(total.loss, sample_weight=slices[0].batch_rows)
        for variable, gain in zip(variables.metrics, total.metrics, strict=True):
            if gain is not None:
                variable.assign_add(gain if variable.value.dtype.is_floating else tf.round(gain))
        if metrics.add_up(model, towers[0].y_pred):
            return model.get_metrics_result()
        outputs = keras.tree.flatten(self._of_all_workers([tower.y_pred for tower in towers], slices))
        notes = self._of_all_workers([tower.annotations for tower in towers], slices)
        annotated = [keras_seams.annotate(output, note) for output, note in zip(outputs, notes, strict=True)]
        y_pred = keras.tree.pack_sequence_as(towers[0].y_pred, annotated)
        data = [part.data for part in slices]
        if not metrics.overrides_compute_metrics(model):
            # Keras's own does not look at x.
            data = [(None, *part[1:]) if isinstance(part, tuple | list) else None for part in data]
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._of_all_workers(data, slices))
        return model.compute_metrics(x, y, y_pred, sample_weight)

    def _of_all_workers(self, parts: Sequence[Any], slices: Sequence[Slice]) -> Any:
        """What the towers of all workers computed for their slices, put together to what it is for the global batch."""
        collectives = self._workers.collectives

        def put_together(leaf: Any) -> Any:
            if leaf is None or leaf.shape.rank != 0:
                return None if leaf is None else collectives.gather(leaf)
            return collectives.sum(leaf if leaf.dtype.is_floating else of_last_rows(leaf, slices))

        return keras.tree.map_structure(put_together, whole_batch(parts, slices))

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
        rows = known_rows(batch, self._whole) if self._engine == "partition" else None
        self._with_known_rows(functools.partial(self._build_for, batch), rows)
        keras_seams.seed_states(model)
        self._synchronize_workers()

    def _build_for(self, batch: Any, rows: int | None) -> None:
        """Builds the inner model, its metrics and its optimizer for batches of a number of rows, or, if that is None, any."""
        model, stays = self.inner_model, iter(self._whole.of(batch))
        specs = keras.tree.map_structure(lambda leaf: row_spec(leaf, None if next(stays) else rows), batch)
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
        facts |= {"loss_scope": self._loss_scope, "gradient_dtype": self._gradient_dtype}
        return facts | {"steps_per_execution": self.steps_per_execution}

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
