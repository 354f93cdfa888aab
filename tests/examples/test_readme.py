"""README.md runs as it stands, shows one device's losses, fits a phone, and states figures of the pages that it links to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, BENCHMARKS, AUDIT = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md", "docs/gpu_audit.md")
)
FIGURE = r"(\d\.\d\d)"


def run(program, directory):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout + finished.stderr


def figures(text):
    """Returns accuracy and loss of the first and of the last epoch."""
    epochs = re.findall(r"accuracy: ([\d.]+) - loss: ([\d.]+)", text)
    return [float(figure) for epoch in (epochs[0], epochs[-1]) for figure in epoch]


@pytest.mark.promise
@pytest.mark.processes
def test_the_program_prints_what_is_shown_and_what_plain_keras_prints(tmp_path):
    program, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    output = run(program, tmp_path)
    assert shown.splitlines()[0] in output.splitlines()
    assert figures(output) == pytest.approx(figures(shown), abs=5e-3)
    plain = program.replace("keras_dp.DataParallelModel(model)", "model")
    assert figures(run(plain, tmp_path)) == pytest.approx(figures(output), abs=2e-3)


def test_it_fits_a_phone_and_takes_two_minutes():
    code = [line for block in re.findall(r"```\w+\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    assert [line for line in code if len(line) > 72] == []
    rows = re.findall(r"^\|.*\|$", README, re.MULTILINE)
    assert max(row.count("|") for row in rows) <= 4, "tables have at most three columns"
    prose = re.sub(r"```.*?```|\]\(.*?\)|^\|[-|]+$", " ", README, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) < 750


def test_the_speed_is_that_of_the_benchmarks():
    """Each table of whole steps has a row for MirroredStrategy, with keras_dp's time over its time."""
    steps = BENCHMARKS.split("## Step time")[1].split("\n## ")[0]
    ratios = re.findall(rf"^\| (?:MirroredStrategy|mirrored) \|.*?{FIGURE}(?:\*\*)? \(", steps, re.MULTILINE)
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    said = f"{min(ratios)} to {max(ratios)} of MirroredStrategy's time in the [{words[len(ratios)]} cases"
    assert said in " ".join(README.split())


def test_the_expected_speed_up_is_that_of_the_simulation():
    table = re.search(r"<!-- scaling -->(.*?)<!-- end of scaling -->", AUDIT, re.DOTALL)[1]
    two = [float(figure) for figure in re.findall(rf"^\| (?:resnet|unet|transf).* \| GPU:0 \| {FIGURE}", table, re.MULTILINE)]
    assert len(two) == 12
    assert f"expects {min(two):.1f} to {max(two):.1f} times the speed" in " ".join(README.replace(">", "").split())
