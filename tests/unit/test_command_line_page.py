"""docs/command_line.md shows what each command says of itself, and examples that its parser takes."""

import argparse
import re
import shlex
import sys
from pathlib import Path

import pytest

from keras_dp import cli

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
HELP = dict(re.findall(r"^## (?:keras-dp )?(.+?)$.*?^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = re.findall(r"^```sh\nkeras-dp (.*)\n```", PAGE, re.MULTILINE)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="Python 3.13 writes two names of an option in another way")
@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help_is_on_the_page(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"] if command else ["--help"])
    said = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert HELP[command or "All commands"].splitlines() == said, "Copy the output of COLUMNS=80 keras-dp ... --help."


def test_examples_are_understood():
    assert {example.split()[0] for example in EXAMPLES} == set(cli.COMMANDS)
    for example in EXAMPLES:
        name, *arguments = shlex.split(example)
        parser = argparse.ArgumentParser(exit_on_error=False)
        cli.COMMANDS[name].add_arguments(parser)
        parser.parse_args(arguments)
