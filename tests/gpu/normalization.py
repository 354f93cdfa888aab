"""Compare batch normalization and random numbers on towers with plain Keras on one device."""

from typing import Any

import keras
import numpy as np
from keras import layers

import keras_dp
from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic
from gpu.record import Record

LIMIT = 1e-9
ROWS, BATCH_SIZE = 34, 11
RANDOM_LAYERS = {
    "Dropout": lambda: layers.Dropout(0.4),
    "SpatialDropout2D": lambda: layers.SpatialDropout2D(0.4),
    "GaussianNoise": lambda: layers.GaussianNoise(0.3),
    "GaussianDropout": lambda: layers.GaussianDropout(0.3),
    "AlphaDropout": lambda: layers.AlphaDropout(0.3),
    "RandomFlip": lambda: layers.RandomFlip(),
}


class PredictsAsInTraining(keras.Sequential):
    """Predicts with the random numbers and the moments that training would use."""

    def predict_step(self, data: Any) -> Any:
        return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)


def run(record: Record) -> None:
    """Compares normalized rows, moments, moving statistics and random numbers."""
    devices = prepare(record, 4)
    use_exact_arithmetic()
    keras.config.set_floatx("float64")
    for count in (2, 4):
        _compare_moments(record, devices[:count])
        _compare_modes(record, devices[:count])
        for name in ("Dropout", "GaussianNoise") if record.quick else RANDOM_LAYERS:
            _compare_random_numbers(record, name, devices[:count])
    right = record.results["compared"] - len(record.results["different"])
    record.finding(f"{right} of {record.results['compared']} as they should be")


def _compare_moments(record: Record, devices: list[str]) -> None:
    """Compares the normalized rows, and the moments of the last batch, which momentum 0 leaves in the moving statistics."""
    x, y = models.images(ROWS)
    rows, moments = [], []
    for is_wrapped in (False, True):
        keras.utils.set_random_seed(3)
        norm = layers.BatchNormalization(momentum=0.0)
        stack = [keras.Input(x.shape[1:]), layers.Conv2D(6, 3), norm]
        model: Any = PredictsAsInTraining(stack)
        inner = model
        model = keras_dp.DataParallelModel(model, devices=devices) if is_wrapped else model
        model.compile(jit_compile=False)
        rows.append(model.predict(x, batch_size=BATCH_SIZE, verbose=0))
        model = PredictsAsInTraining([*inner.layers, layers.GlobalAveragePooling2D(), layers.Dense(models.CLASSES)])
        model = keras_dp.DataParallelModel(model, devices=devices) if is_wrapped else model
        model.compile(keras.optimizers.SGD(0.1), models.loss(), jit_compile=False)
        model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        moments.append([np.array(norm.moving_mean), np.array(norm.moving_variance)])
    for what, (one, towers) in (("normalized rows", rows), ("moments of the last batch, one row", moments)):
        record.compare("Batch normalization", comparing.difference(one, towers), LIMIT, what=what, towers=len(devices))


def _compare_modes(record: Record, devices: list[str]) -> None:
    """Compares weights and moving statistics; the moments of each tower's own slice must give other weights."""
    plain, state = _trained(None, None)
    for mode in ("sync", "local"):
        wrapped, received = _trained(devices, mode)
        statistics = [comparing.difference(np.array(getattr(plain, n)), np.array(getattr(wrapped, n))) for n in _STATISTICS]
        difference = comparing.difference(state, received)
        if mode == "sync":
            for name, value in zip(_STATISTICS, statistics, strict=True):
                record.compare("Batch normalization", value, LIMIT, what=name, towers=len(devices))
            record.compare("Batch normalization", difference, LIMIT, what="weights and optimizer", towers=len(devices))
        else:
            record.check(
                'Control: batch_norm="local" must differ',
                difference > 1e-5,
                what="weights and optimizer",
                towers=len(devices),
                difference=difference,
            )


_STATISTICS = ("moving_mean", "moving_variance")


def _trained(devices: list[str] | None, mode: Any) -> tuple[layers.BatchNormalization, list[np.ndarray]]:
    keras.utils.set_random_seed(3)
    inner = models.convolutions()
    model = inner if devices is None else keras_dp.DataParallelModel(inner, devices=devices, batch_norm=mode)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), models.loss(), jit_compile=False)
    x, y = models.images(ROWS)
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    norm = next(layer for layer in inner.layers if isinstance(layer, layers.BatchNormalization))
    return norm, comparing.state(model)


def _compare_random_numbers(record: Record, name: str, devices: list[str]) -> None:
    """Compares the outputs of a random layer for two batches, so that the state of the numbers is compared too."""
    x, _ = models.images(2 * BATCH_SIZE)
    drawn = []
    for is_wrapped in (False, True):
        keras.utils.set_random_seed(3)
        inner = PredictsAsInTraining([keras.Input(x.shape[1:]), RANDOM_LAYERS[name]()])
        model = keras_dp.DataParallelModel(inner, devices=devices) if is_wrapped else inner
        model.compile(jit_compile=False)
        drawn.append(model.predict(x, batch_size=BATCH_SIZE, verbose=0))
    if np.array_equal(drawn[0], x):
        raise RuntimeError(f"{name} has changed nothing: its random numbers are not compared")
    record.compare("Random numbers", comparing.difference(*drawn), LIMIT, layer=name, towers=len(devices))
