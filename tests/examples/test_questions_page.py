"""The program of docs/questions.md prints the report that the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keras_dp.cli import COMMANDS
from keras_dp.gpu_model.hardware import GPUS

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")


@pytest.mark.processes
def test_the_report(tmp_path):
    digits, why = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "digits.py").write_text(digits)
    (tmp_path / "why.py").write_text(why)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "why.py"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    (shown,) = re.findall(r"\$ python why.py\n(.*?)```", PAGE, re.DOTALL)
    assert process.stdout == shown


def test_the_page_names_the_gpus_and_options_that_there_are():
    listed = re.search(r"GPUs: (T4[^.]*), from their data sheets", " ".join(PAGE.split()))[1]
    assert re.split(r",\s|\sand\s", listed) == list(GPUS)
    shown = {line.split()[2] for line in PAGE.splitlines() if line.startswith("$ keras-dp")}
    assert shown <= set(COMMANDS)
