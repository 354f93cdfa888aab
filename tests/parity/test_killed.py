"""A process that is killed while it writes a checkpoint leaves a whole file, from which a run goes on as if unbroken."""

import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import pytest
from comparison import assert_same
from forked_processes import Process
from keras import callbacks, layers

import keras_dp

# The last batch has three rows. The weights are large and the epochs short, so that much of the time is spent writing.
EPOCHS, STEPS, ROWS, BATCH, WIDTH = 6, 5, 23, 5, 500
WRITING = 0.15  # seconds that a file takes, and somewhat more
KILLS = {"ModelCheckpoint": 18, "save": 16, "BackupAndRestore": 16}


DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(ROWS, 8)), DRAW.normal(size=(ROWS, 2))


class Shuffled(keras.utils.PyDataset):
    """Gives the rows in an order of the epoch."""

    epoch = 0

    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        rows = np.random.default_rng(self.epoch).permutation(ROWS)[number * BATCH : number * BATCH + BATCH]
        return X[rows], Y[rows]


class Told(callbacks.Callback):
    """Appends the ends of epochs to a file, line by line. Between one of them and the next, other callbacks write.

    Sets the order of the rows and the states of random layers by the number of the epoch. Keras's files hold neither.
    """

    def __init__(self, path, data):
        super().__init__()
        self.path, self.data = path, data

    def tell(self, epoch, logs=None):
        with self.path.open("a") as file:
            file.write(json.dumps([epoch, logs]) + "\n")

    def on_epoch_begin(self, epoch, logs=None):
        self.tell("begin")
        self.data.epoch = epoch
        states = [variable for variable in self.model.variables if variable.path.endswith("seed_generator_state")]
        for number, state in enumerate(states):
            state.assign([number, epoch * 1_000_000])

    def on_epoch_end(self, epoch, logs=None):
        self.tell(epoch, logs)


def build():
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(WIDTH, "tanh"), layers.Dropout(0.3), layers.Dense(WIDTH), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.001), "mse", metrics=["mae"])
    return model


def newest(folder):
    """Returns the model of the newest file that is whole, or a new one."""
    if (folder / "saved.keras").exists():
        return keras.saving.load_model(folder / "saved.keras")
    for path in sorted(folder.glob("[0-9]*.keras"), reverse=True):
        try:
            return keras.saving.load_model(path)
        except ValueError:  # it was being written
            pass
    return build()


def save(model, folder):
    """Saves a model under another name, which becomes the file's name when it is whole."""
    model.save(folder / "written.keras")
    os.replace(folder / "written.keras", folder / "saved.keras")


def checkpoints(way, folder, model):
    if way == "ModelCheckpoint":
        return callbacks.ModelCheckpoint(folder / "{epoch:02}.keras")
    if way == "save":
        return callbacks.LambdaCallback(on_epoch_end=lambda *_: save(model, folder))
    return callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False, double_checkpoint=True)


def train(folder, way, towers):
    """Trains to the end from what a run before has left in the folder; on one device with plain Keras if there is no tower."""
    if towers:
        keras_dp.use_logical_cpus(towers)
    keras.config.set_floatx("float64")
    model, data = newest(folder), Shuffled()
    epoch = int(model.optimizer.iterations) // STEPS
    trained = keras_dp.DataParallelModel(model) if towers else model
    called = [Told(folder / "told.jsonl", data), checkpoints(way, folder, trained)]
    trained.fit(data, epochs=EPOCHS, initial_epoch=epoch, shuffle=False, verbose=0, callbacks=called)
    np.savez(folder / "end.npz", *trained.get_weights(), *(np.asarray(each) for each in model.optimizer.variables))


def told(folder):
    path = folder / "told.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(folder, way, towers, killed=None):
    """Trains in a process of its own, and returns its exit code.

    It is killed if `killed` is an epoch and a time in seconds: so long after the epoch, when a file is being written.
    """
    with Process(__file__, folder, way, towers, log=folder / "log") as process:
        if killed is not None:
            epoch, seconds = killed
            while process.poll() is None and not any(event[0] == epoch for event in told(folder)):
                time.sleep(0.001)
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        return process.wait()


def result(folder):
    """Returns the last results of each epoch, and the weights and the optimizer's state at the end."""
    with np.load(folder / "end.npz") as end:
        return {event[0]: event[1] for event in told(folder) if event[0] != "begin"}, [end[name] for name in end.files]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "kills"),
    [("ModelCheckpoint", 1), *(pytest.param(way, kills, marks=pytest.mark.slow) for way, kills in KILLS.items())],
)
def test_a_run_that_is_killed_while_it_writes_goes_on_as_if_unbroken(way, kills, tmp_path):
    """A double backup may end with an error: Keras has no second one of the first, and needs the file of the epoch."""
    assert run(tmp_path, "ModelCheckpoint", 0) == 0
    draw = np.random.default_rng(kills)
    amid, refused = 0, 0
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run(folder, way, 2, (int(draw.integers(EPOCHS - 1)), draw.uniform(0, WRITING))) == -9
        amid += told(folder)[-1][0] != "begin"
        code = run(folder, way, [2, 3, 0][number % 3])
        assert code in ((0, 1) if way == "BackupAndRestore" else (0,))
        refused += code
        if code == 0:
            assert_same(result(tmp_path), result(folder), 1e-9)
    print(f"{way}: {kills} kills, {amid} of them amid writing, {refused} could not be resumed")


@pytest.mark.parametrize(
    ("towers", "double_checkpoint", "before"), [(3, False, 3), (3, True, 3), (3, True, 1), (None, False, 3), (None, True, 3)]
)
def test_a_backup_that_is_cut_off_is_an_error_unless_there_are_two(towers, double_checkpoint, before, tmp_path):
    """So it is in plain Keras."""

    def begun(epochs):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model = keras_dp.DataParallelModel(model, devices=towers) if towers else model
        model.compile("adam", "mse")
        backup = callbacks.BackupAndRestore(tmp_path, double_checkpoint=double_checkpoint, delete_checkpoint=False)
        x = np.random.default_rng(0).normal(size=(8, 4))
        return model.fit(x, x[:, :2], batch_size=3, epochs=epochs, verbose=0, callbacks=[backup]).epoch

    assert begun(before) == list(range(before))
    weights = tmp_path / "latest.weights.h5"
    weights.write_bytes(weights.read_bytes()[:1000])
    if double_checkpoint and before > 1:
        assert begun(4) == [2, 3]
    else:
        with pytest.raises(OSError, match="file"):
            begun(4)


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
