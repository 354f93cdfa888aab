"""Mutants are tested in a copy of the package, with all that it needs."""

import shutil
from pathlib import Path

from mutation.running import in_process

PACKAGE = Path(__file__).parents[2] / "keras_dp"


def major_version():
    """Returns the first number of the version of the package that a process imports."""
    from keras_dp import trainer, version  # noqa: F401

    return int(version.__version__.partition(".")[0])


def test_a_process_imports_the_copy(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "keras_dp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "keras_dp" / "version.py").write_text('__version__ = "9.0.0"\n')
    assert in_process(tmp_path, 300, major_version) == 9
