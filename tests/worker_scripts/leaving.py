"""Train and evaluate; the last worker ends in a method of a callback.

leaving.py METHOD    "on_train_end" or "on_test_end"
"""

import os
import sys

import keras
import numpy as np

import keras_dp

workers = keras_dp.connect_workers()
leave = keras.callbacks.LambdaCallback(**{sys.argv[1]: lambda logs: workers.index == workers.count - 1 and os._exit(3)})
parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
parallel.compile("sgd", "mse")
data = {"x": np.ones((8, 2), "float32"), "y": np.ones((8, 1), "float32"), "batch_size": 4, "verbose": 0}
for method in ("fit", "evaluate"):
    getattr(parallel, method)(**data, callbacks=[leave])
    print(f"{method} has ended", flush=True)
