"""Time steps of a tiny model, which consist of the host's work."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from gpu import models
from gpu.devices import prepare
from gpu.timing import step_milliseconds

ROWS, FEATURES = 32, 16
FOUND = ("plain Keras", "keras_dp, 1 tower", "keras_dp, 2 towers", "keras_dp, 4 towers")


def run(record):
    """Times plain Keras and 1, 2 and 4 towers, in turns, so that other load affects all of them."""
    devices = prepare(record, 4)
    trained = {"plain Keras": _model(None), "plain Keras by default, with XLA on GPUs": _model(None, jit_compile="auto")}
    for count in (1, 2, 4):
        trained[f"keras_dp, {count} tower{'s' if count > 1 else ''}"] = _model(devices[:count])
    trained["keras_dp, 4 towers, not packed"] = _model(devices, pack_copies=False)
    trained["keras_dp, 4 towers, packed"] = _model(devices, pack_copies=True)
    random = np.random.default_rng(0)
    batch = random.normal(size=(ROWS, FEATURES)).astype("float32"), random.normal(size=(ROWS, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    times = {name: [] for name in trained}
    for _ in range(3):
        for name, model in trained.items():
            times[name] += list(step_milliseconds(model, dataset, steps=50 if record.quick else 200, warm_up=20))
    plain = float(np.median(times["plain Keras"]))
    for name, milliseconds in times.items():
        low, median, high = np.percentile(milliseconds, [10, 50, 90])
        record.row("Time of a step, ms", engine=name, median=median, low=low, high=high, above_plain=median - plain)
    rows = record.results["tables"]["Time of a step, ms"]
    record.finding("; ".join(f"{row['engine']} {row['median']:.2f} ms" for row in rows if row["engine"] in FOUND))
    record.remark("Low and high are the times that 10 % and 90 % of the steps stay below.")


def _model(devices, jit_compile=False, **arguments):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((FEATURES,)), *(layers.Dense(FEATURES, "relu") for _ in range(3)), layers.Dense(1)])
    trained = models.on(devices, model, **arguments)
    trained.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    return trained
