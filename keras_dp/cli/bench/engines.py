"""Build the model that an engine trains."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

import keras_dp
from keras_dp.cli import models
from keras_dp.cli.bench.independent_towers import independent_towers
from keras_dp.cli.runs import Run
from keras_dp.keras_internals import keras_models

SEED = 0
WRAPPERS: dict[str, Callable[..., keras.Model]] = {
    "keras_dp": keras_dp.DataParallelModel,
    "workers": keras_dp.DataParallelModel,
    "ceiling": independent_towers,
}


class Engine(NamedTuple):
    """Holds the model inside, and the model that is trained, which may be the same."""

    inner_model: keras.Model
    trained_model: keras.Model


def start(run: Run) -> list[str] | None:
    """Seeds this process, in which TensorFlow must not have started yet, and returns its devices; None for a worker's own."""
    if run.workers > 1:
        keras_dp.connect_workers()
        devices = None
    elif tf.config.list_physical_devices("GPU"):
        devices = [f"GPU:{index}" for index in range(run.towers)]
    else:
        # They share the cores.
        keras_dp.use_logical_cpus(run.towers)
        devices = [f"CPU:{index}" for index in range(run.towers)]
    keras.utils.set_random_seed(SEED)
    return devices


def build(run: Run, devices: list[str] | None) -> Engine:
    """Builds and compiles the model on its engine."""
    workload = models.workload(run.model)
    mirrored = run.engine == "mirrored"
    with tf.distribute.MirroredStrategy(devices).scope() if mirrored else contextlib.nullcontext():
        inner_model = workload.build()
        trained_model = _on_engine(run, inner_model, devices)
        if not inner_model.compiled:
            jit_compile = run.jit_compile or "auto"
            trained_model.compile(models.optimizer(), jit_compile=jit_compile, **workload.objective())
    return Engine(inner_model, trained_model)


def _on_engine(run: Run, model: keras.Model, devices: list[str] | None) -> keras.Model:
    """Returns the model that an engine trains: `model` itself, or a wrapper."""
    if run.engine in WRAPPERS:
        return WRAPPERS[run.engine](
            model,
            devices=devices,
            parameter_device=run.parameter_device,
            batch_norm=run.batch_norm,
            gradient_dtype=run.gradient_dtype,
        )
    if run.engine == "mirrored":
        for layer in keras_models.flatten_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = run.batch_norm == "sync"
    return model
