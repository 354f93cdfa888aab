"""The commands of docs/your_script.md train, go on with other devices, and end where one device does."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "your_script.md").read_text(encoding="utf-8")


def commands():
    """Returns the commands of the page, each with the output that the page shows."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [command for block in blocks for command in re.findall(r"^\$ python (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)]


def run(arguments, directory):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, *shlex.split(arguments)]
    finished = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr


def figures(text):
    """Returns accuracy and loss, of training and of validation, for each epoch."""
    epochs = re.findall(r"accuracy: ([\d.]+) - loss: ([\d.]+) - val_accuracy: ([\d.]+) - val_loss: ([\d.]+)", text)
    return [[float(figure) for figure in epoch] for epoch in epochs]


@pytest.mark.processes
def test_the_script_goes_on_with_other_devices_and_is_served(tmp_path):
    for name, program in re.findall(r"as `(\w+\.py)`.*?```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(program)
    outputs = []
    for arguments, shown in commands():
        outputs.append(run(arguments, tmp_path))
        announced = [line for line in shown.splitlines() if line.startswith(("keras_dp:", "devices:", "logits:", "Epoch"))]
        assert [line for line in announced if line not in outputs[-1].splitlines()] == []
        if figures(shown):
            assert figures(outputs[-1])[-1] == pytest.approx(figures(shown)[-1], abs=5e-3)
    assert len(outputs) == 3

    other = tmp_path / "one device"
    other.mkdir()
    (other / "train.py").write_text((tmp_path / "train.py").read_text())
    expected = figures(run("train.py --devices 1", other))
    assert len(expected) == 6
    for shown, epoch in zip([*figures(outputs[0]), *figures(outputs[1])], expected, strict=True):
        assert shown == pytest.approx(epoch, abs=2e-3)
