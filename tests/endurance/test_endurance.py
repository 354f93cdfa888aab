"""A short run of each long work shows no growth; `make endurance` has long ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from endurance.__main__ import grown
from endurance.work import WORK, Sample


def flat(**changes):
    """Returns the samples of a run in which nothing grows, but for the quantities that are named, by 1 % with each sample."""
    start = {"megabytes": 500.0, "functions": 200, "threads": 10, "files": 4}
    shares = [{name: 1 + i / 100 * changes.get(name, 0) for name in start} for i in range(30)]
    return [Sample(i, float(i), *(start[name] * share[name] for name in start)) for i, share in enumerate(shares)]


@pytest.mark.parametrize("field", ["megabytes", "functions", "threads", "files"])
def test_what_grows_on_towers_alone_is_found(field):
    assert grown({"plain": flat(), "towers": flat()}) == []
    (found,) = grown({"plain": flat(), "towers": flat(**{field: 1})})
    assert ("memory" if field == "megabytes" else field) in found
    assert grown({"plain": flat(**{field: 1}), "towers": flat(**{field: 1})}) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WORK))
def test_short_runs_do_not_grow(name, tmp_path):
    command = [sys.executable, "-m", "endurance", "--work", name, "--share", "0.05", "--out", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    assert run.stdout.endswith("Nothing grows beyond plain Keras.\n"), run.stdout
