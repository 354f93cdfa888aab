"""Read what Keras's optimizers keep in private names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_dp.keras_internals.replacing import replaced


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Lists the state of a built optimizer, and of those inside it, for single weights: pairs of a variable and the weight."""
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
    """Lists the accumulators of a built optimizer, but for gradients that overwrite variables."""
    pairs = zip(optimizer._trainable_variables, optimizer._accumulated_gradients, strict=True)
    return [accumulator for variable, accumulator in pairs if not getattr(variable, "overwrite_with_gradient", False)]


def batches_seen(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the number of batches that an optimizer was given: accumulated ones count one by one, as for its schedule."""
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
