"""docs/questions.md names the GPUs and the commands that there are. test_pages.py runs its program."""

import re
from pathlib import Path

from keras_dp.cli import COMMANDS
from keras_dp.gpu_model.hardware import GPUS

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")


def test_the_page_names_the_gpus_and_options_that_there_are():
    listed = re.search(r"GPUs: (T4[^.]*), from their data sheets", " ".join(PAGE.split()))[1]
    assert re.split(r",\s|\sand\s", listed) == list(GPUS)
    shown = {line.split()[2] for line in PAGE.splitlines() if line.startswith("$ keras-dp")}
    assert shown <= set(COMMANDS)
