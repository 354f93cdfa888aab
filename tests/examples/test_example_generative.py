"""The examples that generate images train on two towers like plain Keras scripts without the lines of keras_dp."""

import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last batch has two images.
SHORT = ["--images", "34", "--batch-size", "16", "--epochs", "1"]


def run(script, out, arguments):
    """Runs a script in a new process, and returns the numbers of its last line and the picture that it writes."""
    command = [sys.executable, str(script), "--out", str(out), *SHORT, *arguments]
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=environment)
    assert result.returncode == 0, result.stderr
    numbers = [float(number) for number in re.findall(r"\d+\.\d{4}", result.stdout.splitlines()[-1])]
    return numbers, matplotlib.image.imread(out)


@pytest.mark.parametrize(
    ("name", "losses", "arguments"), [("mnist_dcgan", 2, []), ("mnist_diffusion", 1, ["--sampling-steps", "2"])]
)
def test_two_towers_train_and_generate_as_plain_keras_does(name, losses, arguments, tmp_path):
    """The marked lines belong to keras_dp; without them, the script uses plain Keras."""
    example = EXAMPLES / f"{name}.py"
    lines = example.read_text(encoding="utf-8").splitlines(keepends=True)
    plain = tmp_path / "plain.py"
    plain.write_text("".join(line for line in lines if "# keras_dp\n" not in line), encoding="utf-8")
    assert "keras_dp." not in plain.read_text(encoding="utf-8")
    expected, expected_images = run(plain, tmp_path / "plain.png", arguments)
    shown, images = run(example, tmp_path / "towers.png", ["--towers", "2", *arguments])
    assert len(shown) == losses
    np.testing.assert_allclose(shown, expected, rtol=0, atol=1e-4)
    # It has all shades from 0 to 1.
    assert np.ptp(images[..., :3]) > 0.1
    np.testing.assert_allclose(images, expected_images, rtol=0, atol=0.02)
