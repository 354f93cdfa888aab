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

A table of commands, not run:

```sh
ls
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

The end.
"""


def test_cells(monkeypatch, tmp_path):
    monkeypatch.setattr(notebooks, "DOCUMENTATION", tmp_path)
    page = tmp_path / "tutorials" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    cells = notebooks.cells(page)
    sources = [cell["source"] for cell in cells]
    assert sources[0] == "# A title"
    assert sources[1].endswith("# %pip install git+https://github.com/keras-dp/keras_dp colours")
    assert "[steps](https://github.com/keras-dp/keras_dp/blob/main/docs/own_steps.md#a-gan)" in sources[2]
    assert "[Keras](https://keras.io)" in sources[2]
    assert sources[3] == "print(1)"
    assert sources[4].endswith("```sh\nls\n```\n\nSave this as `train.py`:")
    assert sources[5:] == ["%%writefile train.py\nprint(2)", "!python train.py", "!ls", "The end."]
    shown = [output["text"] for cell in cells for output in cell.get("outputs", [])]
    assert shown == ["1\n", "2\n", "train.py\n"]


def test_the_command_writes_a_notebook(tmp_path):
    command = [sys.executable, DOCUMENTATION / "notebooks.py", DOCUMENTATION / "tutorials" / "gan.md"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True) == "notebook: gan.ipynb\n"
    notebook = json.loads((tmp_path / "gan.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
