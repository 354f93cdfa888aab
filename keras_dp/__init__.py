"""Train Keras 3 models on several devices with one device's result."""

import re
import sys
from pathlib import Path

from keras_dp.version import __version__ as __version__

# The command `keras-dp`, or `python -m keras_dp`, answers at once: TensorFlow is imported by the processes that it starts.
_is_command = Path(sys.argv[0]).stem == "keras-dp" or (
    # Python has not named the module yet: `-m keras_dp`, `-mkeras_dp` or, with other options, `-um keras_dp`.
    sys.argv[0] == "-m" and re.search(r"\0-[A-Za-z]*m\0?keras_dp(\0|$)", "\0".join(sys.orig_argv)) is not None
)
if not _is_command:
    from keras_dp.api import *  # noqa: F403
    from keras_dp.api import __all__ as __all__
