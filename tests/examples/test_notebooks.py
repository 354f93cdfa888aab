"""A tutorial's page becomes a notebook: cells that run, files that are written, commands, and the shown output."""

import json
import subprocess
import sys
from pathlib import Path

DOCUMENTATION = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCUMENTATION))
import notebooks  # noqa: E402

PAGE = """# A title

It needs `pip install colours`. See [steps](../own_steps.md#a-gan) and [Keras](https://keras.io).

```python
print(1)
```

```text
1
```

Save this as `train.py`:

```python
print(2)
```

```console
$ python train.py
2
$ ls
train.py
```
"""


def test_a_page_becomes_a_notebook(monkeypatch, tmp_path):
    monkeypatch.setattr(notebooks, "DOCUMENTATION", tmp_path)
    page = tmp_path / "tutorials" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    notebooks.write_notebook(page, tmp_path / "page.ipynb")
    notebook = json.loads((tmp_path / "page.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    title, install, text, *sources = [cell["source"] for cell in cells]
    assert title == "# A title"
    assert install.endswith("# %pip install git+https://github.com/keras-dp/keras_dp colours")
    steps = "[steps](https://github.com/keras-dp/keras_dp/blob/main/docs/own_steps.md#a-gan)"
    assert text.endswith(f"See {steps} and [Keras](https://keras.io).")
    assert sources == ["print(1)", "Save this as `train.py`:", "%%writefile train.py\nprint(2)", "!python train.py", "!ls"]
    assert [output["text"] for cell in cells for output in cell.get("outputs", [])] == ["1\n", "2\n", "train.py\n"]


def test_the_command_writes_a_notebook(tmp_path):
    command = [sys.executable, DOCUMENTATION / "notebooks.py", DOCUMENTATION / "tutorials" / "gan.md"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "notebook: gan.ipynb\n"
    assert (tmp_path / "gan.ipynb").exists()
