"""Four logical CPU devices for all tests, set up once, before TensorFlow starts."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

import keras_dp

keras_dp.use_logical_cpus(4)


def pytest_collection_finish():
    """What is there before the first test stays: `clear_session` need not go through it, each time, in search of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_session():
    """Every test starts in float64, with fresh names and the same seeds."""
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
