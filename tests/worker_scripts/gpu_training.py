"""Train in float64 on two workers, or in plain Keras, and print the weights and the time of a step.

gpu_training.py COMMUNICATION    "ring" or "nccl" between workers, or "plain" for plain Keras on one device
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from gpu import models
from gpu.timing import step_milliseconds

import keras_dp

communication = sys.argv[1]
for card in tf.config.list_physical_devices("GPU"):
    # Both workers may have to share a card.
    tf.config.experimental.set_memory_growth(card, True)
if communication != "plain":
    workers = keras_dp.connect_workers(timeout=60, start_timeout=60, communication=communication)
    assert workers.count == 2
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
model = models.convolutions()
model = model if communication == "plain" else keras_dp.DataParallelModel(model, devices=1)
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), models.loss(), jit_compile=False)
x, y = models.images(34)
model.fit(x, y, batch_size=11, epochs=2, shuffle=False, verbose=0)
weights = [weight.tolist() for weight in model.get_weights()]
dataset = tf.data.Dataset.from_tensors((x[:16], y[:16])).repeat()
milliseconds = float(np.median(step_milliseconds(model, dataset, steps=20, warm_up=5)))
print("trained", json.dumps({"weights": weights, "milliseconds": milliseconds}), flush=True)
