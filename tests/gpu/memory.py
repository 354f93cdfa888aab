"""Measure the memory of each device beside the least that its weights and activations need."""

import gc
import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from gpu import models
from gpu.devices import prepare

TABLE = "Peak memory in a step, MB"
RUNS = (0, None), (4, "sharded"), (4, None), (2, None), (1, None)  # towers, none for plain Keras, and the variables' place


def run(record):
    """Trains a model with large weights, and one with large activations, on one device and on towers."""
    devices = prepare(record, 4)
    for name in MODELS:
        for count, parameter_device in RUNS[:2] if record.quick else RUNS:
            _measure(record, name, devices[:count], parameter_device)
    if record.results["gpus"]:
        ratios = [row["peak"] / row["at_least"] for row in record.results["tables"][TABLE]]
        record.finding(f"peaks are {min(ratios):.2f} to {max(ratios):.2f} times the least that is needed")
    else:
        record.finding("TensorFlow does not count the memory of CPUs")


def _measure(record, name, towers, parameter_device):
    """Trains three steps, and records the peak of each device; plain Keras if there are no towers."""
    is_counted = record.results["gpus"]
    devices = towers or ["GPU:0" if is_counted else "CPU:0"]
    keras.utils.clear_session()
    gc.collect()
    # What former models have left behind is not this model's.
    before = {device: _memory(device)["current"] if is_counted else 0 for device in devices}
    model = MODELS[name](record.quick)
    trained = models.on(towers or None, model, parameter_device=parameter_device)
    trained.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    rows = 16 if record.quick else 128
    random = np.random.default_rng(0)
    batch = [random.normal(size=(rows, *shape[1:])).astype("float32") for shape in (model.input_shape, model.output_shape)]
    if is_counted:
        for device in devices:
            tf.config.experimental.reset_memory_stats(device)
    trained.fit(tf.data.Dataset.from_tensors(tuple(batch)).repeat(), steps_per_epoch=3, shuffle=False, verbose=0)
    for tower, device in enumerate(devices):
        share = 1 / len(devices) if parameter_device == "sharded" else float(tower == 0)
        run = {"model": name, "engine": "keras_dp" if towers else "plain Keras", "towers": len(devices)}
        run |= {"parameter_device": parameter_device or "default", "device": device}
        peak = (_memory(device)["peak"] - before[device]) / 1e6 if is_counted else None
        least = least_bytes(model, math.ceil(rows / len(devices)), share) / 1e6
        record.row(TABLE, **run, peak=peak, at_least=least)


def _memory(device):
    return tf.config.experimental.get_memory_info(device)


def least_bytes(model, rows, optimizer_share):
    """Returns the bytes of weights, gradients, this share of Adam's two moments, and all layers' outputs for the rows.

    The backward pass needs the outputs, so all of them are there at the end of the forward pass. TensorFlow needs more: the
    gradients of outputs, space for its kernels, and copies that are on their way. It may also need less, where it computes in
    place.
    """
    weights = sum(math.prod(weight.shape) * tf.as_dtype(weight.dtype).size for weight in model.weights)
    outputs = sum(math.prod(layer.output.shape[1:]) * 4 for layer in model.layers)
    return weights * (2 + 2 * optimizer_share) + outputs * rows


def _large_weights(quick):
    width = 256 if quick else 2048
    return keras.Sequential([keras.Input((width,)), *(layers.Dense(width, "relu") for _ in range(4)), layers.Dense(8)])


def _large_activations(quick):
    side = 16 if quick else 64
    convolutions = [layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(2 if quick else 6)]
    return keras.Sequential([keras.Input((side, side, 3)), *convolutions, layers.GlobalAveragePooling2D(), layers.Dense(8)])


MODELS = {"large weights": _large_weights, "large activations": _large_activations}
