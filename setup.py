"""The package's description, with links that lead somewhere away from the checkout; all else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

FILES = "https://github.com/keras-dp/keras_dp/blob/main"
README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"\]\((?!https?:|#)([^)]+)\)", rf"]({FILES}/\1)", README),
    long_description_content_type="text/markdown",
)
