"""Add notes to errors."""

import sys


def add_note(error: Exception, note: str) -> None:
    """Adds a note to an error, which is printed below its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)
