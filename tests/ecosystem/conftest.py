"""Set up tests that use other tools as their users do, each with a plain model and with a wrapped one."""

import classification
import keras
import pytest


@pytest.fixture(autouse=True)
def single_precision():
    """Sets the users' float32: some tools look at the dtype of a model's results."""
    keras.config.set_floatx("float32")


@pytest.fixture
def data():
    """Returns features and classes."""
    return classification.two_classes()
