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
from keras_dp.keras_internals.keras_optimizers import optimizers_of
from keras_dp.keras_internals.replacing import replaced
from keras_dp.optimizer import Combining, DataParallelOptimizer, sending_gradients_as
from keras_dp.wrapping.in_trace import tracing


def plain_step(
    model: keras.Model,
    run: Callable[[Any], Any],
    optimizer: Combining | None,
    options: choices.Options,
    whole: WholeTensors,
) -> Callable[[Any], Any]:
    """Returns a model's step for a whole batch.

    Args:
        model: the inner model.
        run: the step.
        optimizer: the model's optimizer, which may count rows; None if the step has none.
        options: the arguments of the `DataParallelModel`.
        whole: the tensors of the batch that are not cut.
    """
    synchronized = [layer for layer in batch_norms(model) if is_synchronized(layer)]

    def step(data: Any) -> Any:
        combinings = _combinings(model, optimizer)
        kept = [variable for one in combinings for variable in one.inside.variables]
        is_spread = len({variable_homes.home(variable) for variable in (*model.trainable_weights, *kept)}) > 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing())
            for layer in synchronized:
                # Keras would compute E[x^2] - E[x]^2, which is wrong if the mean is large. The partition synchronizes anyway.
                stack.enter_context(replaced(layer, "synchronized", False))
            if options.batch_norm != "sync":
                stack.enter_context(batch_norm_mode(options.batch_norm, synchronized))
            for one in combinings:
                accumulates_rows = one.accumulate == "rows"
                if accumulates_rows or is_spread:
                    stack.enter_context(one.in_step(rows_of_checked(data, whole) if accumulates_rows else None))
            stack.enter_context(sending_gradients_as(options.gradient_dtype, [one.inside for one in combinings]))
            return run(data)

    return step


def _combinings(model: keras.Model, optimizer: Combining | None) -> list[Combining]:
    """Returns how each optimizer of a model applies gradients. A model may keep one, and another that is wrapped around it."""
    found = optimizers_of(model)
    wrapped = [one for one in found if isinstance(one, DataParallelOptimizer)]
    combinings = [*map(Combining.of, [one for one in found if one not in wrapped] + wrapped)]
    combinings += [] if optimizer is None else [optimizer]
    return list({id(one.inside): one for one in combinings}.values())
