"""A checkpoint that cannot be written is the error of plain Keras, leaves the weights as they are, and training can go on."""

import contextlib
import ctypes
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from comparison import TOLERANCE, assert_same, assert_same_script
from forked_processes import output_of
from keras import callbacks, layers

import keras_dp

resource = pytest.importorskip("resource")

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(23, 4)), rng.normal(size=(23, 2))
FULL, READ_ONLY = pathlib.Path("/dev/full"), pathlib.Path("/sys/kernel")
NAMES = {"whole": "model.keras", "weights": "model.weights.h5", "backup": "latest.weights.h5"}
FEW_BYTES = 10_000
EPOCHS = 8
UNSHUFFLED = {"batch_size": 7, "shuffle": False, "verbose": 0}


def build():
    return keras.Sequential([keras.Input((4,)), layers.Dense(50, "tanh"), layers.Dense(2)])


def unwritable(fault, folder, name):
    if fault == "read-only":
        return READ_ONLY
    if fault == "no folder":
        folder.write_text("")
    else:
        folder.mkdir()
    if fault == "full":
        (folder / name).symlink_to(FULL)
    return folder


@contextlib.contextmanager
def limited(fault):
    """Allows files of few bytes, as a quota does, if the fault is that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES if fault == "quota" else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def writing(kind, folder):
    if kind == "backup":
        return callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    return callbacks.ModelCheckpoint(folder / NAMES[kind], save_weights_only=kind == "weights")


@pytest.mark.skipif(not (FULL.exists() and READ_ONLY.exists()), reason="this system has no files for it")
@pytest.mark.parametrize(
    ("fault", "kind"),
    # HDF5 may crash where a file of its own cannot grow, in plain Keras as well.
    [("full", "whole"), ("read-only", "weights"), ("no folder", "backup"), ("quota", "whole")],
)
def test_a_file_that_cannot_be_written_is_an_error_and_training_goes_on(fault, kind, tmp_path):
    errors = []

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(X, Y, **UNSHUFFLED)
        folder = unwritable(fault, tmp_path / str(len(errors)), NAMES[kind])
        with limited(fault), pytest.raises(OSError) as error:  # noqa: PT011
            model.fit(X, Y, epochs=2, callbacks=[writing(kind, folder)], **UNSHUFFLED)
        errors.append(type(error.value))
        weights = model.get_weights()
        return weights, model.fit(X, Y, epochs=2, **UNSHUFFLED).history

    assert_same_script(build, script, 3)
    assert errors[0] is errors[1]


def unshare():
    """Lets this process mount filesystems that it alone sees, as `unshare --user --map-root-user --mount` does."""
    owns = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    assert ctypes.CDLL(None).unshare(0x10020000) == 0
    for name, text in owns.items():
        pathlib.Path("/proc/self", name).write_text(text)


def train_until_it_is_full(folder, towers):
    """Trains with a file for each epoch on a small filesystem, goes on when there is room, and leaves the results beside it."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)  # room for four files
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(150, "tanh"), layers.Dense(110, "tanh"), layers.Dense(2)])
    trained = keras_dp.DataParallelModel(model, devices=towers) if towers else model
    trained.compile(keras.optimizers.Adam(0.01), "mse")
    error = None
    try:
        trained.fit(X, Y, epochs=EPOCHS, callbacks=[callbacks.ModelCheckpoint(folder / "{epoch}.keras")], **UNSHUFFLED)
    except Exception as caught:
        error = [type(caught).__name__, getattr(caught, "errno", None)]
    results = {}
    for path in sorted(folder.iterdir()):
        try:
            results[path.name] = keras.models.load_model(path).get_weights()
        except Exception:
            path.unlink()
    whole = list(results)
    results["after the error"] = trained.get_weights()
    (folder / whole[0]).unlink()
    later = trained.fit(X, Y, epochs=2, callbacks=[callbacks.ModelCheckpoint(folder / "later.keras")], **UNSHUFFLED)
    results["later"] = [*keras.models.load_model(folder / "later.keras").get_weights(), np.array(later.history["loss"])]
    arrays = {f"{name}/{i}": array for name, weights in results.items() for i, array in enumerate(weights)}
    np.savez(folder.with_suffix(".npz"), said=json.dumps({"error": error, "whole": whole}), **arrays)


def may_mount():
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.skipif(not may_mount(), reason="this system lets nobody mount a filesystem")
def test_a_filesystem_becomes_full_and_training_goes_on_when_there_is_room(tmp_path):
    """Files that were written before are whole, and the error is that of plain Keras."""
    output_of(__file__, tmp_path)
    plain, towers = (dict(np.load(tmp_path / f"{towers}.npz")) for towers in (0, 3))
    said = json.loads(str(towers.pop("said")))
    assert json.loads(str(plain.pop("said"))) == said
    assert 0 < len(said["whole"]) < EPOCHS - 1
    assert said["error"] is not None
    assert_same(plain, towers, TOLERANCE["float64"])


if __name__ == "__main__":
    unshare()
    keras_dp.use_logical_cpus(3)
    keras.config.set_floatx("float64")
    for number in (0, 3):
        train_until_it_is_full(pathlib.Path(sys.argv[1], str(number)), number)
