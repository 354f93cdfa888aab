"""Programs as the users of other tools write them; each is run with a plain model and with a wrapped one."""

import classification
import keras
import pytest


@pytest.fixture(autouse=True)
def single_precision():
    """As users have it: some tools look at the type of what a model returns."""
    keras.config.set_floatx("float32")


@pytest.fixture
def data():
    """Features and classes."""
    return classification.two_classes()
