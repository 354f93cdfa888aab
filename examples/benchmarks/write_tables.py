"""Run the commands that docs/benchmarks.md prints above its tables, and write what they measure into the page.

    python examples/benchmarks/write_tables.py mlp lstm

A table stands between two comments with its name, `<!-- mlp -->` and `<!-- end of mlp -->`. Its command is in front of it, in
backquotes or in a block of code. The results of each command are kept in --out, so that an interrupted run
goes on, and are measured again if the command changes or their file is deleted. Let nothing else run on the machine meanwhile.
"""

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from keras_dp import tables
from keras_dp.cli import environment
from keras_dp.cli.bench import summary

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
COMMAND = re.compile(r"(?:^|`)((?:keras-dp|python) [^`\n]+)\s*`+\s*\Z", re.MULTILINE)
PROGRAMS = {"keras-dp": [sys.executable, "-m", "keras_dp"], "python": [sys.executable]}


def write_table(page, name, table):
    """Writes a table between the comments with its name on a page."""
    between = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    page.write_text(between.sub(lambda comments: f"{comments[1]}\n{table}\n\n{comments[2]}", text), encoding="utf-8")


def commands(page):
    """The command of each table of a page, by name."""
    text = page.read_text(encoding="utf-8")
    found = {}
    for table in re.finditer(r"<!-- end of (.+) -->", text):
        begin = text.find(f"<!-- {table[1]} -->")
        command = COMMAND.search(text[: max(begin, 0)].replace("\\\n", " "))
        if command is None:
            raise ValueError(f"{page}: the table {table[1]!r} needs a comment with its name, right behind a command.")
        found[table[1]] = command[1]
    return found


def result(command, path):
    """What a command has printed, and when: from a file of results, or measured anew.

    Raises:
        subprocess.CalledProcessError: if the command fails.
    """
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["command"] == command:
            print(f"{path.stem}: kept from {kept['date']}; delete {path} to measure it again", file=sys.stderr, flush=True)
            return kept
    print(f"{path.stem}: {command}", file=sys.stderr, flush=True)
    program, *arguments = shlex.split(command)
    options = ["--json"] if program == "keras-dp" else []
    begin = time.monotonic()
    run = [*PROGRAMS[program], *arguments, *options]
    printed = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    print(f"{path.stem}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    date, machine = datetime.date.today().isoformat(), summary.machine(environment.environment())
    kept = {"command": command, "date": date, "machine": machine, "printed": printed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return kept


def shown(kept):
    """A result as the page shows it, in Markdown, or as the program has printed it."""
    if kept["command"].startswith("keras-dp bench"):
        rows = [summary.Row(**row) for row in json.loads(kept["printed"])["rows"]]
        table = tables.markdown(summary.COLUMNS, rows)
    else:
        table = f"```\n{kept['printed'].rstrip()}\n```"
    return f"{table}\n\n{kept['date']}; {kept['machine']}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="names of tables to write (default: all)")
    parser.add_argument("--out", type=Path, default="results/benchmarks", help="where results are kept (default: %(default)s)")
    options = parser.parse_args()
    all_commands = commands(PAGE)
    unknown = [name for name in options.tables if name not in all_commands]
    if unknown:
        parser.error(f"The tables of {PAGE.name} are {', '.join(all_commands)}. Received: {unknown[0]!r}")
    failures = []
    for name in options.tables or all_commands:
        try:
            write_table(PAGE, name, shown(result(all_commands[name], options.out / f"{name}.json")))
        except subprocess.CalledProcessError as error:
            failures.append(f"{name} failed: {error}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
