"""Compare towers that XLA compiles with plain Keras, and time them beside towers that it does not compile."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic
from gpu.timing import step_milliseconds
from keras_dp.cli import models as benchmarks
from keras_dp.cli import synthetic


def run(record):
    """Compares results in float64, then times steps in float32; first on one tower, which needs no second device."""
    devices = prepare(record, 2)
    counts = (2,) if record.quick else (1, 2)
    use_exact_arithmetic()
    for count, name in itertools.product(counts, ("convolutions",) if record.quick else ("convolutions", "attention", "dense")):
        _compare(record, name, devices[:count])
    exact = f"{record.within_limits()} exact"
    record.finding(exact)
    models.fresh("float32")
    tf.config.experimental.enable_tensor_float_32_execution(True)
    ratios = []
    workloads = (("mlp", 256),) if record.quick else (("mlp", 1024), ("resnet20", 256), ("transformer", 64))
    for count, (name, rows) in itertools.product(counts, workloads):
        ratios.append(f"{_time(record, name, rows, devices[:count]):.2f} ({name}, {count})")
        record.finding(f"{exact}; time with XLA over time without (model, towers): {', '.join(ratios)}")


def _compare(record, name, devices):
    """Compares towers with plain Keras without XLA, after uneven batches. Plain Keras itself uses XLA by default on GPUs."""
    expected, by_default = (_trained(name, None, jit_compile) for jit_compile in (False, "auto"))
    difference = comparing.difference(expected, _trained(name, devices, True))
    record.compare("Towers with XLA beside plain Keras without XLA", difference, model=name, towers=len(devices))
    table = "Plain Keras as it is by default, with XLA on GPUs, beside plain Keras without"
    record.row(table, model=name, difference=comparing.difference(expected, by_default))


def _trained(name, devices, jit_compile):
    return comparing.state(
        models.trained(name, devices, lambda: keras.optimizers.SGD(0.05, momentum=0.9), jit_compile=jit_compile)
    )


def _time(record, name, rows, devices):
    """Times steps with and without XLA, and returns the ratio."""
    medians = {}
    for jit_compile in (False, True):
        keras.utils.clear_session()
        model = models.on(devices, benchmarks.workload(name).build())
        models.compiled(model, keras.optimizers.SGD(0.01), jit_compile)
        dataset = synthetic.dataset(model.inner_model, rows)
        milliseconds = step_milliseconds(model, dataset, steps=10 if record.quick else 40, warm_up=5)
        medians[jit_compile] = float(np.median(milliseconds))
    ratio = medians[True] / medians[False]
    times = {"ms_without_XLA": medians[False], "ms_with_XLA": medians[True], "with_over_without": ratio}
    record.row("Times", model=name, batch=rows, towers=len(devices), **times)
    return ratio
