"""Define the function that Keras's tests import from the `conftest` of Keras's repository, which its package lacks."""

import keras
import pytest

# It changes Keras where it is imported.
collect_ignore = ["wrapped_models.py"]


def skip_if_backend(backend, reason):
    """Skips a test with one of Keras's backends."""
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)
