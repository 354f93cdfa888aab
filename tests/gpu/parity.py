"""Compare training on towers with plain Keras on one device.

In float64, results must agree within 1e-9. In float32 and mixed precision they are measured by the errors that one device makes
itself. Its *spread*: plain Keras is trained again, and with the rows of each batch in another order, which changes only the
rounding. Its *error*: plain Keras is trained again in float64. Both count, because cuDNN may take another algorithm for another
number of rows.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

import keras_dp
from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic
from gpu.record import Record

ROWS, BATCH_SIZE = models.ROWS, models.BATCH_SIZE
PERMUTATIONS = 3
LOWER = "Lower precision: errors of one device, and the difference of towers from it"
# The errors of one device are those of few trainings. Towers round each part of a sum once more.
TIMES = 4.0
LEAST_ERROR = float(np.finfo("float32").eps)
OTHER_OPTIONS: list[dict[str, Any]] = [
    {"parameter_device": device, "pack_copies": packs}
    for device, packs in itertools.product((None, "sharded", "CPU:0"), (None, True, False))
    if device or packs is not None
]
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


class Trained(NamedTuple):
    """Holds the results of a training, which are the history, the evaluation and the predictions, and all variables."""

    results: Any
    variables: list[np.ndarray]


Largest = dict[str, float]  # the largest difference of each precision


def tell(record: Record, largest: Largest, policy: str, difference: float) -> None:
    """Notes a difference, and sets the finding."""
    largest[policy] = max(largest.get(policy, 0.0), difference)
    words = ", ".join(f"{name} {number:.0e}" for name, number in largest.items())
    record.finding(f"{record.within_limits()} within their limits; largest differences: {words}")


def run(record: Record) -> None:
    """Compares all models on 2, 4 and 1 towers, then the options of the wrapper, then lower precision."""
    devices = prepare(record, 4)
    use_exact_arithmetic()
    largest: Largest = {}
    _in_float64(record, largest, devices)
    _in_lower_precision(record, largest, devices)


def _in_float64(record: Record, largest: Largest, devices: list[str]) -> None:
    names = [name for name, case in models.CASES.items() if case.has_float64]
    names = names[:2] if record.quick else names
    plain = {}
    for count in (2, 4) if record.quick else (2, 4, 1):
        for name in names:
            if name not in plain:
                plain[name] = train(compiled(built(name, "float64")), name)
            parallel = compiled(keras_dp.DataParallelModel(built(name, "float64"), devices=devices[:count]))
            compare_float64(record, largest, name, plain[name], parallel)
            if count == 2:
                _list_computed_once(record, name, parallel)
    options = OTHER_OPTIONS[2:4] if record.quick else OTHER_OPTIONS
    for name in names[:1] if record.quick else names[:2]:
        for arguments in options:
            parallel = compiled(keras_dp.DataParallelModel(built(name, "float64"), devices=devices, **arguments))
            compare_float64(record, largest, name, plain[name], parallel, **arguments)


def compare_float64(record: Record, largest: Largest, name: str, plain: Trained, parallel: Any, **arguments: Any) -> None:
    difference = comparing.difference(plain, train(parallel, name))
    arguments = {"parameter_device": None, "pack_copies": None} | arguments
    words = {argument: "default" if value is None else str(value) for argument, value in arguments.items()}
    record.compare("float64", difference, comparing.LIMIT, model=name, towers=parallel.num_towers, **words)
    tell(record, largest, "float64", difference)


def _list_computed_once(record: Record, name: str, parallel: Any) -> None:
    """Lists the operations that are not split, such as kernels of cuDNN that keras_dp has no rule for."""
    x, y = models.CASES[name].data(BATCH_SIZE)
    for once in parallel.explain((_as_input(x), y)).once:
        record.row("Computed once, from gathered rows", model=name, operation=once.type, why=once.reason, name=once.name)


def _in_lower_precision(record: Record, largest: Largest, devices: list[str]) -> None:
    names = ["convolutions"] if record.quick else list(models.CASES)
    for policy, name in itertools.product(POLICIES[:2] if record.quick else POLICIES, names):
        plain_model = compiled(built(name, policy))
        weights, state = plain_model.get_weights(), _optimizer_state(plain_model)
        plain = train(plain_model, name)
        again = (_trained_again(plain_model, weights, state, name, order) for order in _orders())
        spread = max(comparing.difference(plain, one) for one in again)
        error = _error(plain, weights, name)
        for count in (2, 4):
            parallel = compiled(keras_dp.DataParallelModel(built(name, policy), devices=devices[:count]))
            difference = comparing.difference(plain, train(parallel, name))
            columns = {"precision": policy, "model": name, "towers": count, "spread": spread, "error": error}
            record.compare(LOWER, difference, TIMES * max(spread, error or 0.0, LEAST_ERROR), **columns)
            tell(record, largest, policy, difference)
            if (policy, count) == ("float32", 2) and error is None:
                _list_computed_once(record, name, parallel)


def _optimizer_state(model: keras.Model) -> list[np.ndarray]:
    model.optimizer.build(model.trainable_variables)
    return [np.array(variable) for variable in model.optimizer.variables]


def _trained_again(
    model: keras.Model, weights: list[np.ndarray], state: list[np.ndarray], name: str, order: np.ndarray
) -> Trained:
    """Trains from the same beginning, with the rows in another order."""
    model.set_weights(weights)
    for variable, value in zip(model.optimizer.variables, state, strict=True):
        variable.assign(value)
    return train(model, name, order)


def _error(plain: Trained, weights: list[np.ndarray], name: str) -> float | None:
    """Returns how far a training in lower precision is from the same in float64; None if there are no kernels for that."""
    if not models.CASES[name].has_float64:
        return None
    precise = compiled(built(name, "float64"), _momentum())
    precise.set_weights(weights)
    # A loss scale has variables that float64 does not need.
    trained, given = ((one.results, one.variables[: len(weights)]) for one in (train(precise, name), plain))
    return comparing.difference(trained, given)


def _orders() -> Iterator[np.ndarray]:
    """Yields the rows as they are, which shows whether one device repeats its results, and then permuted."""
    yield np.arange(ROWS)
    for seed in range(PERMUTATIONS):
        yield comparing.permuted(ROWS, BATCH_SIZE, seed)


def built(name: str, policy: str) -> keras.Model:
    """Builds a model in a precision, with the same weights each time."""
    models.fresh("float64" if policy == "float64" else "float32", policy)
    return models.CASES[name].build()


def compiled(model: Any, optimizer: keras.optimizers.Optimizer | None = None) -> Any:
    """Compiles a model of `models.CASES`, or a wrapper around one, and returns it.

    By default with Adam in float64, and with SGD in other precisions: Adam divides by the size of gradients, and makes large
    differences of rounding errors.
    """
    if optimizer is None:
        optimizer = keras.optimizers.Adam(0.01) if keras.config.floatx() == "float64" else _momentum()
    return models.compiled(model, optimizer)


def train(model: Any, name: str, order: np.ndarray | None = None) -> Trained:
    """Trains a compiled model with rows in an order, evaluates and predicts.

    Raises:
        RuntimeError: if nothing was trained, so that a comparison would show nothing.
    """
    x, y = models.CASES[name].data(ROWS)
    x = _as_input(x)
    order = np.arange(ROWS) if order is None else order
    before = [weight.copy() for weight in model.get_weights()]
    history = model.fit(x[order], y[order], batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0).history
    evaluation = model.evaluate(x, y, batch_size=BATCH_SIZE, verbose=0)
    results = (history, evaluation, model.predict(x, batch_size=BATCH_SIZE, verbose=0))
    if comparing.difference(before, model.get_weights()) < 1e-5:
        raise RuntimeError(f"the model {name!r} was not trained: its weights are those of the beginning")
    return Trained(results, comparing.state(model))


def _momentum() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    if keras.config.dtype_policy().name == "mixed_float16":
        # With Keras's own first scale, gradients overflow, and a step that is skipped is far from float64.
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
    return optimizer


def _as_input(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind == "i" else x.astype(keras.config.floatx())
