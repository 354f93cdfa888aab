"""Read Keras's optimizers through their private names."""

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_dp.keras_internals.replacing import replaced


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Lists the optimizers among the attributes of a model and of models inside it, also in lists and dictionaries."""
    models = [layer for layer in model._flatten_layers() if isinstance(layer, keras.Model)]
    found: dict[int, Any] = {}
    waiting = collections.deque(value for one in models for value in vars(one).values())
    seen = set()
    while waiting:
        value = waiting.popleft()
        if isinstance(value, keras.optimizers.Optimizer):
            found[id(value)] = value
        elif isinstance(value, Mapping | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))
            # The order of a set is another one in each process.
            is_set = isinstance(value, set | frozenset)
            waiting.extend(value.values() if isinstance(value, Mapping) else sorted(value, key=_name) if is_set else value)
    return list(found.values())


def _name(value: Any) -> str:
    return str(getattr(value, "name", ""))


def optimizer_state(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Lists the variables that a built optimizer, and optimizers inside it, keep for weights: pairs (variable, weight)."""
    pairs: list[tuple[keras.Variable, keras.Variable]] = []
    for part in [optimizer, *_optimizers_inside(optimizer)]:
        weights = part._trainable_variables if part.built else []
        for kept in vars(part).values():
            is_state = isinstance(kept, list) and len(kept) == len(weights) and kept is not weights
            if is_state and all(isinstance(variable, keras.Variable) for variable in kept):
                pairs += zip(kept, weights, strict=True)
    return pairs


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Lists the variables for which a built optimizer keeps state."""
    inner = innermost(optimizer)
    return list(getattr(inner, "_trainable_variables", []))


@contextlib.contextmanager
def reduced_gradients(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Keeps an optimizer, and optimizers inside it, from reducing gradients by `tf.distribute`: they are sums already.

    Keras would pass all gradients through one operation, and so through one device.
    """
    with contextlib.ExitStack() as stack:
        for part in [optimizer, *_optimizers_inside(optimizer)]:
            stack.enter_context(replaced(part, "_all_reduce_sum_gradients", lambda pairs: pairs))
        yield


class SGDWithCoupledWeightDecay(keras.optimizers.SGD):
    """Leaves the weight decay of SGD to `update_step` of a subclass."""

    def _apply_weight_decay(self, variables: Any) -> None:
        pass


def decays(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Returns whether a variable is not excluded from weight decay."""
    return bool(optimizer._use_weight_decay(variable))


def velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable] | None:
    """Returns the velocities of a built optimizer, if they include the learning rate; None for other optimizers."""
    if isinstance(optimizer, keras.optimizers.SGD):
        kept = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        kept = getattr(optimizer, "_momentums", [])
    else:
        return None
    return [velocity for velocity in kept if velocity is not None]


def accumulators(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Lists the accumulators of a built optimizer, except for gradients that overwrite variables."""
    pairs = zip(optimizer._trainable_variables, optimizer._accumulated_gradients, strict=True)
    return [accumulator for variable, accumulator in pairs if not getattr(variable, "overwrite_with_gradient", False)]


def batches_seen(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the number of batches given to an optimizer. Accumulated batches count one by one, as for its schedule."""
    return optimizer._iterations


def has_learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether the learning rate is a variable that can be set, and not a schedule or a function."""
    return isinstance(optimizer._learning_rate, keras.Variable)


def learning_rate_schedule(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the schedule of the optimizer's learning rate; None if there is none."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside all optimizers that wrap one."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def innermost_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Lists the optimizer inside all optimizers that wrap one, or all optimizers inside a `MultiOptimizer`."""
    optimizer = innermost(optimizer)
    return list(getattr(optimizer, "optimizers", [optimizer]))


def _optimizers_inside(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(getattr(optimizer, "optimizers", ())) if inner is None else [inner, *_optimizers_inside(inner)]
