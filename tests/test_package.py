"""The public names, and the backend."""

import subprocess
import sys

import keras_dp


def test_public_names_have_docstrings():
    assert keras_dp.__all__ == [
        "DataParallelModel",
        "DataParallelOptimizer",
        "SyncBatchNormalization",
        "convert_batch_norm",
        "cross_tower_sum",
        "recalibrate_batch_norm",
        "use_logical_cpus",
    ]
    assert all(getattr(keras_dp, name).__doc__ for name in keras_dp.__all__)


def test_another_backend_is_refused():
    script = "import keras; keras.config.backend = lambda: 'jax'; import keras_dp"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode != 0
    assert "ImportError: keras_dp needs Keras on TensorFlow. Set KERAS_BACKEND=tensorflow" in result.stderr
    assert "Received: backend 'jax'" in result.stderr
