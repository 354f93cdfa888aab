"""Four logical CPU devices for all tests, set up once, before TensorFlow starts."""

import collections
import gc
import os
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
from tensorflow.python.framework import ops

import keras_dp

keras_dp.use_logical_cpus(4)
# Whatever is imported stays: it need not be gone through after each test.
gc.freeze()

collect_ignore = ["worker_scripts"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks further cases of a test as thorough: all but the first, and then every twentieth one."""
    counts = collections.Counter()
    for item in items:
        function, has_cases, _ = item.nodeid.partition("[")
        if has_cases and not item.get_closest_marker("slow"):
            if counts[function] % 20:
                item.add_marker(pytest.mark.thorough)
            counts[function] += 1


@pytest.fixture(autouse=True)
def fresh_session(request):
    """Every test starts in float64, with fresh names and the same seeds.

    What it draws from its module's `rng` depends on its own name alone: it is the same in the suite and by itself.
    """
    module = getattr(request.node, "module", None)
    if isinstance(getattr(module, "rng", None), np.random.Generator):
        module.rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    # TensorFlow keeps these for good, and with each a graph: gigabytes, by the last test.
    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
