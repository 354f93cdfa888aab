"""Compute the moving statistics of batch normalizations anew after training."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp.batch_normalization.modes import Moments, batch_norm_mode
from keras_dp.batch_normalization.synchronized import batch_norms, is_synchronized
from keras_dp.batches.input_strategy import InputStrategy, empty_prediction_refused
from keras_dp.batches.slicing import row_spec
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.devices.available import tower_devices
from keras_dp.keras_internals import keras_models
from keras_dp.model import DataParallelModel
from keras_dp.steps.partitioned import run_on_slices
from keras_dp.workers.group import current_workers
from keras_dp.workers.synchronization import synchronize
from keras_dp.wrapping.wrapper import refuse_strategy


def recalibrate_batch_norm(
    model: keras.Model, data: Any, steps: int | None = None, batch_size: int | None = None, verbose: Any = "auto"
) -> None:
    """Sets the moving statistics of a model's batch normalizations to the exact moments of their inputs over data.

    During training they are exponential averages over batches that older weights have seen. Here the weights stand still: the
    model runs in training mode over the data, where each `BatchNormalization` normalizes with the moments of the batch (or of
    the slice, where `batch_norm` says so) as it did in training, and the moments of all batches are pooled: the mean of means
    and, by the law of total variance, the variance of the whole population, weighted with the entries that each is taken over
    ("PreciseBN": Wu and Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 3, arXiv 2105.07576).

    Frozen layers, which take no moments, keep their statistics. Nothing else in the model changes but the state of random
    generators; dropout is active, as in training. Masked entries do not count; sample weights do not matter.

    >>> import keras, keras_dp, numpy as np
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
    >>> keras_dp.recalibrate_batch_norm(model, np.array([[1.0], [2.0], [6.0]]), batch_size=2, verbose=0)
    >>> [round(float(moment.numpy()[0]), 3) for moment in (model.layers[0].moving_mean, model.layers[0].moving_variance)]
    [3.0, 4.667]

    Args:
        model: a `DataParallelModel`, whose towers are used, or any other `keras.Model`, for which all devices are; compiled or
            not, built or not.
        data: what `predict` takes: arrays, or batches in a dataset, a generator or a `PyDataset`, of x, (x, y) or
            (x, y, sample_weight); a tuple of arrays is read in the same way. Batches as large as in training, shuffled as
            there, give what normalization was like in training.
        steps: how many batches to take; None for all of them.
        batch_size: rows of a batch, for arrays; 32 if None.
        verbose: "auto", 0, 1 or 2: the progress bar, as in `predict`.

    Raises:
        ValueError: if no layer takes moments, a recurrent layer is stateful, or there are no data.
    """
    refuse_strategy()
    if isinstance(model, DataParallelModel):
        # As for the first tower's statistics, normalization is local: only what becomes of its moments differs.
        mode = "sync" if model.tower_steps.batch_norm == "sync" else "local"
        model, devices = model.inner_model, model.devices
    elif isinstance(model, keras.Model):
        mode, devices = "sync", tower_devices(None)
    else:
        raise ValueError(f"recalibrate_batch_norm() takes a keras.Model. Received: {model!r} of type {type(model)}")
    _refuse_stateful(model)
    if isinstance(data, tuple):
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    with empty_prediction_refused("recalibrate_batch_norm"), _compiled_functions(), current_workers().reporting_lost_workers():
        calls_by_layer = _MomentsModel(model, devices, mode).predict(data, batch_size, verbose, steps)
    layers = {layer: calls for layer, calls in zip(batch_norms(model), calls_by_layer, strict=True) if calls}
    if not layers:
        raise ValueError(
            "No layer of the model took moments in training mode: it has no BatchNormalization, or all of them are frozen. Set "
            "layer.trainable = True for those whose statistics are to be computed anew. "
            f"Received: {model.name!r} with {len(calls_by_layer)} BatchNormalization layers"
        )
    for layer, (mean, variance) in [(layer, _population(calls)) for layer, calls in layers.items()]:
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(variance)
        if layer.renorm:
            layer.moving_stddev.assign(np.sqrt(variance + layer.epsilon))


def _refuse_stateful(model: keras.Model) -> None:
    for layer in keras_models.flatten_layers(model):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"The layer {layer.name!r} is stateful: what it gives depends on the batches before, and recalibration leaves "
                "its state as it is. Build it with stateful=False."
            )


class _MomentsModel(keras.Model):
    """Predicts, in place of outputs, the moments that the batch normalizations of a model take of each global batch."""

    def __init__(self, model: keras.Model, devices: Sequence[str], batch_norm: str):
        super().__init__()
        self.model = model
        self.devices = list(devices)
        self.batch_norm = batch_norm
        self.collectives = current_workers().collectives
        self.feed = InputStrategy(self.devices, lambda: False, self.prepare, self.collectives)
        # XLA would compile the step of several devices for one of them.
        self.jit_compile = False

    @property
    def distribute_strategy(self) -> InputStrategy:
        """Feeds the towers: Keras's trainer takes it for a `tf.distribute` strategy."""
        return self.feed

    def prepare(self, batch: Any) -> None:
        """Creates the model's variables before the step is traced."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(row_spec, batch))
        keras_models.build(self.model, x)
        synchronize(current_workers(), [*self.model.variables, *keras_models.seed_states(self.model)])

    def predict_step(self, slices: Any) -> list[list[Moments]]:
        """For each batch normalization, for each of its calls, the moments of one batch, with an axis for the batches."""
        moments, _ = run_on_slices(
            self.moments_of, slices, WholeTensors(), None, self.devices, self.devices[0], self.collectives
        )
        return keras.tree.map_structure(lambda moment: tf.reshape(moment, (1, -1)), moments)

    def moments_of(self, data: Any) -> list[list[Moments]]:
        """The moments of a batch. Of all variables, those of random generators alone are updated."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        layers = batch_norms(self.model)
        synchronized = [layer for layer in layers if is_synchronized(layer)]
        with keras.StatelessScope() as scope, batch_norm_mode(self.batch_norm, synchronized) as taken:
            keras_models.call_model(self.model, x, training=True)
        for seed in keras_models.seed_states(self.model):
            drawn = scope.get_current_value(seed)
            if drawn is not None:
                seed.assign(drawn)
        return [taken.get(layer, []) for layer in layers]


def _population(calls: Sequence[Moments]) -> tuple[Any, Any]:
    """Mean and variance, (C,) each, of all entries of n batches, from the moments of n rows of each call of a layer."""
    divisor, mean, variance = (np.concatenate(moment).astype("float64") for moment in zip(*calls, strict=True))
    # Keras's masked moments divide by n + epsilon; n is a whole number.
    count = np.rint(divisor)
    total = np.sum(count, axis=0)
    if not np.all(total):
        raise ValueError(f"All of the data are masked where a BatchNormalization takes its moments. Received: counts {total}")
    mean = divisor * mean / np.maximum(count, 1)
    population_mean = np.sum(count * mean, axis=0) / total
    squares = divisor * variance + count * (mean - population_mean) ** 2
    return population_mean, np.sum(squares, axis=0) / total


@contextlib.contextmanager
def _compiled_functions() -> Iterator[None]:
    """Steps are partitioned as graphs, also where TensorFlow was told to run functions eagerly."""
    eager = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(eager)
