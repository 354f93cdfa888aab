"""Make a notebook of a tutorial: its text, its programs as cells, and the output that the page shows.

python docs/notebooks.py docs/tutorials/gan.md --out gan.ipynb
"""

import argparse
import json
import posixpath
import re
from importlib import metadata
from pathlib import Path

DOCUMENTATION = Path(__file__).parent
ADDRESSES = dict(line.split(", ") for line in metadata.metadata("keras_dp").get_all("Project-URL"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ ([^\n]*)\n(.*?)(?=^\$ |\Z)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def write_notebook(page, path):
    """Writes the notebook of a page to a path."""
    numbered = [{"id": f"cell-{number}"} | cell for number, cell in enumerate(cells(page))]
    notebook = {"cells": numbered, "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def cells(page):
    """Returns the cells of a page.

    A block of Python is a cell that runs, or that writes a file if the text before asks to save it "as `train.py`". So is each
    command of a console. A block of text directly after such a block is its output. Everything else is text.
    """
    text = page.read_text(encoding="utf-8")
    introduction, rest = re.match(r"(# .*?\n)(.*)", text, re.DOTALL).groups()
    found, end = [markdown(introduction, page), install(text)], 0
    for fence in FENCE.finditer(rest):
        before, language, block = rest[end : fence.start()], fence[1], fence[2]
        if language == "text" and not before.strip():
            found[-1]["outputs"] = [printed(block)]
        elif language == "python":
            named = re.findall(r"as\s+`(\w+\.py)`", before)
            found += [markdown(before, page), code(f"%%writefile {named[-1]}\n{block}" if named else block)]
        elif language == "console":
            found += [markdown(before, page), *(code(f"!{command}", shown) for command, shown in COMMAND.findall(block))]
        else:
            continue  # a part of the next text
        end = fence.end()
    return [cell for cell in [*found, markdown(rest[end:], page)] if cell["source"]]


def install(text):
    """Returns the cell that installs keras_dp and what the page says it needs, for a machine that has neither."""
    needed = " ".join(["git+" + ADDRESSES["Homepage"], *re.findall(r"`pip install ([^`]+)`", text)])
    return code(f"# On a new machine, such as Colab's, remove the # and run this first.\n# %pip install {needed}")


def markdown(text, page):
    """Returns a cell of text. Its links lead to the repository, since a notebook has no pages beside it."""
    folder = posixpath.join("docs", page.relative_to(DOCUMENTATION).parent.as_posix())

    def absolute(link):
        return f"]({ADDRESSES['Homepage']}/blob/main/{posixpath.normpath(posixpath.join(folder, link[1]))})"

    return {"cell_type": "markdown", "metadata": {}, "source": LINK.sub(absolute, text.strip())}


def code(source, shown=""):
    """Returns a cell that runs, with its output."""
    outputs = [printed(shown)] if shown else []
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": source.strip()}


def printed(text):
    """Returns lines as the output of a cell."""
    return {"name": "stdout", "output_type": "stream", "text": text}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, help="a page of docs/tutorials")
    parser.add_argument("--out", type=Path, help="where to write the notebook (default: beside you, with the page's name)")
    args = parser.parse_args()
    path = args.out or Path(args.page.stem + ".ipynb")
    write_notebook(args.page.resolve(), path)
    print(f"notebook: {path}")
