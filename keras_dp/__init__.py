"""Train Keras 3 models on several devices with one device's result."""

import sys
from pathlib import Path

from keras_dp.version import __version__ as __version__

# The command `keras-dp` answers at once: TensorFlow is imported by the processes that it starts.
if Path(sys.argv[0]).stem != "keras-dp":
    from keras_dp.api import *  # noqa: F403
    from keras_dp.api import __all__ as __all__
