"""State the supported versions of Keras and TensorFlow, and adapt to differences between them."""

import logging

import keras
import tensorflow as tf
from packaging.version import Version

logger = logging.getLogger("keras_dp")

# The oldest supported version, and the first version after the tested ones. pyproject.toml states the same.
KERAS = ((3, 8), (3, 16))
TENSORFLOW = ((2, 18), (2, 22))

# Whether a single step is a function of a batch, with its known sizes, and not of the iterator that gives it (keras#23179).
STEPS_TAKE_BATCHES = Version(keras.__version__).release >= (3, 16)


def refuse_old_versions() -> None:
    """Checks the installed versions, and warns if they are newer than the tested ones.

    Raises:
        ImportError: if Keras or TensorFlow is too old.
    """
    found = f"Keras {keras.__version__} and TensorFlow {tf.__version__}"
    wanted = f"Keras {_range(KERAS)} and TensorFlow {_range(TENSORFLOW)}"
    versions = [(Version(keras.__version__).release, KERAS), (Version(tf.__version__).release, TENSORFLOW)]
    if any(version < oldest for version, (oldest, _) in versions):
        raise ImportError(
            f"keras_dp needs {wanted}. Install them with pip install --upgrade keras tensorflow. Received: {found}"
        )
    if any(version >= untested for version, (_, untested) in versions):
        logger.warning("keras_dp is tested with %s; results with %s may be wrong.", wanted, found)


def callback_classes(*names: str) -> tuple[type[keras.callbacks.Callback], ...]:
    """Returns Keras's callback classes of these names, except those that this version of Keras lacks."""
    return tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))


def _range(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (major, oldest), (_, untested) = versions
    return f"{major}.{oldest} to {major}.{untested - 1}"
