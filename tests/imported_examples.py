"""Import the examples, which train in the users' float32."""

import importlib
from pathlib import Path

import keras
import pytest


@pytest.fixture
def example(monkeypatch):
    """Returns a function that imports an example by its name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    keras.config.set_floatx("float32")
    return importlib.import_module
