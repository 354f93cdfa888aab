"""The Python blocks of docs/ run as a reader would run them, and print what the pages show."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_programs import FENCE, commands, missing, programs, run

ROOT = Path(__file__).parents[2]
# README.md and these pages have tests of their own, which compare their programs with plain Keras, too.
ELSEWHERE = {"first_steps.md", "your_script.md"}
PAGES = {
    str(page.relative_to(ROOT)): text
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.name not in ELSEWHERE and "```python" in (text := page.read_text(encoding="utf-8"))
}
NEEDED = {"mlxtend": "examples", "keras_hub": "ecosystem", "keras_tuner": "ecosystem"}


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_as_it_stands(page, tmp_path):
    code, shown = programs(PAGES[page])
    for package, extra in NEEDED.items():
        if re.search(rf"^(?:import|from) {package}\b", PAGES[page], re.MULTILINE) and find_spec(package) is None:
            pytest.skip(f"the page needs {package}, of the extra {extra!r}")
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
        if command.startswith("python "):
            run(tmp_path, *command.split()[1:])  # may write what the workers read
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
        (["4 rows: accuracy 0.91"], None),
        (["4 rows: accuracy 0.95"], "4 rows: accuracy 0.95"),
        (["5 rows: accuracy 0.91"], "5 rows: accuracy 0.91"),
    ],
)
def test_output_is_compared_line_by_line_in_order(shown, lacks):
    assert missing(shown, "a\nb\nc\n2/2 9s/step - loss: 2.00\n4 rows: accuracy 0.90\n") == lacks
