"""A checkpoint that cannot be written is the error of plain Keras, leaves the weights as they are, and training can go on."""

import contextlib
import json
import pathlib
import subprocess

import full_filesystem
import keras
import numpy as np
import pytest
from comparison import TOLERANCE, assert_same, assert_same_script
from forked_processes import Process
from keras import callbacks, layers

resource = pytest.importorskip("resource")

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(23, 4)), rng.normal(size=(23, 2))
FULL, READ_ONLY = pathlib.Path("/dev/full"), pathlib.Path("/sys/kernel")
NAMES = {"whole": "model.keras", "weights": "model.weights.h5", "backup": "latest.weights.h5"}
FEW_BYTES = 10_000


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(50, "tanh"), layers.Dense(2)])


@contextlib.contextmanager
def full(folder, kind):
    """Links the file to a device that is always full."""
    folder.mkdir(exist_ok=True)
    path = folder / NAMES[kind]
    path.symlink_to(FULL)
    yield folder
    path.unlink()


@contextlib.contextmanager
def limited(folder, kind):
    """Allows files of few bytes, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def read_only(folder, kind):
    """Gives a folder in which nobody can make files."""
    yield READ_ONLY


@contextlib.contextmanager
def no_folder(folder, kind):
    """Puts a file in the place of the folder."""
    folder.write_text("")
    yield folder
    folder.unlink()


def writing(kind, folder):
    if kind == "backup":
        return callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    return callbacks.ModelCheckpoint(folder / NAMES[kind], save_weights_only=kind == "weights")


@pytest.mark.skipif(not (FULL.exists() and READ_ONLY.exists()), reason="this system has no files for it")
@pytest.mark.parametrize(
    ("fault", "kind"),
    # HDF5 may crash where a file of its own cannot grow, in plain Keras as well.
    [(full, "whole"), (read_only, "weights"), (no_folder, "backup"), (limited, "whole")],
)
def test_a_file_that_cannot_be_written_is_an_error_and_training_goes_on(fault, kind, tmp_path):
    folders = iter([tmp_path / "plain", tmp_path / "towers"])

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse")
        arguments = {"batch_size": 7, "shuffle": False, "verbose": 0}
        model.fit(X, Y, **arguments)
        with fault(next(folders), kind) as folder, pytest.raises(Exception) as error:  # noqa: PT011
            model.fit(X, Y, epochs=2, callbacks=[writing(kind, folder)], **arguments)
        errors.append(error.value)
        weights = model.get_weights()
        return weights, model.fit(X, Y, epochs=2, **arguments).history

    errors = []
    assert_same_script(build, script, 3)
    plain, towers = errors
    assert type(plain) is type(towers)
    assert isinstance(towers, OSError)


def may_mount():
    """Whether this system lets a process mount a filesystem that it alone sees."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.skipif(not may_mount(), reason="this system lets nobody mount a filesystem")
def test_a_filesystem_becomes_full_and_training_goes_on_when_there_is_room(tmp_path):
    """Files that were written before are whole, and the error is that of plain Keras."""
    with Process(full_filesystem.__file__, tmp_path, log=tmp_path / "log") as process:
        assert process.wait() == 0, (tmp_path / "log").read_text()
    plain, towers = (dict(np.load(tmp_path / f"{towers}.npz")) for towers in (0, 3))
    assert plain["said"] == towers["said"]
    said = json.loads(str(towers["said"]))
    assert 0 < len(said["whole"]) < full_filesystem.EPOCHS - 1
    assert said["error"] is not None
    del plain["said"], towers["said"]
    assert_same(plain, towers, TOLERANCE["float64"])
