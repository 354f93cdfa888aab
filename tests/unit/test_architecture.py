"""docs/architecture.md lists the files of the package with the first lines of their docstrings."""

import ast
import re
from pathlib import Path

import keras_dp

PACKAGE = Path(keras_dp.__file__).parent
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def lines_of(folder, depth=0):
    """Returns a line for each module and package in a folder: its name and the first line of its docstring."""
    parts = [path for path in folder.iterdir() if (path.suffix == ".py" and path.stem != "__init__") or is_package(path)]
    for path in sorted(parts, key=lambda path: (path.is_dir(), path.name)):
        source = path / "__init__.py" if path.is_dir() else path
        docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
        name = "  " * depth + path.name + ("/" if path.is_dir() else "")
        yield f"{name:<28} {docstring.splitlines()[0]}"
        if path.is_dir():
            yield from lines_of(path, depth + 1)


def is_package(path):
    return (path / "__init__.py").exists()


def test_the_tree_has_a_line_for_each_file():
    (shown,) = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    assert shown.splitlines() == list(lines_of(PACKAGE))


def test_the_text_names_files_that_are_there():
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    named = set(re.findall(r"`([\w/]+(?:\.py|\.toml|/))`", text))
    assert len(named) > 20
    assert {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()


def test_large_packages_have_an_index():
    large = [path for path in PACKAGE.rglob("*") if is_package(path) and len(list(path.glob("*.py"))) > 6]
    assert len(large) > 4
    assert [path.name for path in large if not (path / "README.md").exists()] == []


def test_folders_that_are_collected_together_share_one_conftest():
    """Collecting docstrings, pytest takes a second conftest.py for the first, and stops after all tests have run."""
    with_settings_of_their_own = {"ecosystem", "host"}
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("conftest.py")}
    assert folders == {"."} | with_settings_of_their_own
