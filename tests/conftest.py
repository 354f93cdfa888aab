"""Four logical CPU devices for all tests, set up once, before TensorFlow starts."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

import keras_dp

keras_dp.use_logical_cpus(4)

collect_ignore = ["worker_scripts"]


@pytest.fixture(autouse=True)
def fresh_session():
    """Every test starts in float64, with fresh names and the same seeds."""
    keras.utils.clear_session()
    # TensorFlow and Keras keep some graphs for good: they would be gone through after each of the tests that follow.
    gc.freeze()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
