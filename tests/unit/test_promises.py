"""Each row of the pages of promises names a test that exists, and the command that runs it."""

import ast
import re

import pytest
from promises import ROOT, all_promises, named, rows_of, shown_by_make_test


def marks_of(path, name):
    """Returns the marks of a test, as they are written; None if there is no such test."""
    file = ROOT / path
    nodes = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    of_all = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return of_all | {ast.unparse(decorator) for decorator in node.decorator_list}
    return None


def test_every_promise_names_a_test_that_exists():
    assert [promise for promise in all_promises() if marks_of(promise.path, promise.test) is None] == []
    assert 160 < len(shown_by_make_test()) < 270


@pytest.mark.parametrize("page", ["compatibility", "reliability", "same_and_different"])
def test_every_row_names_a_test(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    promised = [promise.row for promise in named(page, text)]
    # Tables of figures have none.
    rows = [row for row in rows_of(text) if re.search(r"\.py|test_", row[-1])]
    assert rows == promised
    assert len(rows) > 30


def test_tests_that_take_long_have_another_command():
    for promise in all_promises():
        if promise.page == "reliability":
            is_slow = "pytest.mark.slow" in marks_of(promise.path, promise.test)
            own = "`make test-slow`" if is_slow else "`make test-ecosystem`" if "/ecosystem/" in promise.path else None
            assert promise.row[2] == (own or promise.row[2]), promise
            assert promise.row[2] in ("`make test`", "`make test-all`", own), promise


def test_every_test_of_compatibility_has_a_row():
    promised = {(promise.path, promise.test) for promise in all_promises()}
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/parity/test_compatibility_*.py")}
    tests = {(path, name) for path, text in texts.items() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert len(tests) > 100
    assert tests <= promised


@pytest.mark.parametrize("file", [".ci/packages", ".ci/run", ".ci/versions", "Makefile", "CONTRIBUTING.md"])
def test_commands_name_files_that_exist(file):
    """CI once failed at its end, by the name of a test that had gone."""
    paths = re.findall(r"tests/[\w/]+(?:\.py|/)", (ROOT / file).read_text(encoding="utf-8"))
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_row_is_read():
    page = "| promise | test |\n|---|---|\n| a | `test_b.py::test_c` |\n| d | `tests/unit/test_e.py::test_f` |\n| g | |\n"
    found = [(promise.path, promise.test) for promise in named("page", page)]
    assert found == [("tests/parity/test_b.py", "test_c"), ("tests/unit/test_e.py", "test_f")]
    assert marks_of("tests/unit/test_promises.py", "test_nothing") is None
