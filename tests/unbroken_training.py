"""Train as worker_scripts/training.py does, in one process without faults, and hold the weights of workers against it."""

import functools
import json
import re
import subprocess
import sys
import tempfile

import numpy as np
from worker_processes import SCRIPTS, TESTS


def weights_in(output):
    """Returns the final weights that the script has printed."""
    return [np.array(weight) for weight in json.loads(re.search(r"weights (.*)", output)[1])]


@functools.cache
def unbroken(epochs):
    """Returns the final weights of plain training."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(SCRIPTS / "training.py"), "0", f"{directory}/backup", "--epochs", str(epochs)]
        alone = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=TESTS.parent, check=True)
    return weights_in(alone.stdout)


def assert_unbroken(output, epochs):
    """Asserts that an output ends with the weights of plain training."""
    for one, other in zip(unbroken(epochs), weights_in(output), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)
