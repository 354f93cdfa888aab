"""docs/environment.md names every environment variable that the package reads or sets, and no other."""

import ast
import re
from pathlib import Path

import keras_dp

PAGE = (Path(__file__).parents[2] / "docs" / "environment.md").read_text(encoding="utf-8")


def variables_in(source):
    """Returns the names of environment variables among the texts of a module: upper-case words of no other use."""
    nodes = list(ast.walk(ast.parse(source)))
    others = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "metavar"}
    others |= {
        id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "startswith"
    }
    texts = [
        node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others
    ]
    return {text.value for text in texts if re.fullmatch(r"[A-Z][A-Z_]{3,}|no_\w*proxy", text.value)}


def test_every_variable_has_a_row():
    sources = [path.read_text(encoding="utf-8") for path in Path(keras_dp.__file__).parent.rglob("*.py")]
    used = set.union(*(variables_in(source) for source in sources if "os.environ" in source))
    ours, of_others = PAGE.split("## Of Keras and TensorFlow")
    assert set(re.findall(r"^\| `(\w+)", ours, re.MULTILINE)) == used
    assert "`TF_CPP_MIN_LOG_LEVEL`" in of_others


def test_variables_are_told_from_other_texts():
    source = 'os.environ["RANK"], name.startswith("SLURM"), add_argument("--x", metavar="SECONDS"), "Text", "no_grpc_proxy"'
    assert variables_in(source) == {"RANK", "no_grpc_proxy"}
