"""Train with a file for each epoch on a filesystem that becomes full, and go on when there is room again.

full_filesystem.py FOLDER mounts small filesystems in FOLDER, which the process alone sees. It trains plain Keras and three
towers, and leaves the results in 0.npz and 3.npz.
"""

import ctypes
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
from keras import callbacks, layers

import keras_dp

SIZE = "2m"  # room for four files
EPOCHS = 8


def unshare():
    """Lets this process mount filesystems that it alone sees, as `unshare --user --map-root-user --mount` does."""
    owns = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    assert ctypes.CDLL(None).unshare(0x10020000) == 0
    for name, text in owns.items():
        pathlib.Path("/proc/self", name).write_text(text)


def train(folder, towers, out):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], check=True)
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 4)), rng.normal(size=(23, 2))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(150, "tanh"), layers.Dense(110, "tanh"), layers.Dense(2)])
    trained = keras_dp.DataParallelModel(model, devices=towers) if towers else model
    trained.compile(keras.optimizers.Adam(0.01), "mse")
    arguments = {"batch_size": 7, "shuffle": False, "verbose": 0}
    ended = callbacks.History()
    try:
        trained.fit(x, y, epochs=EPOCHS, callbacks=[ended, callbacks.ModelCheckpoint(folder / "{epoch}.keras")], **arguments)
        error = None
    except Exception as caught:
        error = [type(caught).__name__, getattr(caught, "errno", None)]
    results, whole = {}, []
    for path in sorted(folder.iterdir()):
        try:
            results[path.name] = keras.models.load_model(path).get_weights()
            whole.append(path.name)
        except Exception:
            path.unlink()
    results["after the error"] = trained.get_weights()
    (folder / whole[0]).unlink()
    later = trained.fit(x, y, epochs=2, callbacks=[callbacks.ModelCheckpoint(folder / "later.keras")], **arguments)
    results["later"] = [*keras.models.load_model(folder / "later.keras").get_weights(), np.array(later.history["loss"])]
    arrays = {f"{name}/{i}": array for name, weights in results.items() for i, array in enumerate(weights)}
    np.savez(out, said=json.dumps({"error": error, "whole": whole}), **arrays)


if __name__ == "__main__":
    unshare()
    keras_dp.use_logical_cpus(3)
    keras.config.set_floatx("float64")
    given = pathlib.Path(sys.argv[1])
    for number in (0, 3):
        train(given / f"full_{number}", number, given / f"{number}.npz")
