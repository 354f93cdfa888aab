"""The Python blocks of README.md and of docs/ run as a reader would run them, and print what the pages show."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked_processes import output_of_command
from page_programs import FENCE, commands, missing, programs, run

from keras_dp.cli import COMMANDS
from keras_dp.gpu_model.hardware import GPUS

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): text
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    # test_your_script.py runs this page, and compares it with one device.
    if page.name != "your_script.md" and "```python" in (text := page.read_text(encoding="utf-8"))
}
NEEDED = {"mlxtend": "examples", "keras_hub": "ecosystem", "keras_tuner": "ecosystem"}


@pytest.mark.processes
@pytest.mark.parametrize("page", [pytest.param("README.md", marks=pytest.mark.promise), *list(PAGES)[1:]])
def test_page_runs_as_it_stands(page, tmp_path):
    code, shown = programs(PAGES[page])
    for package, extra in NEEDED.items():
        if re.search(rf"^(?:import|from) {package}\b", PAGES[page], re.MULTILINE) and find_spec(package) is None:
            pytest.skip(f"the page needs {package}, of the extra {extra!r}")
    consoles = "\n".join(fence[3] for fence in FENCE.finditer(PAGES[page]) if fence[2] == "console")
    launched = [found for found in commands(consoles) if found[0].startswith("keras-dp launch --workers")]
    for name, program in code.items():
        (tmp_path / name).write_text(program, encoding="utf-8")
    for name in code:
        if not any(name in command for command, _ in launched):
            output = run(tmp_path, name)
            assert missing(shown[name], output) is None, output[-3000:]
    for command, lines in launched:
        # On a machine without GPUs, and where no terminal says how wide it is.
        options = {"cwd": tmp_path, "environment": {"CUDA_VISIBLE_DEVICES": "-1", "COLUMNS": ""}}
        output = output_of_command(sys.executable, "-m", "keras_dp", *command.split()[1:], **options)
        # Workers, and the two streams of each, are printed in any order.
        assert [line for line in lines.splitlines() if missing([line], output)] == [], output[-3000:]


def test_questions_names_the_gpus_and_commands_that_there_are():
    page = PAGES["docs/questions.md"]
    listed = re.search(r"GPUs: (T4[^.]*), from their data sheets", " ".join(page.split()))[1]
    assert re.split(r",\s|\sand\s", listed) == list(GPUS)
    assert {line.split()[2] for line in page.splitlines() if line.startswith("$ keras-dp")} <= set(COMMANDS)


def test_blocks_continue_a_program_but_for_those_with_a_name():
    page = "```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n1\n```\n"
    page += "Save this as `b.py`:\n\n```python\nb = 2\n```\n\n```console\n$ python b.py\n2\n$ ls\nb.py\n```\n"
    assert programs(page) == ({"page.py": "a = 1\nprint(a)\n", "b.py": "b = 2\n"}, {"page.py": ["1"], "b.py": ["2"]})
    # Differences count with their new lines.
    page = "```python\na = 1\n```\n\n```diff\n-a = b\n+a = 2\n print(a)\n```\n"
    assert programs(page)[0] == {"page.py": "a = 1\na = 2\nprint(a)\n"}


def test_a_block_that_needs_names_fails(tmp_path):
    (tmp_path / "page.py").write_text("print(model)")
    with pytest.raises(AssertionError, match="NameError"):
        run(tmp_path, "page.py")


def test_output_is_compared_line_by_line_in_order():
    output = "a\nb\nc\n2/2 9s/step - loss: 2.00\n4 rows: accuracy 0.90\n"
    for shown in (["a", "...", "...c"], ["2/2 1s/step - loss: 2.01"], ["4 rows: accuracy 0.91"]):
        assert missing(shown, output) is None
    for *before, lacks in (["d"], ["c", "a"], ["2/2 1s/step - loss: 2.1"], ["5 rows: accuracy 0.91"]):
        assert missing([*before, lacks], output) == lacks
