"""docs/compatibility.md names every test of compatibility, and no test that does not exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"


def collected():
    """Returns the test functions that pytest finds in each of the files, including slow ones and those of other days."""
    files = sorted(str(path) for path in ROOT.glob("tests/parity/test_compatibility_*.py"))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *files]
    environment = {**os.environ, "KERAS_DP_TEST_CASES": ""}
    output = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, env=environment).stdout
    return set(re.findall(r"^(tests/parity/test_compatibility_\w+\.py)::(\w+)", output, re.MULTILINE))


def documented():
    """Returns the test in the last column of each row, with the file that the section names."""
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        (file,) = set(re.findall(r"`(tests/parity/test_compatibility_\w+\.py)`", section))
        rows = [line for line in section.splitlines() if line.startswith("|")][2:]
        found += [(file, re.fullmatch(r"\|.*\| `(\w+)` \|", row).group(1)) for row in rows]
    return found


@pytest.mark.processes
def test_every_row_names_a_test_and_every_test_has_a_row():
    rows = documented()
    assert len(rows) == len(set(rows)) > 100
    assert set(rows) == collected()
