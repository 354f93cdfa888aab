"""The public names, and the backend."""

import subprocess
import sys

import keras_dp


def test_public_names_have_docstrings():
    assert keras_dp.__all__ == [
        "DataParallelModel",
        "DataParallelOptimizer",
        "SyncBatchNormalization",
        "WorkerGroup",
        "WorkerLostError",
        "callbacks",
        "communication_report",
        "connect_workers",
        "convert_batch_norm",
        "cross_tower_sum",
        "optimizers",
        "recalibrate_batch_norm",
        "schedules",
        "use_logical_cpus",
    ]
    assert all(getattr(keras_dp, name).__doc__ for name in keras_dp.__all__)


def test_another_backend_is_refused():
    script = "import keras; keras.config.backend = lambda: 'jax'; import keras_dp"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "ImportError: keras_dp needs Keras on TensorFlow. Set KERAS_BACKEND=tensorflow" in result.stderr
    assert "Received: backend 'jax'" in result.stderr


def test_imported_once_more():
    """As after a purge of sys.modules in a notebook: gradients go through the sums of the module that is there now."""
    script = """
import sys
import keras, numpy as np
import keras_dp
keras_dp.use_logical_cpus(2)

def trained(keras_dp):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization(), layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model) if keras_dp else model
    parallel.compile("sgd", "mse")
    parallel.fit(np.sin(np.arange(15.0)).reshape(5, 3), np.cos(np.arange(5.0)), epochs=3, verbose=0)
    return np.concatenate([value.ravel() for value in model.get_weights()])

weights = [trained(None), trained(keras_dp)]
for name in [name for name in sys.modules if name.partition(".")[0] == "keras_dp"]:
    del sys.modules[name]
import keras_dp as again
assert again is not keras_dp
print(np.ptp([*weights, trained(again)], axis=0).max())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1]) < 1e-5
