"""Find the tests that the documentation names beside its promises: `make test` runs them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Promise(NamedTuple):
    """Is a row of a page, and the test that it names.

    Attributes:
        page: the name of the page.
        row: the cells of the row.
        path: the file of the test.
        test: the name of the test.
    """

    page: str
    row: list[str]
    path: str
    test: str


def rows_of(text):
    """Returns the cells of the rows of all tables in Markdown, without those at their heads."""
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n?)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def named(page, text):
    """Returns the promises of a page. A test is in the file that its row names, or its section, or in tests/parity."""
    found = []
    for section in text.split("\n## "):
        of_section = re.search(r"^In `(tests/[\w/]+\.py)`", section, re.MULTILINE)
        pattern = r"`(?:([\w/]+\.py)::)?(test_\w+)`" if of_section else r"`([\w/]+\.py)::(test_\w+)`"
        for row in rows_of(section):
            for path, test in re.findall(pattern, row[-1])[:1]:
                path = path or of_section[1]
                found.append(Promise(page, row, path if "/" in path else f"tests/parity/{path}", test))
    return found


def all_promises():
    """Returns the promises of all pages that list them."""
    pages = ("compatibility", "reliability", "same_and_different")
    return [promise for page in pages for promise in named(page, (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))]


def shown_by_make_test():
    """Returns path and name of the tests of all promises, but for rows that name another command."""
    other = re.compile("`make test-")
    return {(promise.path, promise.test) for promise in all_promises() if not any(map(other.match, promise.row))}
