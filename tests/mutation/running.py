"""Run tests and random programs in a copy of the repository, in processes of their own with limits of time and memory."""

import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

import pytest

PARTITION = "keras_dp/partition"
_TESTS = ["tests/unit/partition", "tests/fuzz"]
_OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-k", "not random_programs_are and not shrunk"]
_ROOT = str(Path(__file__).parents[2])
_MEMORY = 12 << 30
# Its processes begin with TensorFlow imported.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tensorflow", "keras", "pytest"])


def in_process(copy, seconds, task, *arguments):
    """Runs a task in the copy of the repository; returns what it returns, or a negative number if it did not end."""
    process = _PROCESSES.Process(target=_in_copy, args=(copy, task, *arguments))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _in_copy(copy, task, *arguments):
    os.chdir(copy)
    sys.path[:] = [str(copy), str(copy / "tests"), *(path for path in sys.path if path not in (_ROOT, f"{_ROOT}/tests"))]
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("keras_dp", "mutation", "fuzz")]:
        del sys.modules[name]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    code = task(*arguments)
    # Threads of TensorFlow may never end with a fault.
    os._exit(int(code))


def reach_lines(reached):
    """Runs all tests, and writes which lines each of them reaches, and how long it takes."""
    import coverage  # of the extra "mutation": tests of this file run without it

    measured = coverage.Coverage(data_file=None, source=[PARTITION])
    seconds = {}

    class Recorder:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            began = time.monotonic()
            measured.switch_context(item.nodeid)
            result = yield
            measured.switch_context("")
            seconds[item.nodeid] = time.monotonic() - began
            return result

    measured.start()
    code = pytest.main([*_OPTIONS, *_TESTS], plugins=[Recorder()])
    measured.stop()
    data = measured.get_data()
    lines = {}
    for path in data.measured_files():
        found = data.contexts_by_lineno(path).items()
        lines[os.path.relpath(path)] = {line: sorted(filter(None, tests)) for line, tests in found}
    reached.write_text(json.dumps({"seconds": seconds, "lines": lines}))
    return code


def run_tests(chosen, seconds):
    """Runs tests in their order until one fails, or the time is over."""
    order = {test: i for i, test in enumerate(chosen)}
    began = time.monotonic()

    class Selection:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

        def pytest_runtest_logreport(self, report):
            if report.failed:
                os._exit(1)

        def pytest_runtest_logfinish(self):
            if time.monotonic() - began > seconds:
                os._exit(0)

    return pytest.main([*_OPTIONS, *sorted({test.partition("::")[0] for test in chosen})], plugins=[Selection()])


def run_programs(command):
    """Runs random programs until one fails."""
    from fuzz.__main__ import main as run

    sys.argv = command
    return min(run(), 1)
