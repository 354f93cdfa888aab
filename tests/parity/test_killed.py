"""A process that is killed while it writes a checkpoint leaves a whole file, from which a run goes on as if unbroken."""

import keras
import numpy as np
import pytest
from comparison import assert_same
from keras import callbacks, layers
from killed_runs import EPOCHS, at_a_moment_of, result, run, told

import keras_dp

WRITING = 0.15  # seconds that a file takes, and somewhat more
KILLS = {"ModelCheckpoint": 18, "save": 16}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Returns the results of plain Keras on one device."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, "ModelCheckpoint", 0) == 0
    return result(folder)


def killed(folder, way, draw):
    """Kills a run at a random moment after a random epoch, and returns whether a file was being written."""
    moment = at_a_moment_of(folder, int(draw.integers(EPOCHS - 1)), draw.uniform(0, WRITING))
    assert run(folder, way, 2, moment) == -9
    return told(folder)[-1][0] == "end"


def folders(path, count):
    """Yields new folders, each with the number of towers of the run that goes on, or 0 for plain Keras."""
    for number in range(count):
        folder = path / str(number)
        folder.mkdir()
        yield folder, [2, 3, 0][number % 3]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "kills"),
    [("ModelCheckpoint", 1), *(pytest.param(way, kills, marks=pytest.mark.slow) for way, kills in KILLS.items())],
)
def test_a_run_that_is_killed_while_it_writes_goes_on_as_if_unbroken(way, kills, unbroken, tmp_path):
    draw = np.random.default_rng(kills)
    amid = 0
    for folder, towers in folders(tmp_path, kills):
        amid += killed(folder, way, draw)
        assert run(folder, way, towers) == 0
        received = result(folder)
        assert received[0].keys() == unbroken[0].keys()
        assert_same(unbroken, received, 1e-9)
    print(f"{way}: {kills} kills, {amid} of them amid writing")


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_goes_on_from_a_double_backup_as_if_unbroken_or_says_that_it_cannot(unbroken, tmp_path):
    """Keras writes the weights and then the epoch. It has no second backup of the first, and needs the file of the epoch."""
    kills = 16
    draw = np.random.default_rng(kills)
    amid, refused = 0, 0
    for folder, towers in folders(tmp_path, kills):
        amid += killed(folder, "BackupAndRestore", draw)
        code = run(folder, "BackupAndRestore", towers)
        assert code in (0, 1)
        refused += code
        if code == 0:
            assert_same(unbroken, result(folder), 1e-9)
    print(f"BackupAndRestore: {kills} kills, {amid} of them amid writing, {refused} could not be resumed")


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
