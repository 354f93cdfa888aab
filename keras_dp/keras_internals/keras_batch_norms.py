"""Read and replace the moments of Keras's batch normalizations."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dp.keras_internals.replacing import on_this_thread, replaced

Tensor = Any


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Returns the axes over which a BatchNormalization layer takes its moments."""
    return list(layer._reduction_axes)


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether a layer renormalizes, which Keras can do since 3.14."""
    return bool(getattr(layer, "renorm", False))


own_moments = keras.layers.BatchNormalization._moments


def update_moving_statistics(layer: keras.layers.BatchNormalization, mean: Tensor, variance: Tensor) -> None:
    """Updates a layer's moving statistics with the moments of one batch, as the layer does in `call`."""
    if renormalizes(layer):
        layer._update_renorm_statistics(mean, variance)
        return
    for moving, moment in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(keras.ops.cast(moving, moment.dtype) * layer.momentum + moment * (1.0 - layer.momentum))


@contextlib.contextmanager
def updated_by(layer: keras.layers.BatchNormalization, moments: Callable[[], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Makes a layer update its moving statistics in `call` with `moments()`, a mean and a variance."""
    statistics = layer.non_trainable_variables
    is_ours = False

    def update(variable: keras.Variable, value: Tensor) -> None:
        nonlocal is_ours
        if is_ours:
            keras.Variable.assign(variable, value)
        elif variable is statistics[0]:
            # The layer assigns to each variable once. The first assignment updates all of them, and the others do nothing.
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
    """Makes every BatchNormalization take its moments from `moments(layer, inputs, mask)`."""
    with replaced(keras.layers.BatchNormalization, "_moments", on_this_thread(moments, own_moments)):
        yield
