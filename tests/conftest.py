"""Set up four logical CPU devices once for all tests, and start each test from the same state."""

import gc
import os
import shlex
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import newest_keras
import numpy as np
import promises
import pytest
import tensorflow as tf
import turn
import ways_of_wrapping
from checked_program import check_all_programs
from commands_in_process import in_process, in_users_directory  # noqa: F401
from imported_examples import example  # noqa: F401
from tensorflow.python.framework import ops

import keras_dp
from keras_dp import tables

# The memory of each of four pieces of a GPU for the tests; 0 for logical CPUs alone.
GPU_MEGABYTES = int(os.environ.get("KERAS_DP_TEST_GPU_MEGABYTES", "0"))

keras_dp.use_logical_cpus(4)
if GPU_MEGABYTES:
    # Tests that ask for a number of towers, as most do, then run on pieces of the first card.
    piece = tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MEGABYTES)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")[0], [piece] * 4)
    tf.config.experimental.enable_tensor_float_32_execution(False)
# Workers of pytest say that their terminals have 80 columns: tests see the widest tables, wherever they run.
os.environ["COLUMNS"] = str(tables.WIDEST)
check_all_programs()
# Imported modules stay alive: the garbage collector need not scan them after each test.
gc.freeze()

# Mutation testing needs an extra of its own.
collect_ignore = ["mutation/mutants.py", "worker_scripts"]

WAY = pytest.StashKey[str]()


def pytest_report_header():
    return f"random programs from seed {turn.SEED}: KERAS_DP_TEST_TURN={turn.TURN} repeats this choice"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the first case of each test that the documentation names beside a promise."""
    named = promises.shown_by_make_test()
    for item in items:
        function = str(item.path.relative_to(promises.ROOT)), getattr(item, "originalname", item.name)
        if function in named and not item.get_closest_marker("slow"):
            named.remove(function)
            item.add_marker(pytest.mark.promise)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test whose program an older version of Keras does not run by itself, such as a newer layer."""
    try:
        return (yield)
    except (AttributeError, IndexError, TypeError, UserWarning, ValueError) as error:
        frames = [str(frame.path) for frame in pytest.ExceptionInfo.from_exception(error).traceback]
        is_ours = any(path.startswith(os.path.dirname(keras_dp.__file__)) for path in frames)
        is_of_tests = frames[-1].startswith(os.path.dirname(__file__)) and isinstance(error, AttributeError | IndexError)
        if newest_keras.IS_NEWEST or is_ours or (is_of_tests and "module 'keras" not in str(error)):
            raise
        pytest.skip(f"Keras {keras.__version__} does not run it: {error}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Says how to repeat a test that failed."""
    report = yield
    if report.failed:
        way = f"KERAS_DP_TEST_WAY={item.stash[WAY]} " if WAY in item.stash else ""
        command = f"{way}KERAS_DP_TEST_TURN={turn.TURN} .venv/bin/python -m pytest {shlex.quote(item.nodeid)}"
        report.sections.append(("to repeat it", command))
    return report


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """Wraps models with the defaults of one of the ways, where a test does not say otherwise. Returns the name of the way."""
    module = getattr(request.node, "module", None)
    if module is None or module.__name__.rpartition(".")[2] not in ways_of_wrapping.OF_RESULTS:
        return "plain"
    names = ways_of_wrapping.WITHOUT_XLA
    name = os.environ.get("KERAS_DP_TEST_WAY") or names[zlib.crc32(request.node.nodeid.encode()) % len(names)]
    request.node.stash[WAY] = name
    ways_of_wrapping.wrap_in_the_way(name, monkeypatch)
    return name


@pytest.fixture(autouse=True)
def fresh_session(request):
    """Starts every test in float64, with fresh names and the same seeds.

    The module's `rng` is seeded from the test's name alone, so that a test draws the same numbers in the suite and by itself.
    """
    module = getattr(request.node, "module", None)
    if isinstance(getattr(module, "rng", None), np.random.Generator):
        module.rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    # TensorFlow never removes these, and each holds a graph: gigabytes by the last test.
    registered = ops.gradient_registry._registry
    for name in [name for name in registered if name.startswith("CustomGradient-")]:
        del registered[name]
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
