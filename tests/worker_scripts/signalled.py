"""Train, and get SIGTERM in the middle of a phase: signalled.py PHASE TOWERS HANDLER.

Half a second passes in each phase, in Python or in the kernels of a step. No tower is plain Keras. HANDLER is "default", or
"handled" by a function that raises.
"""

import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import keras_dp

phase, towers = sys.argv[1], int(sys.argv[2])
if sys.argv[3] == "handled":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))


def enter(entered):
    if entered == phase:
        print("in", phase, flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()


class Slow(keras.layers.Layer):
    def build(self, shape):
        self.kept = self.add_weight(shape=())

    def call(self, x):
        if tf.inside_function():
            enter("trace")
            time.sleep(0.5 if phase == "trace" else 0)
        square = tf.zeros([500, 500]) + x[0, 0]
        for _ in range(20):
            square = square @ square / 500.0
        return x + 0 * square[0, 0] + self.kept

    def save_own_variables(self, store):
        enter("checkpoint")
        time.sleep(0.5)
        super().save_own_variables(store)


class Telling(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        enter("step" if batch == 1 else "")

    def on_test_batch_begin(self, batch, logs=None):
        enter("validation" if batch == 1 else "")


if towers:
    keras_dp.use_logical_cpus(towers)
model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
model = keras_dp.DataParallelModel(model) if towers else model
model.compile("sgd", "mse")
x, y = np.ones((400, 4)), np.ones((400, 1))
saving = keras.callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True)
model.fit(x, y, batch_size=20, epochs=100, verbose=0, validation_data=(x, y), callbacks=[Telling(), saving])
