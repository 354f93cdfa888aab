"""Prepare the model's own step to be traced, as one device runs it."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from keras_dp import choices
from keras_dp.batch_normalization.modes import batch_norm_mode
from keras_dp.batch_normalization.synchronized import batch_norms, is_synchronized
from keras_dp.batches.slicing import rows_of_checked
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.devices import variable_homes
from keras_dp.keras_internals.replacing import replaced
from keras_dp.optimizer import DataParallelOptimizer, sending_gradients_as


def plain_step(
    model: keras.Model,
    name: choices.Step,
    optimizer: DataParallelOptimizer | None,
    batch_norm: choices.BatchNorm,
    gradient_dtype: choices.GradientType,
    whole: WholeTensors,
) -> Callable[[Any], Any]:
    """Returns a model's step for a whole batch.

    Args:
        model: the inner model.
        name: the step's name.
        optimizer: the optimizer that applies the gradients; None if the step has none.
        batch_norm: see `DataParallelModel`.
        gradient_dtype: see `DataParallelModel`.
        whole: the tensors of the batch that are not cut.
    """
    run = getattr(model, f"{name}_step")
    optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    synchronized = [layer for layer in batch_norms(model) if is_synchronized(layer)]
    accumulates_rows = optimizer is not None and optimizer.accumulate == "rows"

    def step(data: Any) -> Any:
        kept = optimizer.variables if optimizer is not None else []
        is_spread = len({variable_homes.home(variable) for variable in (*model.trainable_weights, *kept)}) > 1
        with contextlib.ExitStack() as stack:
            for layer in synchronized:
                # Keras would compute E[x^2] - E[x]^2, which is wrong if the mean is large. The partition synchronizes anyway.
                stack.enter_context(replaced(layer, "synchronized", False))
            if batch_norm != "sync":
                stack.enter_context(batch_norm_mode(batch_norm, synchronized))
            if optimizer is not None and (accumulates_rows or is_spread):
                rows = rows_of_checked(data, whole) if accumulates_rows else None
                stack.enter_context(optimizer.in_step(rows))
            stack.enter_context(sending_gradients_as(gradient_dtype, optimizers))
            return run(data)

    return step
