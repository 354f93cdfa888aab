"""Train Keras 3 models on several devices with one device's result."""

import sys
from pathlib import Path

from keras_dp.version import __version__ as __version__

# The command `keras-dp`, or `python -m keras_dp`, answers at once: TensorFlow is imported by the processes that it starts.
_is_module_run = sys.argv[:1] == ["-m"] and sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == ["keras_dp"]
if not _is_module_run and Path(sys.argv[0]).stem != "keras-dp":
    from keras_dp.api import *  # noqa: F403
    from keras_dp.api import __all__ as __all__
