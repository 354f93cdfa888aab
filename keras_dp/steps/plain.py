"""Prepare the model's own step to be traced, as one device runs it."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dp import choices
from keras_dp.batch_normalization.modes import batch_norm_mode
from keras_dp.batch_normalization.synchronized import batch_norms, is_synchronized
from keras_dp.batches.slicing import rows_of_checked
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.devices import variable_homes
from keras_dp.keras_internals.keras_optimizers import optimizers_of
from keras_dp.keras_internals.replacing import replaced
from keras_dp.optimizer import Combining, sending_gradients_as

_in_trace = contextvars.ContextVar("_in_trace", default=False)


def in_trace() -> bool:
    """Returns whether the step of a model is being traced, as one device runs it, so that it calls the model's own steps."""
    return _in_trace.get()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Says that the step of a model is being traced, or run on one device."""
    token = _in_trace.set(True)
    try:
        yield
    finally:
        _in_trace.reset(token)


def plain_step(
    model: keras.Model,
    run: Callable[[Any], Any],
    optimizer: Combining | None,
    batch_norm: choices.BatchNorm,
    gradient_dtype: choices.GradientType,
    whole: WholeTensors,
) -> Callable[[Any], Any]:
    """Returns a model's step for a whole batch.

    Args:
        model: the inner model.
        run: the step.
        optimizer: the model's optimizer, which may count rows; None if the step has none.
        batch_norm: see `DataParallelModel`.
        gradient_dtype: see `DataParallelModel`.
        whole: the tensors of the batch that are not cut.
    """
    synchronized = [layer for layer in batch_norms(model) if is_synchronized(layer)]

    def step(data: Any) -> Any:
        optimizers = optimizers_of(model)
        kept = [variable for one in optimizers for variable in one.variables]
        is_spread = len({variable_homes.home(variable) for variable in (*model.trainable_weights, *kept)}) > 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing())
            for layer in synchronized:
                # Keras would compute E[x^2] - E[x]^2, which is wrong if the mean is large. The partition synchronizes anyway.
                stack.enter_context(replaced(layer, "synchronized", False))
            if batch_norm != "sync":
                stack.enter_context(batch_norm_mode(batch_norm, synchronized))
            for one in optimizers:
                combining = optimizer if optimizer is not None and optimizer.inside is one else Combining.of(one)
                accumulates_rows = combining.accumulate == "rows"
                if accumulates_rows or is_spread:
                    rows = rows_of_checked(data, whole) if accumulates_rows else None
                    stack.enter_context(combining.in_step(rows))
            stack.enter_context(sending_gradients_as(gradient_dtype, optimizers))
            return run(data)

    return step
