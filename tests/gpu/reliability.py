"""Train through failures on GPUs, twice from one seed, and for many steps.

A step that runs out of the memory of a GPU, or finds a number that is none, leaves all state as the last good one did, and
training goes on as in plain Keras. Where plain Keras repeats itself to the bit, so do towers. The memory of each GPU is the
same after many steps.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic
from gpu.timing import step_milliseconds

COPIES = 2**38  # of a row, which no memory holds
FAILURES = "After a step that failed, beside plain Keras"
REPEATED = "The same seed twice, in float32"
GROWTH = "Memory in use, kB, after some steps and after many"


class Failing(layers.Layer):
    """Fails in training on the last slice of a batch, if one of its numbers is 1,000."""

    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def call(self, x):
        return x + tf.cast(self.fail(x), x.dtype)


def _without_memory(x):
    is_wrong = tf.reduce_any(x > 500.0, axis=[1, 2, 3])
    copies = tf.where(tf.reduce_any(is_wrong), tf.constant(COPIES, tf.int64), 1)
    return 0.0 * tf.reduce_max(tf.tile(tf.reshape(x, [tf.shape(x)[0], -1]), [1, copies]), axis=1)[:, None, None, None]


def _not_a_number(x):
    return 0.0 * tf.debugging.check_numerics(tf.math.log(500.0 - x), "too large")


FAILING = {
    "memory runs out": (_without_memory, tf.errors.ResourceExhaustedError),
    "not a number": (_not_a_number, tf.errors.InvalidArgumentError),
}


def run(record):
    """Lets steps fail, repeats trainings, and watches the memory of many steps."""
    devices = prepare(record, 4)
    use_exact_arithmetic()
    for count in (2,) if record.quick else (2, 4):
        for name in FAILING:
            _compare_after_failure(record, name, devices[:count])
    record.finding(f"{record.within_limits()} as they should be")
    _watch_memory(record, devices[:2])
    for is_asked in (False, True):
        if is_asked:
            tf.config.experimental.enable_op_determinism()
        for name in ("dense",) if record.quick else ("convolutions", "lstm", "attention"):
            _repeat(record, name, is_asked, devices)
    record.finding(f"{record.within_limits()} as they should be")


def _compare_after_failure(record, name, devices):
    """Trains, lets a step fail, and trains on: all as in plain Keras, and the failed step has written nothing."""
    expected, _ = _trained_through(name, None)
    received, is_kept = _trained_through(name, devices)
    columns = {"failure": name, "towers": len(devices)}
    record.check("State after a step that failed, beside the state before it", is_kept, **columns)
    record.compare(FAILURES, comparing.difference(expected, received), **columns)


def _trained_through(name, devices):
    """Returns the state at the end, and whether the failed step has left it as it was, to the bit."""
    fail, error = FAILING[name]
    models.fresh()
    stack = [keras.Input((12, 12, 3)), Failing(fail), layers.Conv2D(8, 3), layers.Dropout(0.3, seed=1), layers.Flatten()]
    model = models.on(devices, keras.Sequential([*stack, layers.Dense(models.CLASSES)]))
    models.compiled(model, keras.optimizers.Adam(0.01))
    x, y = models.images(models.ROWS)
    model.fit(x, y, batch_size=models.BATCH_SIZE, shuffle=False, verbose=0)
    before = _floats(model)
    wrong = x[: models.BATCH_SIZE].copy()
    wrong[-1] = 1000.0
    try:
        model.train_on_batch(wrong, y[: models.BATCH_SIZE])
    except error:
        pass
    else:
        raise RuntimeError(f"the step did not fail: {name}")
    is_kept = all(np.array_equal(one, other) for one, other in zip(before, _floats(model), strict=True))
    model.fit(x, y, batch_size=models.BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    return comparing.state(model), is_kept


def _floats(model):
    """Returns the state but its seeds: plain Keras draws random numbers for a step that fails, too."""
    arrays = [np.array(value) for value in comparing.state(model)]
    return [array for array in arrays if array.dtype.kind == "f"]


def _repeat(record, name, is_asked, devices):
    """Trains twice from one seed: towers must repeat to the bit if plain Keras does, or if TensorFlow was asked for it."""
    times = 2 if record.quick else 3
    one_device = _differing([_trained(name, None) for _ in range(times)])
    for count in (2,) if record.quick else (1, 2, 4):
        towers = _differing([_trained(name, devices[:count]) for _ in range(times)])
        columns = {"model": name, "enable_op_determinism": "yes" if is_asked else "no", "towers": count}
        columns |= {"numbers_that_differ_on_one_device": one_device, "on_towers": towers}
        if is_asked:
            record.check(REPEATED, towers == 0, **columns)
        else:
            record.row(f"{REPEATED}, without enable_op_determinism", **columns)


def _trained(name, devices):
    # XLA takes minutes to compile so many steps, and is deterministic by itself.
    sizes = {"rows": 8 * models.ROWS, "batch_size": 4 * models.BATCH_SIZE, "floatx": "float32"}
    return comparing.state(models.trained(name, devices, lambda: keras.optimizers.Adam(0.01), **sizes))


def _differing(runs):
    """Returns how many numbers of any later run are not those of the first, to the bit."""
    return max(
        sum(int(np.sum(_bits(one) != _bits(other))) for one, other in zip(runs[0], later, strict=True)) for later in runs[1:]
    )


def _bits(array):
    return array.ravel().view(f"u{array.itemsize}")


def _watch_memory(record, devices):
    """Trains many steps, and compares the memory in use with that after few."""
    models.fresh("float32")
    model = models.compiled(models.on(devices, models.convolutions()), keras.optimizers.Adam(0.01))
    x, y = models.images(2 * models.BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensors((x.astype("float32"), y)).repeat()
    few, many = (5, 10) if record.quick else (200, 3_000)
    first = step_milliseconds(model, dataset, steps=few, warm_up=5)
    before = [_in_use(device) for device in devices]
    last = step_milliseconds(model, dataset, steps=many, warm_up=5)[-few:]
    after = [_in_use(device) for device in devices]
    for device, one, other in zip(devices, before, after, strict=True):
        columns = {"device": device, "steps": f"{few:,} and {few + many:,}", "before": one, "after": other}
        columns |= {"ms_a_step_before": float(np.median(first)), "ms_a_step_after": float(np.median(last))}
        if one is None or other is None:
            record.row(GROWTH, **columns)
        else:
            record.check(GROWTH, other <= 1.02 * one + 64, **columns)


def _in_use(device):
    """Returns the memory that is in use on a device, in kB; None where TensorFlow does not count it."""
    if not device.startswith("GPU"):
        return None
    return float(tf.config.experimental.get_memory_info(device)["current"]) / 1e3
