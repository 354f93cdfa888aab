"""The examples that generate images train on two towers like plain Keras scripts without the lines of keras_dp."""

import re
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from page_programs import run

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last batch has two images.
SHORT = ["--images", "34", "--batch-size", "16", "--epochs", "1"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "losses", "arguments"), [("mnist_dcgan", 2, []), ("mnist_diffusion", 1, ["--sampling-steps", "2"])]
)
def test_two_towers_train_and_generate_as_plain_keras_does(name, losses, arguments, tmp_path):
    """The marked lines belong to keras_dp; without them, the script uses plain Keras."""
    copied = shutil.copytree(EXAMPLES, tmp_path / "examples")
    lines = (copied / f"{name}.py").read_text(encoding="utf-8").splitlines(keepends=True)
    (copied / "plain.py").write_text("".join(line for line in lines if "# keras_dp\n" not in line), encoding="utf-8")
    assert "keras_dp." not in (copied / "plain.py").read_text(encoding="utf-8")
    shown, images = {}, {}
    for script, towers in (("plain", []), (name, ["--towers", "2"])):
        printed = run(tmp_path, copied / f"{script}.py", "--out", "images.png", *SHORT, *towers, *arguments)
        shown[script] = [float(number) for number in re.findall(r"\d+\.\d{4}", printed.splitlines()[-1])]
        images[script] = matplotlib.image.imread(tmp_path / "images.png")
    assert len(shown[name]) == losses
    np.testing.assert_allclose(shown[name], shown["plain"], rtol=0, atol=1e-4)
    # It has all shades from 0 to 1.
    assert np.ptp(images[name][..., :3]) > 0.1
    np.testing.assert_allclose(images[name], images["plain"], rtol=0, atol=0.02)
