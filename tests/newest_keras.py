"""Say whether Keras is the newest version that is supported: some tests hold what older ones name or compute otherwise."""

import keras
from packaging.version import Version

from keras_dp.keras_internals import versions

IS_NEWEST = Version(keras.__version__).release >= (versions.KERAS[1][0], versions.KERAS[1][1] - 1)
