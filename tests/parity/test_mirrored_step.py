"""The simulated step under MirroredStrategy is the one that TensorFlow runs: the tests of mirrored_step.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from newest_keras import IS_NEWEST

HERE = Path(__file__).parent


@pytest.mark.skipif(not IS_NEWEST, reason="MirroredStrategy runs another step on older versions")
def test_in_a_process_of_its_own():
    """In one process, the collectives of all strategies have the same keys, whatever their number of replicas."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", HERE / "mirrored_step.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "KERAS_DP_TEST"))}
    run = subprocess.run(command, cwd=HERE.parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
