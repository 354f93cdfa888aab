"""Compile an inner model and the towers around it, and follow the inner model when it is compiled by itself."""

import abc
import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dp.devices.available import are_gpus
from keras_dp.keras_internals import keras_models, keras_optimizers
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.steps.towers import TowerSteps
from keras_dp.wrapping.plain_training import PlainTraining
from keras_dp.wrapping.wrapper import ModelWrapper, has_own_compile, refuse_strategy


class CompiledWrapper(ModelWrapper):
    """Keeps the towers compiled like the inner model, whether the wrapper, the model itself or code before it compiled it.

    Args:
        inner_model: see `ModelWrapper`.
    """

    _steps: TowerSteps

    def __init__(self, inner_model: keras.Model):
        super().__init__(inner_model)
        self._plain_training = PlainTraining(inner_model)
        # A function, not the metric itself: Keras would track it as this model's own, and refuses that on a quantized model.
        self._compiled_with: Callable[[], keras.metrics.Metric | None] = lambda: None
        self._combining_optimizer: DataParallelOptimizer | None = None
        self._optimizer_to_clone: DataParallelOptimizer | None = None
        self._jit_compile_to_clone: bool | None = None
        self._traced_layers: dict[keras.Layer, tuple[type, str | None]] = {}
        self._is_read_by_keras = False

    @property
    @abc.abstractmethod
    def parameter_device(self) -> str:
        """The home of the variables."""

    @abc.abstractmethod
    def _towers_compiled(self) -> None:
        """Is called when the inner model is compiled, so that its steps are made anew."""

    @abc.abstractmethod
    def _forget_traces(self) -> None:
        """Makes all steps retrace."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the inner model, and the towers around it.

        Args:
            *args: the arguments of the inner model's `compile`. The optimizer may be any Keras optimizer, or a
                `DataParallelOptimizer` around one.
            **kwargs: its keyword arguments. `jit_compile=True` makes XLA compile each tower's operations between two
                exchanges, for its own device. The default, "auto", is Keras's: on GPUs, True if all layers support XLA.
        """
        refuse_strategy()
        self._optimizer_to_clone = self._jit_compile_to_clone = None
        if has_own_compile(self.inner_model):
            optimizer = self._compile_as_it_is(args, kwargs)
            is_told = kwargs["jit_compile"] != "auto" if "jit_compile" in kwargs else None
        else:
            optimizer = self._compile(*args, **kwargs)
            given = inspect.signature(keras.Model.compile).bind_partial(self, *args, **kwargs).arguments
            is_told = given.get("jit_compile", "auto") != "auto"
        self.inner_model.train_function = self._plain_training
        if optimizer is not None:
            # Mixed precision may have wrapped the optimizer in a LossScaleOptimizer.
            optimizer.inner_optimizer = self.inner_model.optimizer
            self._combining_optimizer = optimizer
        self._compile_towers(is_told)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the inner model, and the towers around it, from a configuration that `get_compile_config()` returned."""
        arguments = keras.saving.deserialize_keras_object(config)
        cloned, jit_compile = self._optimizer_to_clone, self._jit_compile_to_clone
        if cloned is not None and arguments.get("optimizer") is not None:
            arguments["optimizer"] = cloned._alike(arguments["optimizer"])
        self.compile(**arguments)
        # A configuration has Keras's choice in the place of "auto".
        self._compile_towers()
        if jit_compile is not None:
            self.jit_compile = jit_compile
        if self.inner_model.built and self.inner_model.optimizer is not None:
            self.inner_model.optimizer.build(self.inner_model.trainable_variables)

    def _alike(self, inside: keras.Model) -> Any:
        """Returns a wrapper of another model, with the settings of this one and of its optimizer."""
        other = super()._alike(inside)
        optimizer = self.optimizer if self.compiled else None
        if self.compiled and inside.compiled:
            other.jit_compile = self.jit_compile
        if optimizer is not None and inside.compiled:
            other.optimizer = optimizer._alike(inside.optimizer)
        else:
            # Keras compiles a clone after it has made it.
            other._optimizer_to_clone = optimizer
            other._jit_compile_to_clone = self.jit_compile if self.compiled else None
        return other

    @property
    def optimizer(self) -> Any:
        """A `DataParallelOptimizer` around the inner model's optimizer; None if it has none."""
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
    def jit_compile(self) -> bool:
        """Whether XLA compiles each tower's operations, between the exchanges."""
        # Keras would make XLA compile the step of several devices for one of them.
        return self._steps.jit_compile and not self._is_read_by_keras

    @jit_compile.setter
    def jit_compile(self, value: Any) -> None:
        if not self._is_read_by_keras and bool(value) != self._steps.jit_compile:
            self._steps.jit_compile = bool(value)
            self._forget_traces()

    @contextlib.contextmanager
    def _read_by_keras(self) -> Iterator[None]:
        """Makes Keras's trainer see a model that XLA does not compile."""
        before, self._is_read_by_keras = self._is_read_by_keras, True
        try:
            yield
        finally:
            self._is_read_by_keras = before

    def _compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> DataParallelOptimizer | None:
        if optimizer is not None and not isinstance(optimizer, DataParallelOptimizer):
            optimizer = DataParallelOptimizer(optimizer)
        elif optimizer is not None and optimizer.parameter_device not in (None, self.parameter_device):
            raise ValueError(
                "The model and the optimizer have different parameter devices. Give the device to the model alone. Received: "
                f"{self.parameter_device!r} for the model and {optimizer.parameter_device!r} for the optimizer."
            )
        self.inner_model.compile(optimizer and optimizer.inner_optimizer, *args, **kwargs)
        return optimizer

    def _compile_as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DataParallelOptimizer | None:
        """Compiles an inner model that overrides `compile`."""

        def inner(value: Any) -> Any:
            return value.inner_optimizer if isinstance(value, DataParallelOptimizer) else value

        self.inner_model.compile(*map(inner, args), **{name: inner(value) for name, value in kwargs.items()})
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, DataParallelOptimizer)]
        innermost = self.inner_model.optimizer and keras_optimizers.innermost(self.inner_model.optimizer)
        taken = (optimizer for optimizer in given if keras_optimizers.innermost(optimizer) is innermost)
        return next(taken, self.optimizer)

    def _follow_inner_model(self) -> None:
        """Recompiles the towers if the inner model was compiled directly; retraces them if its layers were converted."""
        model = self.inner_model
        if model.compiled and keras_models.loss_tracker(model) is not self._compiled_with():
            self._compile_towers()
        kinds = {layer: (type(layer), layer.quantization_mode) for layer in keras_models.flatten_layers(model)}
        if any(kinds.get(layer, kind) != kind for layer, kind in self._traced_layers.items()):
            self._forget_traces()
        self._traced_layers = kinds

    def _compile_towers(self, is_told: bool | None = None) -> None:
        """Compiles the towers as the inner model is compiled.

        Args:
            is_told: whether its user chose `jit_compile`; None if that must be found out. Keras's own choice is for GPUs.
        """
        model = self.inner_model
        is_told = keras_models.was_told_to_use_xla(model) if is_told is None else is_told
        self._steps.jit_compile = bool(model.jit_compile) and (is_told or are_gpus(self._steps.inputs.devices))
        with self._read_by_keras():
            super().compile(
                self.optimizer,
                run_eagerly=model.run_eagerly,
                steps_per_execution=model.steps_per_execution,
                jit_compile=False,
                auto_scale_loss=False,
            )
        self._forget_traces()
        self._compiled_with = weakref.ref(keras_models.loss_tracker(model))
        self._towers_compiled()
