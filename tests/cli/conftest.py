"""Tests see the widest tables, wherever they run: pytest's workers say that their terminals have 80 columns."""

import pytest

from keras_dp.cli import tables


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(tables.WIDEST))
