"""Train with checkpoints in a process that may be killed at any moment, and go on from what it has left.

The weights are large and the epochs short, so that much of the time is spent writing.
"""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
from forked_processes import Process
from keras import layers

import keras_dp

EPOCHS, ROWS, BATCH, WIDTH = 6, 23, 5, 500  # the last batch has three rows


class Shuffled(keras.utils.PyDataset):
    """Shuffles the rows by a number."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0)
        self.x, self.y = draw.normal(size=(ROWS, 8)), draw.normal(size=(ROWS, 2))
        self.begin(0)

    def begin(self, epoch):
        self.order = np.random.default_rng(epoch).permutation(ROWS)

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number):
        rows = self.order[number * BATCH : number * BATCH + BATCH]
        return self.x[rows], self.y[rows]


class NumbersOfEpoch(keras.callbacks.Callback):
    """Sets the order of the rows and the states of random layers by the number of the epoch. Keras's files hold neither."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.begin(epoch)
        states = [variable for variable in self.model.variables if variable.path.endswith("seed_generator_state")]
        for number, state in enumerate(states):
            state.assign([number, epoch * 1_000_000])


class Told(keras.callbacks.Callback):
    """Appends what happens to a file, line by line. Between the end of an epoch and the next event, other callbacks write."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def tell(self, *what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def on_epoch_begin(self, epoch, logs=None):
        self.tell("begin", epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.tell("end", epoch, logs)


class Saving(keras.callbacks.Callback):
    """Saves after each epoch under another name, which becomes the file's name when it is whole."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        written = self.path.with_name("written.keras")
        self.model.save(written)
        os.replace(written, self.path)


def build():
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(WIDTH, "tanh"), layers.Dropout(0.3), layers.Dense(WIDTH), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
    return model


def newest(folder):
    """Returns the model of the newest file of `ModelCheckpoint` that is whole, or a new one, and the number of its epochs."""
    for path in sorted(folder.glob("*.keras"), reverse=True):
        try:
            return keras.saving.load_model(path), int(path.stem)
        except ValueError:  # it was being written
            pass
    return build(), 0


def saved(folder):
    """Returns the model of the file of `Saving`, or a new one, and the number of its epochs."""
    path = folder / "saved.keras"
    model = keras.saving.load_model(path) if path.exists() else build()
    return model, int(model.optimizer.iterations) // len(Shuffled())


WAYS = {
    "ModelCheckpoint": (newest, lambda folder: keras.callbacks.ModelCheckpoint(folder / "{epoch:02}.keras")),
    "save": (saved, lambda folder: Saving(folder / "saved.keras")),
    "BackupAndRestore": (
        lambda folder: (build(), 0),
        lambda folder: keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False, double_checkpoint=True),
    ),
}


def train(folder, way, towers):
    """Trains to the end from what a run before has left in the folder; on one device with plain Keras if there is no tower."""
    if towers:
        keras_dp.use_logical_cpus(towers)
    keras.config.set_floatx("float64")
    begun, callback = WAYS[way]
    model, epoch = begun(folder)
    trained = keras_dp.DataParallelModel(model) if towers else model
    data = Shuffled()
    happened = Told(folder / "told.jsonl")
    callbacks = [NumbersOfEpoch(data), happened, callback(folder)]
    trained.fit(data, epochs=EPOCHS, initial_epoch=epoch, shuffle=False, verbose=0, callbacks=callbacks)
    happened.tell("done")
    np.savez(folder / "end.npz", *trained.get_weights(), *(np.asarray(each) for each in model.optimizer.variables))


def told(folder):
    """Returns all events of a folder that were told as a whole."""
    path = folder / "told.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(folder, way, towers, kill=None):
    """Trains in a process of its own, kills it when `kill` has waited, and returns its exit code."""
    with Process(__file__, folder, way, towers, log=folder / "log") as process:
        if kill is not None:
            kill(process)
            process.send_signal(signal.SIGKILL)
        return process.wait()


def at_a_moment_of(folder, epoch, seconds):
    """Returns a function that waits until an epoch has ended, and a file is being written, and for some seconds more."""

    def wait(process):
        while process.poll() is None and not any(event[:2] == ["end", epoch] for event in told(folder)):
            time.sleep(0.001)
        time.sleep(seconds)

    return wait


def result(folder):
    """Returns the last results of each epoch, and the weights and the optimizer's state at the end."""
    with np.load(folder / "end.npz") as end:
        return {event[1]: event[2] for event in told(folder) if event[0] == "end"}, [end[name] for name in end.files]


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
