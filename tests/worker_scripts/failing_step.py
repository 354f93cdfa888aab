"""Train on workers, let an operation fail on the last worker alone, call again, and print every error.

failing_step.py WHERE    "step" for a step after a good one, "first" for the first step, "data" for the dataset of the worker,
                         "alike" for a step of all workers, which then go on
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import keras_dp

where = sys.argv[1]
keras_dp.use_logical_cpus(2)
workers = keras_dp.connect_workers(timeout=8)
fails = where == "alike" or workers.index == workers.count - 1


class Checked(keras.layers.Layer):
    """Fails on rows above 500."""

    def call(self, x):
        return tf.debugging.check_numerics(tf.math.log(500.0 - x), "too large")


def rows(count):
    """Yields rows, of which the last two are too large, or fails after half of them."""
    for row in range(count):
        if where == "data" and fails and 2 * row == count:
            raise OSError("a file is gone")
        yield np.full(3, 1000.0 if where != "data" and fails and row >= count - 2 else 1.0, "float32"), np.ones(1, "float32")


def batches(count):
    """Returns this worker's batches of two rows."""
    specs = (tf.TensorSpec((3,), "float32"), tf.TensorSpec((1,), "float32"))
    return tf.data.Dataset.from_generator(lambda: rows(count), output_signature=specs).batch(2)


class WholeSteps(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.on_train_batch_end(0)

    def on_train_batch_end(self, batch, logs=None):
        self.weights = model.get_weights()


keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((3,)), Checked(), keras.layers.Dense(1)])
parallel = keras_dp.DataParallelModel(model, devices=2)
parallel.compile("adam", "mse")
whole_steps = WholeSteps()
for call in ("fit", "predict", "predict"):
    try:
        if call == "fit":
            parallel.fit(batches(2 if where == "first" else 8), shuffle=False, sharded=True, verbose=0, callbacks=[whole_steps])
        else:
            parallel.predict(np.ones((8, 3), "float32"), batch_size=8, verbose=0)
    except Exception as error:
        print(f"{call}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), flush=True)
print(f"a change of {max(abs(one - other).max() for one, other in zip(whole_steps.weights, model.get_weights(), strict=True))}")
if where == "alike":
    fails = False
    parallel.fit(batches(8), shuffle=False, sharded=True, verbose=0)
print(f"weights: {model.get_weights()[0].tolist()}", flush=True)
