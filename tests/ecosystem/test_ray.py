"""Ray Tune finds and stops the same trials for plain and for wrapped models, and Ray Train trains on several workers alike."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_same
from forked_processes import output_of_command

PROGRAM = Path(__file__).with_name("ray_program.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs the program once, and ends all of Ray's servers whatever happens."""
    out = tmp_path_factory.mktemp("ray")
    # Ray writes in the home directory. All processes import TensorFlow at once.
    environment = {"HOME": str(out), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    with tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as servers:  # Paths of sockets must be short.
        output_of_command(sys.executable, PROGRAM, out, servers, environment=environment)
    return json.loads((out / "found.json").read_text())


def test_tune(found):
    plain, parallel = found["plain"], found["wrapped"]
    assert [len(trial["val_loss"]) for trial in plain["trials"]] == [4, 1]
    assert_same(plain["trials"], parallel["trials"], 1e-4)
    assert parallel["best"] == plain["best"] == 0.1
    np.testing.assert_allclose(parallel["predictions"], plain["predictions"], rtol=1e-3)


def test_train_on_two_workers(found):
    """Two workers with two towers each report what one device computes, and Ray keeps the first worker's model."""
    plain, workers = found["plain"], found["workers"]
    for name, values in plain["trials"][0].items():
        np.testing.assert_allclose([report[name] for report in workers["reports"]], values, rtol=1e-4)
    np.testing.assert_allclose(workers["predictions"], plain["predictions"], rtol=1e-3)
