"""Recompute the moving statistics of batch normalizations after training."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp.batch_normalization.modes import Moments, batch_norm_mode
from keras_dp.batch_normalization.synchronized import batch_norms, is_synchronized
from keras_dp.batches.input_strategy import InputStrategy, empty_prediction_refused
from keras_dp.batches.other_rows import naming_other_rows
from keras_dp.batches.shares import Shares
from keras_dp.batches.whole_tensors import WholeTensors, chosen_whole
from keras_dp.devices.available import tower_devices
from keras_dp.keras_internals import keras_batch_norms, keras_models
from keras_dp.model import DataParallelModel
from keras_dp.partition.building.target import Target
from keras_dp.steps.partitioned import on_slices
from keras_dp.workers.group import current_workers
from keras_dp.workers.synchronization import synchronize
from keras_dp.wrapping.one_state import own_of
from keras_dp.wrapping.refusals import refuse_strategy


def recalibrate_batch_norm(
    model: keras.Model,
    data: Any,
    steps: int | None = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    whole: Sequence[str] | None = None,
) -> None:
    """Sets the moving statistics of a model's batch normalizations to the exact moments of their inputs over data.

    During training, these statistics are exponential averages over batches that older weights have seen. This function keeps
    the weights fixed, and runs the model in training mode over the data. Each `BatchNormalization` normalizes with the moments
    of the batch, or of the slice if `batch_norm` says so, as in training. The moments of all batches are then pooled: the mean
    of means and, by the law of total variance, the variance of the whole population. Each batch is weighted by the number of
    its entries ("PreciseBN": Wu and Johnson 2021, "Rethinking 'Batch' in BatchNorm", section 3, arXiv 2105.07576).

    Frozen layers take no moments, and keep their statistics. Of Keras's variables, only the statistics and the states of random
    generators change. A `tf.Variable` or a table that a layer writes changes as in any call of the model. Dropout is active, as
    in training. Masked entries and sample weights are ignored.

    >>> import keras, keras_dp, numpy as np
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
    >>> keras_dp.recalibrate_batch_norm(model, np.array([[1.0], [2.0], [6.0]]), batch_size=2, verbose=0)
    >>> [round(float(moment.numpy()[0]), 3) for moment in (model.layers[0].moving_mean, model.layers[0].moving_variance)]
    [3.0, 4.667]

    Args:
        model: a `DataParallelModel`, which runs on its towers, or any other `keras.Model`, which runs on all devices. It need
            not be compiled or built.
        data: the data, as for `predict`: arrays, or a dataset, a generator or a `PyDataset` of batches. A batch, or a tuple of
            arrays, is x, (x, y) or (x, y, sample_weight). Use the batch size and the shuffling of training, so that
            normalization is the same as in training.
        steps: the number of batches to take; None for all of them.
        batch_size: the number of rows in a batch, for arrays; 32 if None.
        verbose: "auto", 0, 1 or 2: the progress bar, as in `predict`.
        whole: names of tensors of a batch that are not cut into slices, as for `DataParallelModel`. None for those of the
            model, if it is a `DataParallelModel`; else for none.

    Raises:
        ValueError: if no layer takes moments, a recurrent layer is stateful, there are no data, or no tensor of a batch has a
            name in `whole`.
    """
    refuse_strategy()
    has_all_names, named = whole is not None, chosen_whole(() if whole is None else whole)
    if isinstance(model, DataParallelModel):
        # "first" normalizes as "local" does: they differ only in the moments that update the statistics.
        mode = "sync" if own_of(model).steps.options.batch_norm == "sync" else "local"
        named = named if has_all_names else own_of(model).steps.inputs.named
        model, devices, shares = own_of(model).inside, own_of(model).of_towers, own_of(model).feed.shares
    elif isinstance(model, keras.Model):
        mode, devices, shares = "sync", tower_devices(None), None
    else:
        raise ValueError(f"recalibrate_batch_norm() takes a keras.Model. Received: {model!r} of type {type(model)}")
    _refuse_stateful(model)
    if isinstance(data, tuple):
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    with empty_prediction_refused("recalibrate_batch_norm"), _compiled_functions(), current_workers().reporting_lost_workers():
        moments_model = _MomentsModel(model, devices, shares, mode, named, has_all_names)
        with naming_other_rows():
            calls_by_layer = moments_model.predict(data, batch_size, verbose, steps)
    layers = {layer: calls for layer, calls in zip(batch_norms(model), calls_by_layer, strict=True) if calls}
    if not layers:
        raise ValueError(
            "No layer of the model took moments in training mode: it has no BatchNormalization, or all of them are frozen. Set "
            "layer.trainable = True for the layers to recalibrate. "
            f"Received: {model.name!r} with {len(calls_by_layer)} BatchNormalization layers"
        )
    for layer, (mean, variance) in [(layer, _population(calls)) for layer, calls in layers.items()]:
        layer.moving_mean.assign(mean)
        layer.moving_variance.assign(variance)
        if keras_batch_norms.renormalizes(layer):
            layer.moving_stddev.assign(np.sqrt(variance + layer.epsilon))


def _refuse_stateful(model: keras.Model) -> None:
    for layer in keras_models.flatten_layers(model):
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"The layer {layer.name!r} is stateful: its outputs depend on earlier batches, and recalibration does not "
                "update its state. Build it with stateful=False."
            )


class _MomentsModel(keras.Model):
    """Predicts, in place of outputs, the moments that a model's batch normalizations take of each global batch."""

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        shares: Shares | None,
        batch_norm: str,
        whole: WholeTensors,
        has_all_names: bool,
    ):
        super().__init__()
        self.model = model
        self.devices = list(devices)
        self.batch_norm = batch_norm
        self.collectives = current_workers().collectives
        self.feed = InputStrategy(
            self.devices, lambda: False, self.prepare, self.moments_on_slices, None, self.collectives, whole, shares
        )
        self.feed.has_all_names = has_all_names
        # XLA would compile the step of several devices for one of them.
        self.jit_compile = False

    @property
    def distribute_strategy(self) -> InputStrategy:
        """The input strategy that feeds the towers; Keras's trainer takes it for a `tf.distribute` strategy."""
        return self.feed

    def prepare(self) -> None:
        """Makes the model's variables equal on all workers."""
        synchronize(current_workers(), [*self.model.variables, *keras_models.seed_states(self.model)])

    def moments_on_slices(self, _: Any, slices: Any) -> list[list[Moments]]:
        """Returns the moments of one batch for each call of each batch normalization, with an axis for the batches."""
        target = Target(self.devices, self.devices[0])
        moments, _ = on_slices(self.moments_of, slices, self.feed.shares, lambda: target, self.collectives).run()
        return keras.tree.map_structure(lambda moment: tf.reshape(moment, (1, -1)), moments)

    def moments_of(self, data: Any) -> list[list[Moments]]:
        """Returns the moments of a batch. Of Keras's variables, only those of random generators change."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if not keras_models.is_built(self.model):
            # No variables can be made in a stateless scope.
            keras_models.call_model(self.model, x, training=True)
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
    """Pools the moments of a layer's calls, a row for each of n batches; returns mean and variance, of shape (C,) each."""
    divisor, mean, variance = (np.concatenate(moment).astype("float64") for moment in zip(*calls, strict=True))
    # Keras divides masked moments by n + epsilon, where n is a whole number.
    count = np.rint(divisor)
    total = np.sum(count, axis=0)
    if not np.all(total):
        raise ValueError(f"All of the data are masked where a BatchNormalization takes its moments. Received: counts {total}")
    mean = divisor * mean / np.maximum(count, 1)
    population_mean = np.sum(count * mean, axis=0) / total
    squares = divisor * variance + count * (mean - population_mean) ** 2
    return population_mean, np.sum(squares, axis=0) / total


# The setting is that of all threads.
_SETTING = threading.RLock()


@contextlib.contextmanager
def _compiled_functions() -> Iterator[None]:
    """Makes TensorFlow compile functions, even if it was told to run them eagerly: steps are partitioned as graphs."""
    with _SETTING:
        eager = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(False)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(eager)
