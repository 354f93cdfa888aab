"""The notebooks of docs/tutorials/ are valid, run from top to bottom, and print what the pages show."""

import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from page_programs import missing

DOCUMENTATION = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCUMENTATION))
import notebooks  # noqa: E402

TUTORIALS = [page for page in sorted((DOCUMENTATION / "tutorials").glob("*.md")) if page.stem != "index"]


def printed(cell):
    """Returns what a cell has printed, without colours and without the file that it has written."""
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    return re.sub(r"\x1b\[[\d;]*m", "", "".join(texts))


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_notebook_of_a_tutorial(page, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # They are in the home directory otherwise.
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.delenv("COLUMNS", raising=False)
    notebooks.write_notebook(page, tmp_path / "page.ipynb")
    notebook = nbformat.read(tmp_path / "page.ipynb", as_version=4)
    nbformat.validate(notebook)
    shown = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert any(shown)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=400, resources={"metadata": {"path": tmp_path}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, lines in zip(code, shown, strict=True):
        # Workers, and the two streams of a cell, are printed in any order.
        assert [line for line in lines.splitlines() if missing([line], printed(cell))] == [], f"{cell.source}\n{printed(cell)}"
