"""Find and choose the devices where variables live."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.devices.available import SHARDED, are_gpus, short_name
from keras_dp.keras_internals import keras_models, keras_optimizers

Tensor = Any

# From this size on, to divide the copies and updates among N GPUs saves more time than the further messages take. A byte saves
# (N - 1) / N of N - 1 copies out of one GPU and as many into it, at NVLink's 250 GB/s, and of Adam's 7 passes over memory at
# 1.2 TB/s: 7 ps for two GPUs, 54 ps for eight. To join and split messages takes four launches of 5 µs for each other GPU, so 20
# and 140 µs, the time of 3 MB. Over slower links it is fewer bytes.
SPREAD_FROM_BYTES = 4 << 20


def should_spread(model: keras.Model, devices: Sequence[str]) -> bool:
    """Returns whether `parameter_device="sharded"` is expected to train a built model faster.

    It is the user's choice, and not the default: XLA compiles no function, such as `predict` of the plain model, whose
    variables are on several devices: https://www.tensorflow.org/xla/known_issues#tfvariable_on_a_different_device.

    Args:
        model: the model.
        devices: the devices of the N towers.
    """
    variables = _floating(model)
    are_together = len({home(variable) for variable in variables}) == 1
    return len(devices) > 1 and are_gpus(devices) and are_together and sum(map(_bytes, variables)) >= SPREAD_FROM_BYTES


def _floating(model: keras.Model) -> list[keras.Variable]:
    return [variable for variable in model.weights if tf.as_dtype(variable.dtype).is_floating]


def place(model: keras.Model, parameter_device: str, devices: Sequence[str]) -> None:
    """Moves a built model's floating-point variables; functions that were traced before follow them.

    Args:
        model: the model, whose variables stay the same objects with the same values.
        parameter_device: the device to move to, or "sharded" to spread the variables over `devices` with balanced bytes.
        devices: the towers' devices.
    """
    variables = _floating(model)
    homes = _spread(variables, devices) if parameter_device == SHARDED else [parameter_device] * len(variables)
    move(zip(variables, homes, strict=True))
    for variable, device in zip(variables, homes, strict=True):
        if parameter_device == SHARDED and home(variable) == device:
            native(variable)._keras_dp_spread_over = tuple(devices)


def place_state(model: keras.Model) -> None:
    """Moves the state that a model's built optimizers keep for each weight to the device of that weight."""
    for optimizer in keras_optimizers.optimizers_of(model):
        move((variable, home(weight)) for variable, weight in keras_optimizers.optimizer_state(optimizer))


def move(homes: Iterable[tuple[keras.Variable, str]]) -> None:
    """Moves variables to their new homes. Functions that were traced before follow them.

    Args:
        homes: the variables, of the model or of its optimizers, with their new homes.
    """
    left = []
    for variable, device in homes:
        if home(variable) != device and native(variable).is_initialized():
            left.append((native(variable), variable))
            keras_models.move_variable(variable, device)
    moved = {id(old.handle): native(variable) for old, variable in left}
    if moved:
        keras_models.follow_moved(moved)


@contextlib.contextmanager
def beside_inputs() -> Iterator[None]:
    """Places each operation without a device where its variable or its largest input is, while a graph is built.

    So an optimizer's operations for a variable (its update, its clipping, its moving average) run where the variable and its
    state live. Keras leaves the choice to TensorFlow, which takes the first device.
    """
    if tf.executing_eagerly():
        yield
        return
    of_inputs: dict[int, str] = {}
    with tf.compat.v1.get_default_graph().device(lambda operation: _device_of_largest_input(operation, of_inputs)):
        yield


def _device_of_largest_input(operation: tf.Operation, of_inputs: dict[int, str]) -> str:
    if operation.device or any(attribute.type == "func" for attribute in operation.op_def.attr):
        return operation.device
    variables = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
    by_size = sorted(operation.inputs, key=_known_size, reverse=True)
    devices = [_device_of(tensor, of_inputs) for tensor in variables or by_size]
    return next(filter(None, devices), "")


def _known_size(tensor: Tensor) -> float:
    size = tensor.shape.num_elements()
    return math.inf if size is None else size


def _device_of(tensor: Tensor, of_inputs: dict[int, str]) -> str:
    """Finds the device of a tensor, or "" if it is not known. Tensors that a graph has captured are looked up once."""
    if not tf.is_symbolic_tensor(tensor) or tensor.op.device:
        return tensor.device
    if tensor.op.type == "ReadVariableOp":
        return _device_of(tensor.op.inputs[0], of_inputs)
    if tensor.op.type == "Placeholder" and id(tensor) not in of_inputs:
        outside = [external for external, internal in tensor.graph.captures if internal is tensor]
        of_inputs[id(tensor)] = _device_of(outside[0], of_inputs) if outside else ""
    return of_inputs.get(id(tensor), "")


def _spread(variables: Sequence[keras.Variable], devices: Sequence[str]) -> list[str]:
    """Chooses a device for each variable. Variables that are spread over these devices already stay where they are.

    Models that share layers would else move their variables to and fro, and trace their steps again each time.
    """
    spread = [getattr(native(variable), "_keras_dp_spread_over", None) == tuple(devices) for variable in variables]
    loads = dict.fromkeys(devices, 0)
    for variable, stays in zip(variables, spread, strict=True):
        if stays:
            loads[home(variable)] += _bytes(variable)
    others = iter(_balanced([v for v, stays in zip(variables, spread, strict=True) if not stays], loads))
    return [home(v) if stays else next(others) for v, stays in zip(variables, spread, strict=True)]


def _balanced(variables: Sequence[keras.Variable], loads: dict[str, int]) -> list[str]:
    """Chooses a device for each variable: the largest first, each on the device with the fewest bytes so far.

    The vectors of a layer stay together. Operations such as batch normalization combine them, and would send them otherwise.

    Args:
        variables: the variables.
        loads: the bytes that each device has already; the bytes of the variables are added.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, variable in enumerate(variables):
        groups[variable.path.rpartition("/")[0] if len(variable.shape) < 2 else f"{i}"].append(i)
    sizes = {name: sum(_bytes(variables[i]) for i in group) for name, group in groups.items()}
    chosen: dict[int, str] = {}
    for name in sorted(groups, key=lambda name: -sizes[name]):
        device = min(loads, key=lambda device: loads[device])
        loads[device] += sizes[name]
        chosen |= dict.fromkeys(groups[name], device)
    return [chosen[i] for i in range(len(variables))]


def _bytes(variable: keras.Variable) -> int:
    return int(math.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


def home(variable: Any) -> str:
    """Returns the device on which a `keras.Variable` or a `tf.Variable` lives."""
    return short_name(native(variable).device)


def native(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` behind a `keras.Variable`, or a `tf.Variable` itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value
