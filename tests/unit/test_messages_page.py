"""docs/messages.md shows every message that the package logs or warns with, and no message that the package does not have."""

import ast
import re
from pathlib import Path

import keras_dp

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text(encoding="utf-8")
SHOWN = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]
TELLING = ("debug", "info", "warning", "error", "exception", "warn", "_warn_once")
MODULES = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(keras_dp.__file__).parent.rglob("*.py")]
ENOUGH = 20


def pattern_of(node):
    """Returns a pattern of a text, with any words where the program puts a value; None for what is no text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = [node.value]
    else:
        return None
    escaped = [".*" if part is None else re.sub(r"%[-.\d]*[sdgr]", ".*", re.escape(part)) for part in parts]
    return "".join(escaped)


def told():
    """Returns the patterns of the messages that are logged or warned with where they are written."""
    calls = [node for module in MODULES for node in ast.walk(module) if isinstance(node, ast.Call) and node.args]
    names = [(getattr(call.func, "attr", None) or getattr(call.func, "id", None), call.args[0]) for call in calls]
    return [pattern for name, text in names if name in TELLING and (pattern := pattern_of(text)) is not None]


def long_texts():
    """Returns the patterns of all texts of the package that are long enough to tell one message from another."""
    patterns = [pattern_of(node) for module in MODULES for node in ast.walk(module)]
    return [pattern for pattern in patterns if pattern is not None and len(pattern.replace(".*", "")) > ENOUGH]


def test_every_message_is_on_the_page():
    messages = told()
    assert len(messages) > 15
    assert [message for message in messages if not any(re.search(message, shown) for shown in SHOWN)] == []


def test_every_message_of_the_page_is_in_the_package():
    patterns = [*told(), *long_texts()]
    assert [shown for shown in SHOWN if not any(re.search(pattern, shown) for pattern in patterns)] == []


def test_other_messages_are_not_found():
    assert not any(re.search(pattern, "The towers run with XLA: nothing to do.") for pattern in [*told(), *long_texts()])
