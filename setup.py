"""The package's description, with links that lead somewhere away from the checkout; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

FILES = "https://github.com/keras-dp/keras_dp/blob/main"
PICTURES = "https://raw.githubusercontent.com/keras-dp/keras_dp/main"
README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")


def absolute(link):
    """Returns a link of Markdown with the address of its file, or of its picture, in the repository."""
    is_picture, text, path = link.groups()
    return f"{is_picture}[{text}]({PICTURES if is_picture else FILES}/{path})"


setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, README),
    long_description_content_type="text/markdown",
)
