"""Take the programs of a page from its Markdown, run them, and compare what they print with what the page shows."""

import os
import re
import textwrap

import pytest
from forked_processes import output_of

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
UNNAMED = "page.py"
COLOUR = re.compile(r"\x1b\[\d+m|\x08")
FIGURE = r"\d+\.\d+(?:e[+-]\d+)?"


def programs(page):
    """Returns the programs of a page, and the lines that the page shows of their output: two dictionaries by file names.

    A block that the page asks to save "as `train.py`" begins a program of that name, and the other blocks continue the program
    before them. A block of differences counts with its new lines. A block of text directly after a block of Python is its
    output, and so is what follows "$ python train.py" in a console.
    """
    code, shown, end, last, kind = {}, {}, 0, UNNAMED, ""
    for fence in FENCE.finditer(page):
        before, end = page[end : fence.start()], fence.end()
        previous, kind = kind, fence[2]
        block = textwrap.dedent(fence[3])
        if fence[2] == "diff":
            block = "".join(line[1:] for line in block.splitlines(keepends=True) if line[0] != "-")
        if fence[2] in ("python", "diff"):
            named = re.findall(r"as\s+`(\w+\.py)`", before)
            last = named[-1] if named else last
            code[last] = code.get(last, "") + block
            shown.setdefault(last, [])
        elif fence[2] == "text" and previous == "python" and not before.strip():
            shown[last] += block.splitlines()
        elif fence[2] == "console":
            for command, output in commands(block):
                name = re.fullmatch(r"\S*python (\w+\.py)", command)
                if name and name[1] in shown:
                    shown[name[1]] += output.splitlines()
    return code, shown


def commands(console):
    """Returns the commands of a console, each with what follows it."""
    return re.findall(r"^\$ ([^\n]*)\n(.*?)(?=^\$ |\Z)", console, re.DOTALL | re.MULTILINE)


def missing(shown, output):
    """Returns the first shown line that the output lacks, in this order; None if it has all. "..." stands for any text.

    The figures of losses and accuracies are compared to 2 %, and the times of progress bars are not. Colours do not count.
    """
    lines = iter(line.rstrip() for line in COLOUR.sub("", output).splitlines())
    for line in shown:
        if line.strip() not in ("", "...") and not any(is_alike(line.rstrip(), other) for other in lines):
            return line
    return None


def is_alike(shown, printed):
    """Returns whether a shown line is a printed one."""
    if not re.search(r"/step|\bloss(es)? \d|accuracy \d|^[\d. ]+$", shown):
        return re.fullmatch(re.escape(shown).replace(re.escape("..."), ".*"), printed) is not None
    (words, figures), (printed_words, printed_figures) = map(logs_of, (shown, printed))
    return words == printed_words and figures == pytest.approx(printed_figures, rel=0.02)


def logs_of(line):
    """Returns the words and the figures of a line with losses and metrics, without the times of a progress bar."""
    line = re.sub(r"^(.*\d+/\d+) .*/step", r"\1", line)
    return re.sub(FIGURE, "", line), [float(figure) for figure in re.findall(FIGURE, line)]


def run(directory, script, *arguments):
    """Runs a script as a user does on a machine without GPUs, and returns all that it prints."""
    environment = {"CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": "80"}  # where a file takes the output
    output = output_of(script, *arguments, folder=str(directory), environment=environment)
    return output.replace(f"{directory}{os.sep}", "")
