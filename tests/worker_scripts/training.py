"""Train the same model on the same data on each worker, and print lines that the tests of failures wait for.

training.py SECONDS_PER_EPOCH BACKUP_DIRECTORY [OPTION ...]
"""

import argparse
import json
import logging
import os
import signal
import time
from importlib import metadata

import keras
import numpy as np

import keras_dp
from keras_dp.workers import health_check


def train(epochs, wrap=lambda model: model, callbacks=()):
    """Trains the model that `wrap` returns for the plain model, and returns its weights."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 5)), rng.integers(0, 3, 16)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
    model = wrap(keras.Sequential([keras.Input((5,)), *hidden, keras.layers.Dense(3, activation="softmax")]))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


class Report(keras.callbacks.Callback):
    """Prints each epoch, slows it down, and kills the last worker in the middle of one."""

    def __init__(self, seconds_per_batch, die_in_epochs):
        super().__init__()
        self.seconds_per_batch = seconds_per_batch
        start = int(os.environ.get("KERAS_DP_RESTART", "0"))
        self.dies_in = die_in_epochs[start : start + 1]

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print(f"epoch {epoch}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds_per_batch)
        if self.dies_in == [self.epoch] and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds_per_epoch", type=float)
    parser.add_argument("backup")
    parser.add_argument("--die-in-epochs", type=int, nargs="*", default=[], help="when the last worker dies, in each start")
    parser.add_argument("--slower", type=float, default=1.0, help="the last worker sleeps so many times as long as the others")
    parser.add_argument("--ahead", type=float, default=0.0, help="the last worker's clock is so many seconds ahead")
    parser.add_argument("--keras", help="the version of Keras that the second worker reports")
    parser.add_argument("--full", action="store_true", help="the log of the epochs is on a full disk")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--start-timeout", type=float, default=60.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--message-seconds", type=float, default=10.0, help="between messages that others are waited for")
    args = parser.parse_args()

    logging.basicConfig(level=logging.WARNING)
    health_check.MESSAGE_SECONDS = args.message_seconds
    if args.keras and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        version = metadata.version
        metadata.version = lambda name: args.keras if name == "keras" else version(name)
    workers = keras_dp.connect_workers(timeout=args.timeout, start_timeout=args.start_timeout)
    print(f"connected {workers.index} of {workers.count}, process {os.getpid()}", flush=True)
    is_last = workers.index == workers.count - 1
    if args.ahead and is_last:
        now = time.time
        time.time = lambda: now() + args.ahead
    seconds_per_batch = args.seconds_per_epoch / 4 * (args.slower if is_last else 1)
    callbacks = [
        Report(seconds_per_batch, args.die_in_epochs if is_last else []),
        keras.callbacks.BackupAndRestore(args.backup, double_checkpoint=True),
    ]
    if args.full:
        callbacks.append(keras.callbacks.CSVLogger("/dev/full"))
    weights = train(args.epochs, keras_dp.DataParallelModel, callbacks)
    if workers.is_chief:
        print("weights", json.dumps([weight.tolist() for weight in weights]), flush=True)


if __name__ == "__main__":
    main()
