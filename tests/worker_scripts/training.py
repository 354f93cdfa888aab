"""Train the same model on the same data on each worker, and print lines that the tests of failures wait for.

training.py SECONDS_PER_EPOCH BACKUP_DIRECTORY [OPTION ...]
"""

import argparse
import json
import logging
import os
import signal
import time

import keras
import numpy as np

import keras_dp

parser = argparse.ArgumentParser()
parser.add_argument("seconds_per_epoch", type=float)
parser.add_argument("backup")
parser.add_argument("--die-in-epochs", type=int, nargs="*", default=[], help="when the last worker dies, in each start")
parser.add_argument("--slower", type=float, default=1.0, help="the last worker sleeps so many times as long as the others")
parser.add_argument("--ahead", type=float, default=0.0, help="the last worker's clock is so many seconds ahead")
parser.add_argument("--full", action="store_true", help="the log of the epochs is on a full disk")
parser.add_argument("--timeout", type=float, default=60.0)
parser.add_argument("--start-timeout", type=float, default=60.0)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

logging.basicConfig(level=logging.WARNING)
keras.config.set_floatx("float64")
workers = keras_dp.connect_workers(timeout=args.timeout, start_timeout=args.start_timeout)
print(f"connected {workers.index} of {workers.count}, process {os.getpid()}", flush=True)


is_last = workers.index == workers.count - 1
seconds_per_batch = args.seconds_per_epoch / 4 * (args.slower if is_last else 1)
if args.ahead and is_last:
    now = time.time
    time.time = lambda: now() + args.ahead


class Report(keras.callbacks.Callback):
    """Prints each epoch, slows it down, and kills the last worker in the middle of one."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print(f"epoch {epoch}", flush=True)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(seconds_per_batch)
        start = int(os.environ.get("KERAS_DP_RESTART", "0"))
        if args.die_in_epochs[start : start + 1] == [self.epoch] and batch == 1 and is_last:
            os.kill(os.getpid(), signal.SIGKILL)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(16, 5)), rng.integers(0, 3, 16)
keras.utils.set_random_seed(3)
model = keras.Sequential(
    [keras.Input((5,)), keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3, activation="softmax")]
)
parallel = keras_dp.DataParallelModel(model)
parallel.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
callbacks = [Report(), keras.callbacks.BackupAndRestore(args.backup, double_checkpoint=True)]
if args.full:
    callbacks.append(keras.callbacks.CSVLogger("/dev/full"))
parallel.fit(x, y, batch_size=4, epochs=args.epochs, shuffle=False, verbose=0, callbacks=callbacks)
if workers.is_chief:
    print("weights", json.dumps([weight.tolist() for weight in parallel.get_weights()]), flush=True)
