"""docs/same_and_different.md names a test that exists for each of its rows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "same_and_different.md").read_text(encoding="utf-8")


def shown_by():
    """Returns the last column of each row."""
    rows = re.findall(r"^\| .* \| (.*) \|$", PAGE, re.MULTILINE)
    return [row for row in rows if row != "shown by"]


def missing(shown):
    """Returns the tests and pages in a column that do not exist."""
    for path, name in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", shown):
        file = ROOT / (path if "/" in path else f"tests/parity/{path}")
        if not file.exists() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            yield f"{path}::{name}"


def test_every_row_names_a_test_or_the_page_of_tests():
    rows = shown_by()
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`[\w/]+\.py(::\w+)?`|compatibility\.md", row)] == []


def test_the_tests_exist():
    assert [name for row in shown_by() for name in missing(row)] == []


def test_a_test_that_does_not_exist_is_found():
    assert list(missing("`test_promise.py::test_nothing`")) == ["test_promise.py::test_nothing"]
    assert list(missing("`tests/unit/test_nothing.py`")) == ["tests/unit/test_nothing.py::"]
