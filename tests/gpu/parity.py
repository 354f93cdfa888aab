"""Compare training on towers with plain Keras on one device.

In float64, results must agree within 1e-9. In float32 and mixed precision they are measured by the errors that one device makes
itself. Its *spread*: plain Keras is trained again, and with the rows of each batch in another order, which changes only the
rounding. Its *error*: plain Keras is trained again in float64. Both count, because cuDNN may take another algorithm for another
number of rows.
"""

import itertools

import keras
import numpy as np
from ways_of_wrapping import wrapped

import keras_dp
from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic
from gpu.record import LIMIT

ROWS, BATCH_SIZE = models.ROWS, models.BATCH_SIZE
PERMUTATIONS = 3
LOWER = "Lower precision: errors of one device, and the difference of towers from it"
# The errors of one device are those of few trainings. Towers round each part of a sum once more.
TIMES = 4.0
LEAST_ERROR = float(np.finfo("float32").eps)
OTHER_OPTIONS = [
    {"parameter_device": device, "pack_copies": packs, "communication": communication}
    for device in (None, "sharded", "CPU:0")
    for packs, communication in ((None, None), (False, None), (None, "nccl"))
    if device or packs is not None or communication
]
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def run(record):
    """Compares all models on 2, 4 and 1 towers, then the options of the wrapper, then lower precision."""
    devices = prepare(record, 4)
    use_exact_arithmetic()
    _in_float64(record, devices)
    _in_lower_precision(record, devices)


def _compare(record, table, difference, limit=LIMIT, **columns):
    """Compares, and sets the finding."""
    record.compare(table, difference, limit, **columns)
    largest = {}
    for row in (row for rows in record.results["tables"].values() for row in rows if "difference" in row):
        policy = row.get("precision", "float64")
        largest[policy] = max(largest.get(policy, 0.0), row["difference"])
    words = ", ".join(f"{policy} {number:.0e}" for policy, number in largest.items())
    record.finding(f"{record.within_limits()} within their limits; largest differences: {words}")


def _in_float64(record, devices):
    names = [name for name, case in models.CASES.items() if case.has_float64][: 2 if record.quick else None]
    plain = {name: train(compiled(built(name, "float64")), name) for name in names}
    for count, name in itertools.product((2, 4) if record.quick else (2, 4, 1), names):
        parallel = compare_float64(record, name, plain[name], devices[:count])
        if count == 2:
            _list_computed_once(record, name, parallel)
    options = OTHER_OPTIONS[1:3] if record.quick else OTHER_OPTIONS
    for name, arguments in itertools.product(names[:1] if record.quick else names[:2], options):
        compare_float64(record, name, plain[name], devices, **arguments)


def compare_float64(record, name, plain, devices, parameter_device=None, pack_copies=None, communication=None, **others):
    """Compares a model on towers with the results in plain Keras, and returns the wrapper."""
    options = {"parameter_device": parameter_device, "pack_copies": pack_copies, "communication": communication}
    parallel = compiled(wrapped(built(name, "float64"), devices=devices, **options, **others))
    words = {option: "default" if value is None else str(value) for option, value in options.items()}
    difference = comparing.difference(plain, train(parallel, name))
    _compare(record, "float64", difference, model=name, towers=parallel.num_towers, **words)
    return parallel


def _list_computed_once(record, name, parallel):
    """Lists the operations that are not split, such as kernels of cuDNN that keras_dp has no rule for."""
    x, y = models.CASES[name].data(BATCH_SIZE)
    for once in parallel.explain((_as_input(x), y)).once:
        record.row("Computed once, from gathered rows", model=name, operation=once.type, why=once.reason, name=once.name)


def _in_lower_precision(record, devices):
    names = ["convolutions"] if record.quick else list(models.CASES)
    for policy, name in itertools.product(POLICIES[:2] if record.quick else POLICIES, names):
        plain_model = compiled(built(name, policy))
        plain_model.optimizer.build(plain_model.trainable_variables)
        begin = comparing.state(plain_model)
        plain = train(plain_model, name)
        spread = max(comparing.difference(plain, _trained_again(plain_model, begin, name, order)) for order in _orders())
        error = _error(plain, begin, name)
        for count in (2, 4):
            parallel = compiled(keras_dp.DataParallelModel(built(name, policy), devices=devices[:count]))
            difference = comparing.difference(plain, train(parallel, name))
            columns = {"precision": policy, "model": name, "towers": count, "spread": spread, "error": error}
            _compare(record, LOWER, difference, TIMES * max(spread, error or 0.0, LEAST_ERROR), **columns)
            if (policy, count) == ("float32", 2) and error is None:
                _list_computed_once(record, name, parallel)


def _trained_again(model, begin, name, order):
    """Trains from the same beginning, with the rows in another order."""
    for variable, value in zip([*model.weights, *model.optimizer.variables], begin, strict=True):
        variable.assign(value)
    return train(model, name, order)


def _error(plain, begin, name):
    """Returns how far a training in lower precision is from the same in float64; None if there are no kernels for that."""
    if not models.CASES[name].has_float64:
        return None
    precise = compiled(built(name, "float64"), _momentum())
    count = len(precise.weights)
    precise.set_weights(begin[:count])
    # A loss scale has variables that float64 does not need.
    trained, given = ((results, variables[:count]) for results, variables in (train(precise, name), plain))
    return comparing.difference(trained, given)


def _orders():
    """Yields the rows as they are, which shows whether one device repeats its results, and then permuted."""
    yield np.arange(ROWS)
    for seed in range(PERMUTATIONS):
        yield comparing.permuted(ROWS, BATCH_SIZE, seed)


def built(name, policy):
    """Builds a model in a precision, with the same weights each time."""
    models.fresh("float64" if policy == "float64" else "float32", policy)
    return models.CASES[name].build()


def compiled(model, optimizer=None):
    """Compiles a model of `models.CASES`, or a wrapper around one, and returns it.

    By default with Adam in float64, and with SGD in other precisions: Adam divides by the size of gradients, and makes large
    differences of rounding errors.
    """
    if optimizer is None:
        optimizer = keras.optimizers.Adam(0.01) if keras.config.floatx() == "float64" else _momentum()
    return models.compiled(model, optimizer)


def train(model, name, order=None):
    """Trains a compiled model with rows in an order, evaluates and predicts. Returns the results, and all variables.

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
    return results, comparing.state(model)


def _momentum():
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    if keras.config.dtype_policy().name == "mixed_float16":
        # With Keras's own first scale, gradients overflow, and a step that is skipped is far from float64.
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
    return optimizer


def _as_input(x):
    return x if x.dtype.kind == "i" else x.astype(keras.config.floatx())
