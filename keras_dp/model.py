"""DataParallelModel: one Keras model, trained on several devices with one device's result."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams, losses, metrics, placement
from keras_dp.batches import Slice, as_tensor, concatenate, own_rows, row_spec
from keras_dp.feeding import HOST, SliceFeed
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.stamping import stamp_towers
from keras_dp.tower_step import TowerResult, TowerStep, Variables

Tensor = Any
Logs = dict[str, Any]

logger = logging.getLogger("keras_dp")


class DataParallelModel(keras.Model):
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
        loss_scope: "tower" computes the loss from each tower's own rows, "batch" from the whole gathered batch, on every
            tower. "auto" takes "tower" for the losses of Keras, and "batch" for a loss or a `compute_loss` of your own,
            whose rows might depend on each other. If they do not, "tower" is as exact, and cheaper.

    Raises:
        ValueError: if the model cannot be trained on towers, or there are no such devices.
    """

    def __init__(self, inner_model: keras.Model, devices: int | Sequence[str] | None = None, loss_scope: str = "auto"):
        _refuse_model(inner_model)
        if loss_scope not in ("auto", "tower", "batch"):
            raise ValueError(f'`loss_scope` must be "auto", "tower" or "batch". Received: loss_scope={loss_scope!r}')
        super().__init__(name=inner_model.name, dtype=inner_model.dtype_policy)
        self.inner_model = inner_model
        self.loss_scope = loss_scope
        self._devices = tuple(placement.tower_devices(devices))
        self._told_eager = False
        self._feed = SliceFeed(len(self._devices), self._is_eager, self._prepare)
        self.built = inner_model.built

    def train_step(self, data: Any) -> Logs:
        """One step of training on N slices: stamp the towers, sum, apply once."""
        if self._is_eager():
            return self._on_one_device(self.inner_model.train_step, data)
        variables = Variables.of(self.inner_model)
        towers = self._stamp("train", variables, data)
        gradients = self.optimizer.combine([tower.gradients for tower in towers], variables.weights)
        total = _combine(towers)
        with _after_all(gradients, total):
            if variables.weights:
                self.optimizer.apply(gradients, variables.weights)
            _assign(variables, total)
            return self._update_metrics(variables, towers, data, total)

    def test_step(self, data: Any) -> Logs:
        """One step of evaluation on N slices."""
        if self._is_eager():
            return self._on_one_device(self.inner_model.test_step, data)
        variables = Variables.of(self.inner_model)
        towers = self._stamp("test", variables, data)
        total = _combine(towers)
        with _after_all(total):
            _assign(variables, total)
            return self._update_metrics(variables, towers, data, total)

    def predict_step(self, data: Any) -> Any:
        """The outputs for N slices, in the order of the global batch."""
        if self._is_eager():
            return self._on_one_device(self.inner_model.predict_step, data)
        towers = self._stamp("predict", Variables.of(self.inner_model), data)
        with tf.device(HOST):
            return _whole_batch([tower.y_pred for tower in towers], data)

    def _stamp(self, step: str, variables: Variables, slices: Sequence[Slice]) -> list[TowerResult]:
        """Runs a step ("train", "test" or "predict") of the inner model as one tower on every device."""
        shared = variables.read() | {"loss_scale": self._loss_scale() if step == "train" else None}
        sum_device = placement.home(variables.weights[0]) if variables.weights else self._devices[0]

        def stamp(loss_scope: str) -> list[TowerResult]:
            tower_step = TowerStep(self.inner_model, variables, loss_scope)
            return stamp_towers(getattr(tower_step, step), shared, slices, self.devices, sum_device)

        if self.loss_scope != "auto":
            return stamp(self.loss_scope)
        if step != "predict" and not losses.split_by_rows(self.inner_model):
            return stamp("batch")
        try:
            return stamp("tower")
        except losses.NotSplitByRows:
            return stamp("batch")

    def _loss_scale(self) -> Tensor | None:
        one = tf.ones(())
        scale = self.optimizer.scale_loss(one)
        return None if scale is one else scale

    def _update_metrics(self, variables: Variables, towers: list[TowerResult], slices: Sequence[Slice], total: TowerResult) -> Logs:
        model = self.inner_model
        keras_seams.loss_tracker(model).update_state(total.loss, sample_weight=slices[0].batch_rows)
        for variable, gain in zip(variables.metrics, total.metrics, strict=True):
            if gain is not None:
                variable.assign_add(gain if variable.value.dtype.is_floating else tf.round(gain))
        if metrics.add_up(model, towers[0].y_pred):
            return model.get_metrics_result()
        y_pred = _whole_batch([tower.y_pred for tower in towers], slices)
        masks = _whole_batch([tower.mask for tower in towers], slices)
        y_pred = keras.tree.map_structure(keras_seams.set_mask, y_pred, masks)
        x, y, sample_weight = keras_seams.unpack_batch(_whole_batch([s.data for s in slices], slices))
        return model.compute_metrics(x, y, y_pred, sample_weight)

    def _prepare(self, batch: Any) -> None:
        """Creates all variables, before any step is traced: TensorFlow traces a function twice that makes some."""
        model = self.inner_model
        specs = keras.tree.map_structure(row_spec, batch)
        x, y, _ = keras_seams.unpack_batch(specs)
        if not keras_seams.is_built(model):
            model(keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x))
        if self.compiled and (y is not None or (model.loss is None and keras_seams.compile_metrics(model) is None)):
            keras_seams.symbolic_build(model, specs)
        keras_seams.seed_states(model)
        self.built = True

    def _is_eager(self) -> bool:
        return self.run_eagerly or tf.config.functions_run_eagerly()

    def _on_one_device(self, step: Any, data: Any) -> Any:
        if not self._told_eager:
            self._told_eager = True
            logger.warning(
                "run_eagerly: the inner model runs on one device, without towers, so that it can be debugged line by line. "
                "The result is the same."
            )
        return step(data)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        """One step of training on one global batch; see `keras.Model.train_on_batch`."""
        return super().train_on_batch(*self._host_batch(x, y, sample_weight), **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        """One step of evaluation on one global batch; see `keras.Model.test_on_batch`."""
        return super().test_on_batch(*self._host_batch(x, y, sample_weight), **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """The outputs for one global batch; see `keras.Model.predict_on_batch`."""
        return super().predict_on_batch(*self._host_batch(x))

    def _host_batch(self, *batch: Any) -> tuple[Any, ...]:
        """A batch of arrays as tensors on the host, where it is cut into slices."""
        with tf.device(HOST):
            batch = keras.tree.map_structure(as_tensor, batch)
        if not self._is_eager():
            self._prepare(batch)
        return batch

    def compile(self, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> None:
        """Compiles the inner model with the same arguments as `keras.Model.compile`, and the towers around it.

        Args:
            optimizer: any Keras optimizer, or a `DataParallelOptimizer` around one.
            *args: the further arguments of the inner model's `compile`.
            **kwargs: the same. `jit_compile=True` does not reach the step of several devices, which XLA would put on one.
        """
        _refuse_strategy()
        if isinstance(optimizer, DataParallelOptimizer):
            parallel_optimizer = optimizer
            self.inner_model.compile(optimizer.inner_optimizer, *args, **kwargs)
            # Mixed precision may have wrapped it in a LossScaleOptimizer.
            parallel_optimizer.inner_optimizer = self.inner_model.optimizer
        else:
            self.inner_model.compile(optimizer, *args, **kwargs)
            parallel_optimizer = DataParallelOptimizer(self.inner_model.optimizer)
        super().compile(
            parallel_optimizer,
            run_eagerly=self.inner_model.run_eagerly,
            steps_per_execution=self.inner_model.steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self.loss = self.inner_model.loss

    @property
    def devices(self) -> list[str]:
        """The N devices that run towers."""
        return list(self._devices)

    @property
    def num_towers(self) -> int:
        """N, the number of towers."""
        return len(self._devices)

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

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The inner model's outputs, on one device."""
        if keras_seams.accepts_training(self.inner_model):
            return self.inner_model(inputs, training=training)
        return self.inner_model(inputs)

    @property
    def layers(self) -> list[keras.Layer]:
        """The inner model's layers."""
        return self.inner_model.layers

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        """The inner model's metrics."""
        return self.inner_model.metrics

    def get_metrics_result(self) -> Logs:
        """The inner model's metric results."""
        return self.inner_model.get_metrics_result()


def _combine(towers: list[TowerResult]) -> TowerResult:
    """What the global batch does to losses, state, seeds and metrics."""

    def combine(kind: str) -> list[Tensor | None]:
        return [_combine_values(values) for values in zip(*(getattr(tower, kind) for tower in towers), strict=True)]

    return TowerResult(
        y_pred=None,
        loss=tf.add_n([tower.loss for tower in towers]),
        state=combine("state"),
        # The first tower draws from the seeds themselves, so that its new seeds are those of one device.
        seeds=towers[0].seeds,
        metrics=combine("metrics"),
    )


def _combine_values(values: Sequence[Tensor | None]) -> Tensor | None:
    """Shares add up; whole numbers and flags, which are not shared out, are the last tower's, which always has rows."""
    if values[0] is None or not values[0].dtype.is_floating:
        return values[-1]
    return tf.add_n(values)


def _assign(variables: Variables, total: TowerResult) -> None:
    for variable, value in zip(variables.state + variables.seeds, total.state + total.seeds, strict=True):
        if value is not None:
            variable.assign(value)


@contextlib.contextmanager
def _after_all(*structures: Any) -> Iterator[None]:
    """Holds all updates back until everything is computed: a step that fails changes nothing."""
    leaves = tf.nest.flatten(structures, expand_composites=True)
    with tf.control_dependencies([tf.group(*(leaf for leaf in leaves if leaf is not None))]):
        yield


def _whole_batch(parts: list[Any], slices: Sequence[Slice]) -> Any:
    """The rows of all towers after each other, without borrowed ones."""
    return concatenate([own_rows(part, batch_slice) for part, batch_slice in zip(parts, slices, strict=True)])


def _refuse_strategy() -> None:
    if tf.distribute.has_strategy():
        raise ValueError(
            "keras_dp distributes the model itself and cannot run inside a tf.distribute scope. Remove `with strategy.scope():`. "
            f"Received: {tf.distribute.get_strategy()}"
        )


def _refuse_model(model: Any) -> None:
    _refuse_strategy()
    if not isinstance(model, keras.Model):
        raise ValueError(f"DataParallelModel wraps a keras.Model. Received: {model!r} of type {type(model)}")
    if isinstance(model, DataParallelModel):
        raise ValueError(f"The model is wrapped in a DataParallelModel already. Received: {model.name!r}, use it as it is.")
    if model.distribute_strategy is not tf.distribute.get_strategy():
        raise ValueError(
            "The model was built inside a tf.distribute scope, so that its variables are mirrored already. Build it outside. "
            f"Received: {model.name!r}, built under {model.distribute_strategy}"
        )
    for name in ("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function"):
        if getattr(getattr(model, name), "__func__", None) is not getattr(keras.Model, name):
            raise ValueError(
                f"The model has its own {name}(), which cannot be cut into towers. Override compute_loss() instead, and use "
                "keras_dp.cross_tower_sum() in layers and losses where all rows of the global batch count. "
                f"Received: {model.name!r} of type {type(model).__name__}"
            )
