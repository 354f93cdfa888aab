"""docs/reliability.md names, for each promise, a test that exists and the command that runs it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
HEADER = "| promise | figure | command | test |"


def rows(page):
    """Returns the cells of the rows of all tables of promises."""
    tables = re.findall(rf"^{re.escape(HEADER)}\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def command_for(shown):
    """Returns the command of make that runs the first case of a test, or None if there is no such test."""
    path, name = re.fullmatch(r"`([\w/]+\.py)::(\w+)`", shown).groups()
    file = ROOT / (path if "/" in path else f"tests/parity/{path}")
    nodes = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    of_all = {ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks = of_all | {ast.unparse(decorator) for decorator in node.decorator_list}
            if file.parent.name == "ecosystem":
                return "`make test-ecosystem`"
            named = {"pytest.mark.slow": "`make test-slow`", "pytest.mark.thorough": "`make test-all`"}
            return next((command for mark, command in named.items() if mark in marks), "`make test`")
    return None


def test_every_promise_names_its_test_and_its_command():
    found = rows(PAGE)
    assert len(found) > 30
    assert [row for row in found if len(row) != 4 or not row[0]] == []
    assert [row for row in found if command_for(row[3]) != row[2]] == []


@pytest.mark.parametrize(
    ("shown", "command"),
    [
        ("`test_promise.py::test_nothing`", None),
        ("`tests/unit/test_nothing.py::test_nothing`", None),
        ("`tests/workers/test_workers.py::test_a_worker_that_never_starts_is_named`", "`make test-all`"),
        ("`tests/workers/test_workers.py::test_published_programs_train_on_workers`", "`make test-slow`"),
        ("`test_compatibility_callbacks.py::test_early_stopping`", "`make test-all`"),
        ("`tests/ecosystem/test_jupyter.py::test_training_is_interrupted`", "`make test-ecosystem`"),
        ("`test_promise.py::test_towers_give_the_result_of_one_device`", "`make test`"),
    ],
)
def test_commands_are_those_of_the_marks(shown, command):
    assert command_for(shown) == command
