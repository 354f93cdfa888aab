"""The few private names of Keras and TensorFlow that keras_dp must touch; tests/test_keras_seams.py guards each one.

Nothing else in the package imports `keras.src` or `tensorflow.python`, or reads an attribute of Keras that begins with an
underscore.
"""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.legacy.saving import legacy_h5_format
from keras.src.random import seed_generator
from keras.src.saving import saving_lib
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

Tensor = Any


class SavedAs:
    """What files of Keras and TensorFlow hold is the object that `_shown` returns, in place of this one."""

    def _shown(self) -> Any:
        raise NotImplementedError

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        shown: Any = self._shown() or super()
        return shown._trackable_children(*args, **kwargs)

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
        shown: Any = self._shown() or super()
        return shown._lookup_dependency(*args, **kwargs)

    @property
    def _default_save_signature(self) -> Any:
        return self._shown()._default_save_signature

    def _get_save_spec(self, dynamic_batch: bool = True) -> Any:
        if not dynamic_batch:
            raise ValueError(
                "TensorFlow Lite's converter cannot tell all inputs of a wrapped model. Give it the inner model: "
                "tf.lite.TFLiteConverter.from_keras_model(parallel.inner_model)."
            )
        return self._shown()._get_save_spec(dynamic_batch)

    @property
    def _build_shapes_dict(self) -> dict[str, Any] | None:
        """What TensorFlow Lite's converter knows the input by, if it is a single one of the model's `input_dtype`."""
        shown = self._shown()
        inputs = getattr(shown, "inputs", None)
        if inputs is None:
            return getattr(shown, "_build_shapes_dict", None)
        return {"input_shape": inputs[0].shape} if [x.dtype for x in inputs] == [shown.input_dtype] else None

    @_build_shapes_dict.setter
    def _build_shapes_dict(self, value: Any) -> None:
        pass  # Keras sets it on every layer.


def _of_shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Keras's that saves its first argument, or loads it, for the object that a `SavedAs` shows."""

    @functools.wraps(function)
    def of_shown(saved: Any, *args: Any, **kwargs: Any) -> Any:
        shown = saved._shown() if isinstance(saved, SavedAs) else None
        return function(saved if shown is None else shown, *args, **kwargs)

    return of_shown


# Whoever saves or loads models and weights, with whichever of Keras's functions, comes by here.
saving_lib._serialize_model_as_json = _of_shown(saving_lib._serialize_model_as_json)
saving_lib._save_state = _of_shown(saving_lib._save_state)
saving_lib._load_state = _of_shown(saving_lib._load_state)
legacy_h5_format.save_model_to_hdf5 = _of_shown(legacy_h5_format.save_model_to_hdf5)


def is_of_keras_2(value: Any) -> bool:
    """Whether an object is of Keras 2, which has packages of its own beside Keras 3."""
    return any(base.__module__.startswith(("tf_keras.", "tensorflow.python.keras.")) for base in type(value).__mro__)


def flatten_layers(model: keras.Model) -> list[keras.Layer]:
    """The model and every layer inside it, however deeply nested."""
    return list(model._flatten_layers())


def call_model(model: keras.Model, x: Any, training: bool) -> Any:
    """A model's outputs, as Keras calls it: with `training` if its `call` takes that."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def is_built(model: keras.Model) -> bool:
    """Whether the model and all its layers have their variables."""
    return all(layer.built for layer in flatten_layers(model))


def build(model: keras.Model, x: Any) -> None:
    """Creates the variables of a model, unless it has them, from the type specs of its inputs."""
    if is_built(model):
        return
    keras_backend.compute_output_spec(lambda: call_model(model, keras.tree.map_structure(_placeholder, x), training=False))


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Creates the variables of a compiled model's metrics, losses and optimizer, from the type specs of a batch.

    As `model._symbolic_build`, which knows dense tensors only.
    """
    has_metrics = model._compile_metrics is not None and not model._compile_metrics.built
    has_loss = model._compile_loss is not None and not model._compile_loss.built

    def forward() -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_placeholder, batch))
        y_pred = call_model(model, x, training=False)
        if has_metrics:
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        if has_loss:
            model._compute_loss(x, y, y_pred, sample_weight, training=False)

    if has_metrics or has_loss:
        keras_backend.compute_output_spec(forward)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


def _placeholder(spec: Any) -> Any:
    """A tensor of a type spec, dense, ragged or sparse, in the current graph."""
    if spec is None:
        return None
    if isinstance(spec, tf.TensorSpec):
        return tf.compat.v1.placeholder(spec.dtype, spec.shape)
    parts = tf.nest.map_structure(lambda part: tf.compat.v1.placeholder(part.dtype, part.shape), spec._component_specs)
    return spec._from_components(parts)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """The metric behind `loss` in the logs."""
    return model._loss_tracker


def compile_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """The container of the metrics given to `compile`; its `metrics` lists them once it is built."""
    return model._compile_metrics


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch with which a callback wants `fit` to begin; None for what `fit` was told."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Has `fit` begin with an epoch, from a callback, when training begins."""
    model._initial_epoch = epoch


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of the random generators that a model can draw from; the last is that of operations without a seed."""
    states = [generator.state for layer in flatten_layers(model) for generator in layer._seed_generators]
    # The first call makes that generator, with a seed from Python's random numbers: the user's own stay what they were.
    before = random.getstate()
    try:
        return [*states, seed_generator.global_seed_generator().state]
    finally:
        random.setstate(before)


def move_variable(variable: keras.Variable, device: str) -> None:
    """Puts the value of a variable on another device; the variable stays the same object, and the same for optimizers."""
    old = variable.value
    with tf.device(device):
        variable._value = tf.Variable(old, trainable=old.trainable, name=variable.name, dtype=old.dtype)
    variable._value._unique_id = old._unique_id


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """What a built optimizer, and those inside it, keep for single weights, as momenta: pairs of a variable and the weight."""
    pairs: list[tuple[keras.Variable, keras.Variable]] = []
    for part in [optimizer, *_optimizers_inside(optimizer)]:
        weights = part._trainable_variables if part.built else []
        for kept in vars(part).values():
            is_state = isinstance(kept, list) and len(kept) == len(weights) and kept is not weights
            if is_state and all(isinstance(variable, keras.Variable) for variable in kept):
                pairs += zip(kept, weights, strict=True)
    return pairs


@contextlib.contextmanager
def reduced_gradients(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Has an optimizer, and those inside it, take gradients for what they are: sums, which no `tf.distribute` reduces further.

    Keras would pass all of them through one operation, and so through one device.
    """
    with contextlib.ExitStack() as stack:
        for part in [optimizer, *_optimizers_inside(optimizer)]:
            stack.enter_context(replaced(part, "_all_reduce_sum_gradients", lambda pairs: pairs))
        yield


class SGDWithCoupledWeightDecay(keras.optimizers.SGD):
    """SGD that does not decay weights by itself: `update_step` sees to it."""

    def _apply_weight_decay(self, variables: Any) -> None:
        pass


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether a variable is not excluded from weight decay."""
    return bool(optimizer._use_weight_decay(variable))


def velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable] | None:
    """The velocities of an optimizer whose velocities hold the learning rate, once it is built; None for any other."""
    if isinstance(optimizer, keras.optimizers.SGD):
        kept = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        kept = getattr(optimizer, "_momentums", [])
    else:
        return None
    return [velocity for velocity in kept if velocity is not None]


def accumulators(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Where a built optimizer with `gradient_accumulation_steps` adds up gradients, but for those that overwrite variables."""
    pairs = zip(optimizer._trainable_variables, optimizer._accumulated_gradients, strict=True)
    return [accumulator for variable, accumulator in pairs if not getattr(variable, "overwrite_with_gradient", False)]


def batches_seen(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """How many batches an optimizer was given: those that it accumulates count one by one, as for its schedule."""
    return optimizer._iterations


def has_learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the learning rate is a variable that can be set, and not a schedule or a function."""
    return isinstance(optimizer._learning_rate, keras.Variable)


def learning_rate_schedule(optimizer: keras.optimizers.Optimizer) -> Any:
    """The schedule that gives the optimizer's learning rate; None if none does."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer inside those that wrap one."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def innermost_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizer inside those that wrap one, or all those inside a `MultiOptimizer`."""
    optimizer = innermost(optimizer)
    return list(getattr(optimizer, "optimizers", [optimizer]))


def _optimizers_inside(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(getattr(optimizer, "optimizers", ())) if inner is None else [inner, *_optimizers_inside(inner)]


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """The axes over which a BatchNormalization layer takes its moments."""
    return list(layer._reduction_axes)


own_moments = keras.layers.BatchNormalization._moments


def update_moving_statistics(layer: keras.layers.BatchNormalization, mean: Tensor, variance: Tensor) -> None:
    """Updates a layer's moving statistics with the moments of one batch, as the layer does in `call`."""
    if layer.renorm:
        layer._update_renorm_statistics(mean, variance)
        return
    for moving, moment in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(keras.ops.cast(moving, moment.dtype) * layer.momentum + moment * (1.0 - layer.momentum))


@contextlib.contextmanager
def updated_by(layer: keras.layers.BatchNormalization, moments: Callable[[], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Has a layer that updates its moving statistics in `call` do so with `moments()`, a mean and a variance, instead."""
    statistics = layer.non_trainable_variables
    is_ours = False

    def update(variable: keras.Variable, value: Tensor) -> None:
        nonlocal is_ours
        if is_ours:
            keras.Variable.assign(variable, value)
        elif variable is statistics[0]:
            # The layer assigns to each of them once: all at once, instead of the first.
            is_ours = True
            try:
                update_moving_statistics(layer, *moments())
            finally:
                is_ours = False

    with contextlib.ExitStack() as stack:
        for variable in statistics:
            stack.enter_context(replaced(variable, "assign", functools.partial(update, variable)))
        yield


@contextlib.contextmanager
def replaced_moments(moments: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Has every BatchNormalization take its moments from `moments(layer, inputs, mask)`."""
    with replaced(keras.layers.BatchNormalization, "_moments", _on_this_thread(moments, own_moments)):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of an object or a module another value, on one thread at a time."""
    with _replacing:
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def _on_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement on the thread that traces a step; what other threads do with Keras in the meantime is not changed."""
    tracing = threading.get_ident()

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == tracing else original)(*args, **kwargs)

    return either


# One thread at a time replaces names of Keras, so that each puts back what it found.
_replacing = threading.RLock()


def start_server(jobs: dict[str, list[str]], job: str, task: int, leader: str) -> None:
    """Starts TensorFlow in this process as one of several that run collectives together, and its gRPC server.

    As `tf.distribute.MultiWorkerMirroredStrategy` does, but without TensorFlow's coordination service, which gives up a worker
    that is silent for ten seconds.

    Args:
        jobs: addresses by job.
        job: the job of this process.
        task: its number in that job.
        leader: the name of the task in which the others look up who takes part.

    Raises:
        RuntimeError: if TensorFlow has started already.
        tf.errors.OpError: if the server cannot be started.
    """
    tensorflow = context.context()
    tensorflow.configure_collective_ops(leader, scoped_allocator_enabled_ops=(), device_filters=(f"/job:{job}/task:{task}",))
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
        default_session_config=tensorflow.config,
        job_name=job,
        task_index=task,
        protocol="grpc",
    )
    tensorflow.enable_collective_ops(server)
    tensorflow.ensure_initialized()


def abort_collectives(reason: str) -> None:
    """Has all collectives of this process fail, those that are under way and those to come."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)
