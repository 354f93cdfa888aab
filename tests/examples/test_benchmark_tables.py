"""The benchmarks of examples/benchmarks start, and the tables of docs/benchmarks.md are written by the commands above them."""

import argparse
import dataclasses
import importlib
import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from keras_dp.cli.bench import command as bench
from keras_dp.cli.bench.summary import Row

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "examples" / "benchmarks"
SCRIPTS = sorted(path for path in DIRECTORY.glob("*.py") if "def main(" in path.read_text(encoding="utf-8"))

PAGE = """The command `keras-dp bench --model other` has no table. A program:

```sh
python count.py \\
    --twice
```

<!-- counted -->

old

<!-- end of counted -->

MLP: `keras-dp bench --model mlp --towers 2`

<!-- mlp -->
<!-- end of mlp -->

after
"""

COUNT = """
with open("calls", "a") as calls:
    calls.write(".")
print("a table\\nof two lines")
"""


@pytest.fixture
def write_tables(tmp_path, monkeypatch):
    """The program, with a page and programs of the test, in the directory of the test."""
    monkeypatch.syspath_prepend(DIRECTORY)
    program = importlib.import_module("write_tables")
    printed = json.dumps({"rows": [dataclasses.asdict(Row("keras_dp", 2, 256, 7.0, 7.0, 7.0))]})
    (tmp_path / "bench.py").write_text(f"import sys\nassert sys.argv[-1] == '--json'\nprint({printed!r})\n")
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "PAGE", tmp_path / "page.md")
    monkeypatch.setitem(program.PROGRAMS, "keras-dp", [sys.executable, "bench.py"])
    monkeypatch.setattr(program.summary, "machine", lambda environment: "this machine")
    monkeypatch.setattr(sys, "argv", ["write_tables.py", "--out", str(tmp_path / "out")])
    return program


def body(page, name):
    return page.read_text().split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0].strip().splitlines()


@pytest.mark.processes
def test_each_command_writes_its_table(write_tables, tmp_path, monkeypatch):
    assert write_tables.main() == 0
    *lines, _, origin = body(tmp_path / "page.md", "counted")
    assert lines == ["```", "a table", "of two lines", "```"]
    assert origin.endswith("; this machine.")
    heading, _, row, *_ = body(tmp_path / "page.md", "mlp")
    assert heading.startswith("| engine | towers | batch |")
    assert row.startswith("| keras_dp | 2 | 256 | 7.00 |")
    assert (tmp_path / "page.md").read_text().endswith("\nafter\n")

    written = (tmp_path / "page.md").read_text()
    assert write_tables.main() == 0
    assert (tmp_path / "page.md").read_text() == written
    assert (tmp_path / "calls").read_text() == "."  # the results were kept

    (tmp_path / "page.md").write_text(written.replace("--twice", "--thrice"))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "counted"])
    assert write_tables.main() == 0
    assert (tmp_path / "calls").read_text() == ".."  # another command


@pytest.mark.processes
def test_a_command_that_fails_leaves_its_table(write_tables, tmp_path, capsys):
    (tmp_path / "count.py").write_text("raise SystemExit(3)")
    assert write_tables.main() == 1
    assert "counted failed: " in capsys.readouterr().err
    assert body(tmp_path / "page.md", "counted") == ["old"]
    assert body(tmp_path / "page.md", "mlp")[0].startswith("| engine")


def test_what_cannot_be_written_is_refused(write_tables, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["write_tables.py", "lstm"])
    with pytest.raises(SystemExit):
        write_tables.main()
    assert "The tables of page.md are counted, mlp. Received: 'lstm'" in capsys.readouterr().err
    for text in ("`keras-dp bench --model mlp`\n\n<!-- end of mlp -->", "<!-- mlp -->\n<!-- end of mlp -->"):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises(ValueError, match=r"the table 'mlp' needs a comment with its name, right behind a command"):
            write_tables.main()


def test_each_script_says_what_it_measures(monkeypatch, capsys):
    """They import what there is; what they measure is not checked."""
    assert len(SCRIPTS) > 5
    monkeypatch.syspath_prepend(DIRECTORY)
    for script in SCRIPTS:
        monkeypatch.setattr("sys.argv", [str(script), "--help"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(script), run_name="__main__")
        assert "usage:" in capsys.readouterr().out


def test_commands_of_the_page_could_be_run(monkeypatch):
    monkeypatch.syspath_prepend(DIRECTORY)
    write_tables = importlib.import_module("write_tables")
    commands = [shlex.split(command) for command in write_tables.commands(write_tables.PAGE).values()]
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    benches = [arguments for _, first, *arguments in commands if first == "bench"]
    assert len(benches) > 5
    for arguments in benches:
        parser.parse_args(arguments)
    assert all((ROOT / first).exists() for program, first, *_ in commands if program == "python")
