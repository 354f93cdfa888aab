"""Ray Tune finds and stops the same trials for plain and for wrapped models, and Ray Train trains on several workers alike."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ray_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs the program once, and ends all of Ray's servers whatever happens."""
    out = tmp_path_factory.mktemp("ray")
    environment = {
        **os.environ,
        "HOME": str(out),  # Ray writes there.
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # All processes import TensorFlow at once.
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as servers:  # Paths of sockets must be short.
        command = [sys.executable, PROGRAM, out, servers]
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=400)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-5000:]
    return json.loads((out / "found.json").read_text())


def test_tune(found):
    plain, parallel = found["plain"], found["wrapped"]
    assert [len(trial["val_loss"]) for trial in plain["trials"]] == [4, 1]
    for trial, of_parallel in zip(plain["trials"], parallel["trials"], strict=True):
        assert of_parallel.keys() == trial.keys()
        for name in trial:
            assert of_parallel[name] == pytest.approx(trial[name], rel=1e-4)
    assert parallel["best"] == plain["best"] == 0.1
    for row, of_parallel in zip(plain["predictions"], parallel["predictions"], strict=True):
        assert of_parallel == pytest.approx(row, rel=1e-3)


def test_train_on_two_workers(found):
    """Two workers with two towers each report what one device computes, and Ray keeps the first worker's model."""
    plain, workers = found["plain"], found["workers"]
    for name, values in plain["trials"][0].items():
        assert [report[name] for report in workers["reports"]] == pytest.approx(values, rel=1e-4)
    for row, of_workers in zip(plain["predictions"], workers["predictions"], strict=True):
        assert of_workers == pytest.approx(row, rel=1e-3)
