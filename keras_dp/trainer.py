"""Define TowerTrainer, which holds all that a DataParallelModel has beside the state of the model inside."""

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.input_strategy import InputStrategy
from keras_dp.batches.nesting import map_leaves
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import BATCH_SIZE, Slice, as_array, is_cut, own_rows
from keras_dp.batches.whole_tensors import chosen_whole
from keras_dp.devices import variable_homes
from keras_dp.devices.available import are_gpus, available_devices, parameter_device_name, tower_devices
from keras_dp.devices.communication import has_collectives
from keras_dp.devices.trial_copies import refuse_broken_copies
from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.keras_optimizers import optimizers_of
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.reports.explain import warn_of_gathered_rows
from keras_dp.steps.towers import TowerSteps
from keras_dp.steps.trainer_functions import CalledStep, PredictFunction, StepFunction, running_step
from keras_dp.steps.verification import Verification
from keras_dp.workers.agreement import described_graph
from keras_dp.workers.group import current_workers
from keras_dp.workers.joint_calls import Call, calls_of
from keras_dp.wrapping.in_trace import in_trace, tracing
from keras_dp.wrapping.messages import Messages
from keras_dp.wrapping.one_state import own_of
from keras_dp.wrapping.own_training import is_own, own_function
from keras_dp.wrapping.plain_training import PlainTraining
from keras_dp.wrapping.refusals import refuse_keras_2

STEPS = {"fit": "train", "evaluate": "test", "predict": "predict"}
_KEPT_FUNCTIONS = 16  # of steps that a program calls by itself

logger = logging.getLogger("keras_dp")


class TowerTrainer:
    """Trains a model on towers, for a DataParallelModel around it, which is the model to Keras and to the user.

    Args:
        wrapper: the DataParallelModel.
        inside: the model inside it.
        options: the other arguments of the DataParallelModel.

    Attributes:
        inside: the model inside.
        devices: the names of the devices.
        of_towers: the names of the devices of the N towers: each device has one for each of its slices, one after the other.
        feed: the strategy that cuts batches.
        train_function: the functions that Keras's trainer calls, for towers.
        uses: how often something was asked for that runs on towers.
        loops: the names of the methods that run, the innermost last.
        methods_on_towers: names of methods of the user's class that have used towers, or were told not to.
        workers: the workers.
        messages: the messages that its user has been told.
        history: the history of the last `fit`, and its copy for the model inside.
    """

    def __init__(self, wrapper: keras.Model, inside: keras.Model, options: choices.Options):
        self._wrapper = weakref.ref(wrapper)
        self.inside = inside
        self.devices = tuple(tower_devices(options.devices))
        wanted = options.parameter_device
        self._wanted_device = None if wanted is None else parameter_device_name(wanted)
        refuse_broken_copies((*self.devices, self._wanted_device or self.devices[0]))
        own_class: Any = type(wrapper).__bases__[-1]
        self._around = own_class._around
        self.workers = current_workers()
        self._joint_calls = calls_of(self.workers)
        self.train_function: Any = None
        self.test_function: Any = None
        self.predict_function: Any = None
        self.uses = 0
        self.methods_on_towers: set[str] = set()
        self.predicts_shard = False
        self.history: Any = None, None
        self.messages = Messages()
        self._eager: dict[str, bool] = {}  # whether a step's function runs eagerly
        self._made: dict[str, Any] = {}  # the functions that were made last
        self._called: dict[Any, CalledStep] = {}  # steps that a program calls by itself
        self.loops: list[str] = []
        self._is_read_by_keras = False
        # A function, not the metric itself: Keras would track it as this model's own, and refuses that on a quantized model.
        self._compiled_with: Callable[[], keras.metrics.Metric | None] = lambda: None
        self._plain_training = PlainTraining(inside)
        self._combining_optimizer: DataParallelOptimizer | None = None
        self._traced_layers: dict[keras.Layer, tuple[type, str | None]] = {}
        self.feed = InputStrategy(
            self.devices,
            self.is_eager,
            self._prepare,
            self._run_on_slices,
            self.call,
            self.workers.collectives,
            chosen_whole(options.whole),
        )
        self.feed.feeds_trainer = False
        self.steps = TowerSteps(inside, self.feed, options, lambda: getattr(self, "optimizer", None), self._variables_made)
        self.cut_into(options.slices_per_device)
        self._verification = Verification(options.verify, self.steps)
        self._place_variables()
        self.follow()
        # Following the model forgets its functions.
        vars(self).update({f"{step}_function": own_function(inside, step) for step in STEPS.values()})

    def wrap(self, model: keras.Model) -> Any:
        """Returns another model, wrapped with the same arguments, and its optimizer, too."""
        parallel = self._around(model, dataclasses.replace(self.steps.options, devices=list(self.devices)))
        if model.compiled and self.inside.compiled:
            parallel.jit_compile = self.steps.jit_compile
            if model.optimizer is not None and self.optimizer is not None:
                parallel.optimizer = own_of(self.optimizer).wrap(model.optimizer)
        return parallel

    def cut_into(self, slices: int) -> None:
        """Cuts each device's rows into a number of slices, from the next step on."""
        self.steps.options = options = dataclasses.replace(self.steps.options, slices_per_device=slices)
        self.feed.shares = Shares.of_devices(options.rows, self.devices, slices)
        self.of_towers = self.feed.devices = tuple(device for device in self.devices for _ in range(slices))
        self.steps.has_collectives = has_collectives(options.communication, self.of_towers, self.workers.count)
        self.steps.pack_copies = are_gpus(self.devices) or self.steps.has_collectives
        self.forget_traces()

    @property
    def tower_steps(self) -> TowerSteps:
        """The model's steps on N towers, in its current state."""
        self.follow()
        return self.steps

    @property
    def distribute_strategy(self) -> InputStrategy:
        """The strategy that cuts batches, which Keras's trainer takes for a `tf.distribute` strategy."""
        return self.feed

    @property
    def num_towers(self) -> int:
        """N, the number of towers."""
        return len(self.of_towers)

    @property
    def parameter_device(self) -> str:
        """The home of the variables: a device, several devices if they are spread, or "sharded"."""
        if self._wanted_device is not None:
            return self._wanted_device
        homes = {variable_homes.home(variable): None for variable in self.inside.weights}
        return ", ".join(homes) or available_devices()[0]

    @property
    def optimizer(self) -> DataParallelOptimizer | None:
        """A `DataParallelOptimizer` around the model's optimizer; None if it has none. Before `compile`, it is no attribute."""
        optimizer = self.inside.optimizer
        if optimizer is None or isinstance(optimizer, DataParallelOptimizer):
            return optimizer
        if self._combining_optimizer is None or own_of(self._combining_optimizer).inside is not optimizer:
            self._combining_optimizer = DataParallelOptimizer(optimizer)
        return self._combining_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.inside.optimizer = self.taken(optimizer)

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles each tower's operations, between the exchanges."""
        # Keras would make XLA compile the step of several devices for one of them.
        return self.steps.jit_compile and not self._is_read_by_keras

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        if bool(value) != self.steps.jit_compile:
            self.steps.jit_compile = bool(value)
            self.forget_traces()

    def taken(self, optimizer: Any) -> Any:
        """Returns the user's optimizer, for Keras, and remembers a `DataParallelOptimizer` around it.

        Raises:
            ValueError: if it has another parameter device than the model.
        """
        refuse_keras_2("optimizer", optimizer)
        if not isinstance(optimizer, DataParallelOptimizer):
            return optimizer
        own = own_of(optimizer)
        if own.parameter_device not in (None, self.parameter_device):
            raise ValueError(
                "The model and the optimizer have different parameter devices. Give the device to the model alone. Received: "
                f"{self.parameter_device!r} for the model and {own.parameter_device!r} for the optimizer."
            )
        self._combining_optimizer = optimizer
        return own.inside

    def compiled(self, is_told: bool | None = None) -> None:
        """Compiles the towers as the model inside is compiled.

        Args:
            is_told: whether its user chose `jit_compile`; None if that must be found out. Keras's own choice is for GPUs.
        """
        model, optimizer = self.inside, getattr(self.inside, "optimizer", None)
        if self._combining_optimizer is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            own = own_of(self._combining_optimizer)
            if optimizer.inner_optimizer is own.inside:
                # Keras has wrapped it for mixed precision.
                self._combining_optimizer = own.wrap(optimizer)
        is_told = keras_models.was_told_to_use_xla(model) if is_told is None else is_told
        self.steps.jit_compile = bool(model.jit_compile) and (is_told or are_gpus(self.feed.devices))
        # Steps that run are made anew, and follow the model.
        self._compiled_with = weakref.ref(keras_models.loss_tracker(model))
        self._joint_calls.forget()
        self.forget_traces()

    def warn_of_plain_training(self) -> None:
        """Makes the model inside warn when it is fitted by itself, until it is compiled by itself."""
        vars(self.inside)["train_function"] = self._plain_training

    def follow(self) -> None:
        """Recompiles the towers if the model inside was compiled directly; retraces them if its layers were converted."""
        model = self.inside
        if model.compiled and keras_models.loss_tracker(model) is not self._compiled_with():
            self.compiled()
        before = self._traced_layers
        kinds = {layer: (type(layer), layer.quantization_mode) for layer in keras_models.flatten_layers(model)}
        self._traced_layers = kinds
        if any(kinds.get(layer, kind) != kind for layer, kind in before.items()):
            self.forget_traces()

    @contextlib.contextmanager
    def read_by_keras(self) -> Iterator[None]:
        """Makes Keras's trainer see a model that XLA does not compile."""
        before, self._is_read_by_keras = self._is_read_by_keras, True
        try:
            yield
        finally:
            self._is_read_by_keras = before

    def is_eager(self) -> bool:
        """Returns whether steps run eagerly, on one device.

        Raises:
            ValueError: if there are several workers.
        """
        is_eager = self.inside.run_eagerly or tf.config.functions_run_eagerly()
        if is_eager and self.workers.count > 1:
            raise ValueError(
                "run_eagerly=True is for debugging: it runs the inner model on one device of one worker. Run the script "
                f"without TF_CONFIG. Received: run_eagerly=True on {self.workers.count} workers"
            )
        return is_eager

    def updates(self) -> int:
        """Returns how many updates the optimizers of the model have made; 0 while a function is traced."""
        return sum(int(one.iterations) for one in optimizers_of(self.inside)) if tf.executing_eagerly() else 0

    def on_towers(self, parallel: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a step of the model as the wrapper shows it.

        In the trace of a step it is the model's own, also after the program has set another one in its place.

        Args:
            parallel: the wrapper, which lives as long as the step.
            step: the model's own step.
        """

        @functools.wraps(step, updated=())
        def on_towers(*args: Any, **kwargs: Any) -> Any:
            if in_trace():
                return step(*args, **kwargs)
            self.uses += 1
            if args and is_cut(args[0]):
                return self._run_on_slices(on_towers, args[0])
            if self.is_eager():
                return self._on_one_device(step, *args, **kwargs)
            return self.feed.run(on_towers, args, kwargs)

        on_towers.wrapper = parallel  # type: ignore[attr-defined]
        on_towers.step_of_model = step  # type: ignore[attr-defined]
        return on_towers

    def call(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step that a program calls by itself, eagerly, in a function that is compiled for towers.

        The function is made anew where the program has changed an attribute of the model that is a number or a text, or froze a
        layer: an eager step would see that.
        """
        with tf.device(HOST):
            args, kwargs = map_leaves(as_array, (tuple(args), dict(kwargs)))
        self.follow()
        key = getattr(step, "step_of_model", step), keras_models.plain_attributes(self.inside)
        if key not in self._called:
            if len(self._called) == _KEPT_FUNCTIONS:
                self._called.pop(next(iter(self._called)))
            self._called[key] = CalledStep(step, self.steps)
        return self._called[key](args, kwargs)

    def must_make(self, name: choices.Step, force: bool) -> bool:
        """Returns whether a step's function has to be made: by force, for the first time, or since eagerness has changed."""
        function = getattr(self, f"{name}_function")
        is_ours = function is self._made.get(f"{name}_function")
        return force or function is None or (is_ours and self._eager[name] != self.is_eager())

    def made(self, name: choices.Step, function: Any, step: Any) -> Any:
        """Returns the function of a step for towers, from the function that Keras's trainer has made."""
        self._eager[name] = self.is_eager()
        self._verification.forget(name)
        if not self._eager[name] and name == "predict":
            function = PredictFunction(function, self.steps, self._verification)
        elif not self._eager[name]:
            function = StepFunction(function, step, self.steps, self.inside.steps_per_execution, name, self._verification)
        self._made[f"{name}_function"] = function
        return function

    def predict_shard(self, wanted: bool) -> None:
        """Makes `predict` return the rows of this worker alone, or all."""
        if self.predicts_shard != wanted:
            self.predicts_shard = wanted
            self.predict_function = None

    def begin(self, call: Call, arguments: dict[str, Any]) -> None:
        """Agrees with the other workers on a call, and on the state with which it begins."""
        self._joint_calls.begin(call, self.inside, self._wrapper(), arguments)

    def forget_traces(self) -> None:
        """Makes all steps retrace, including those of a running `fit`, `evaluate` or `predict`."""
        self.train_function = self.test_function = self.predict_function = None
        self._called.clear()
        for method in self.loops:
            getattr(self._wrapper(), f"make_{STEPS[method]}_function")()

    def _run_on_slices(self, step: Callable[..., Any], slices: Sequence[Slice]) -> Any:
        """Runs a step on N slices of a batch, in the function that is being traced."""
        self.uses += 1
        name: Any = running_step(self.steps) or getattr(step, "__name__", "step").removesuffix("_step")
        known = self._joint_calls.variables_of(self.inside)
        shards = name == "predict" and self.predicts_shard
        result, partition = self.steps.run(name, slices, step, "shard" if shards else "all")
        nodes = partition.traced.nodes
        self._joint_calls.agree_on_graph(name, lambda: described_graph(nodes, partition.variables, self.inside))
        self._joint_calls.synchronize_others(known, partition.variables)
        if name == "train" and not self.messages.has_told("gathered"):
            rows = partition.propagation.batch_rows or self.feed.usual_rows or BATCH_SIZE
            if warn_of_gathered_rows(partition, self.feed.devices, rows):
                self.messages.note("gathered")
        return own_rows(result, slices) if shards else result

    def _on_one_device(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and own_of(optimizer).accumulate == "rows" and step.__name__ == "train_step":
            raise ValueError(
                'accumulate="rows" weights the gradients of towers, and run_eagerly=True runs none. Compile with '
                'accumulate="batches", or without run_eagerly. Received: run_eagerly=True'
            )
        self.messages.runs_eagerly()
        with tracing():
            return step(*args, **kwargs)

    def has_own(self, function: str) -> bool:
        """Returns whether the program makes, or has set, a function of Keras's trainer, which then takes whole batches."""
        return is_own(self.inside, f"make_{function}") or getattr(self, function) not in (None, self._made.get(function))

    def _prepare(self) -> None:
        """Makes variables that exist ready for a step: in their places, and equal on all workers."""
        self._place_variables()
        self._joint_calls.synchronize(self.inside)

    def _variables_made(self) -> None:
        """Places the variables that the first trace of a step has made, before the second one."""
        self._place_variables()
        variable_homes.place_state(self.inside)

    def _place_variables(self) -> None:
        """Moves the variables of a built model, and the state of its optimizers, to the parameter device."""
        if self._wanted_device is not None and keras_models.is_built(self.inside):
            variable_homes.place(self.inside, self._wanted_device, self.devices)
            variable_homes.place_state(self.inside)
        if self.steps.forget_moved():
            self.forget_traces()
