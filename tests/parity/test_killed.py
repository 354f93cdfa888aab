"""A process that is killed while it writes a checkpoint leaves a whole file, from which a run ends as if it was never broken."""

import keras
import numpy as np
import pytest
from comparison import assert_same
from keras import callbacks, layers
from killed_runs import EPOCHS, WAYS, at_a_moment_of, result, run, told

import keras_dp

WRITING = 0.15  # seconds that a file takes, and somewhat more
FEW = [pytest.param(way, 1, marks=pytest.mark.thorough) for way in WAYS]
MANY = [pytest.param(way, kills, marks=pytest.mark.slow) for way, kills in zip(WAYS, (18, 16, 16), strict=True)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Returns the results of plain Keras on one device."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, "ModelCheckpoint", None) == 0
    return result(folder)


@pytest.mark.processes
@pytest.mark.parametrize(("way", "kills"), [*FEW, *MANY])
def test_a_run_that_is_killed_while_it_writes_ends_as_if_unbroken(way, kills, unbroken, tmp_path):
    """Each run goes on with as many towers, with more, or in plain Keras."""
    draw = np.random.default_rng(kills)
    amid = 0
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        moment = at_a_moment_of(folder, int(draw.integers(EPOCHS - 1)), draw.uniform(0, WRITING))
        assert run(folder, way, 2, moment) == -9
        amid += told(folder)[-1][0] == "end"
        assert run(folder, way, [2, 3, None][number % 3]) == 0
        received = result(folder)
        assert received[0].keys() == unbroken[0].keys()
        assert_same(unbroken, received, 1e-9)
    print(f"{way}: {kills} kills, {amid} of them amid writing")


@pytest.mark.parametrize("double_checkpoint", [False, True])
@pytest.mark.parametrize("towers", [None, 3])
def test_a_backup_that_is_cut_off_is_an_error_unless_there_are_two(towers, double_checkpoint, tmp_path):
    """So it is in plain Keras."""

    def begun(epochs):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        model = keras_dp.DataParallelModel(model, devices=towers) if towers else model
        model.compile("adam", "mse")
        backup = callbacks.BackupAndRestore(tmp_path, double_checkpoint=double_checkpoint, delete_checkpoint=False)
        x = np.random.default_rng(0).normal(size=(8, 4))
        return model.fit(x, x[:, :2], batch_size=3, epochs=epochs, verbose=0, callbacks=[backup]).epoch

    assert begun(3) == [0, 1, 2]
    weights = tmp_path / "latest.weights.h5"
    weights.write_bytes(weights.read_bytes()[:1000])
    if double_checkpoint:
        assert begun(4) == [2, 3]
    else:
        with pytest.raises(OSError, match="file"):
            begun(4)
