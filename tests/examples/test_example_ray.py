"""The example on Ray trains for one epoch with two workers of a local Ray, without a network."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_mnist.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install .[ray]"),
]


def test_two_workers_train_a_model_and_report_its_accuracy(tmp_path):
    random = np.random.default_rng(0)
    digits = random.integers(0, 256, (10, 28, 28))
    labels = random.integers(0, 10, 900)
    images = np.clip(digits[labels] + random.integers(-50, 51, (900, 28, 28)), 0, 255).astype("uint8")
    np.savez(tmp_path / "digits.npz", x_train=images[:700], y_train=labels[:700], x_test=images[700:], y_test=labels[700:])
    options = {"workers": 2, "epochs": 1, "batch-size": 50, "data": tmp_path / "digits.npz", "out": tmp_path / "out"}
    environment = {
        **os.environ,
        "HOME": str(tmp_path),  # Ray writes there.
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # All processes import TensorFlow at once.
    }
    command = [sys.executable, EXAMPLE, *(f"--{name}={value}" for name, value in options.items())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Ray's servers, too
    assert process.returncode == 0, errors[-5000:]
    accuracy = re.fullmatch(r"test accuracy (\d+\.\d\d) %", output.splitlines()[-1])
    assert accuracy is not None, output
    assert float(accuracy[1]) > 90
    assert len(list(tmp_path.glob("out/*/*/model.keras"))) == 1
