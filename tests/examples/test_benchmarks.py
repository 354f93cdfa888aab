"""The benchmarks of examples/benchmarks start; their measurements are not checked."""

import runpy
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "examples" / "benchmarks"
SCRIPTS = sorted(path for path in DIRECTORY.glob("*.py") if "def main(" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_says_what_it_measures(script, monkeypatch, capsys):
    """The scripts at least import: broken imports would otherwise be noticed only when somebody needs a script."""
    monkeypatch.syspath_prepend(DIRECTORY)
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_finds_the_benchmarks():
    assert len(SCRIPTS) > 5
