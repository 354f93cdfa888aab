"""docs/works_with.md names every file of tests with tools, and no test that does not exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ECOSYSTEM = ROOT / "tests" / "ecosystem"


def shown_by():
    """Returns the file and the name of each test in the last column; a file without a name stands for all its tests."""
    for row in re.findall(r"^\| .*\| (.*) \|$", (ROOT / "docs" / "works_with.md").read_text(encoding="utf-8"), re.MULTILINE):
        if files := re.findall(r"(?:tests/parity/)?test_\w+\.py", row):
            (file,) = files
            path = ROOT / file if "/" in file else ECOSYSTEM / file
            for name in re.findall(r"\btest_\w+\b(?!\.py)", row) or [None]:
                yield path, name


def test_every_row_names_a_test_and_every_file_has_a_row():
    rows = list(shown_by())
    assert len(rows) > 20
    for path, name in rows:
        assert path.exists(), path
        assert name is None or f"\ndef {name}(" in path.read_text(encoding="utf-8"), name
    assert {path for path, _ in rows if path.parent == ECOSYSTEM} == set(ECOSYSTEM.glob("test_*.py"))
