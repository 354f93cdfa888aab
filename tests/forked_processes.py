"""Run Python scripts in processes of their own, which begin with TensorFlow, Keras and keras_dp imported.

Servers import them once, and fork each process: an import takes six seconds. Each process ends as Python ends.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TESTS = Path(__file__).parent
# Processes of different servers iterate over sets of texts in different orders, as processes do that Python starts.
SERVERS = 2


class Process:
    """The process of a script with arguments, which prints to a log; has the methods of `subprocess.Popen` that tests use.

    The server of that number forks it. The options are `folder` to run in, and `session`: whether it leads one of its own.
    """

    def __init__(self, *arguments, log, environment=None, server=0, **options):
        self.arguments = list(map(str, arguments))
        self.returncode = None
        self._server = _servers()[server % SERVERS]
        environment = {**os.environ, **(environment or {})}
        Path(log).write_bytes(b"")
        self.pid = self._server("start", arguments=self.arguments, log=str(log), environment=environment, **options)

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server("poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout=120):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.arguments, timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.send_signal(signal.SIGKILL)
        self.wait()


def output_of(*arguments, seconds=400, **options):
    """Runs a script to its end, and returns all that it prints. The options are those of `Process`."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:
        with Process(*arguments, log=log.name, **options) as process:
            code = process.wait(seconds)
        output = log.read()
    assert code == 0, output[-3000:]
    return output


def output_of_command(*command, seconds=400, environment=None, **options):
    """Runs a command without a server in a session of its own, all of which ends with it, and returns all that it prints.

    The options are those of `subprocess.Popen`.
    """
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(list(map(str, command)), env={**os.environ, **(environment or {})}, **options) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-5000:]
    return output


class _Server:
    """Asks a server, and waits for its answer."""

    def __init__(self):
        paths = map(str, (TESTS, TESTS / "parity", TESTS.parent, os.environ.get("PYTHONPATH", "")))
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONIOENCODING"] = "utf-8"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-u", __file__], env={**os.environ, **environment}, **pipes)
        self._lock = threading.Lock()
        atexit.register(self._process.communicate)

    def __call__(self, method, **arguments):
        with self._lock:
            self._process.stdin.write(json.dumps([method, arguments]) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@functools.cache
def _servers():
    return [_Server() for _ in range(SERVERS)]


def _serve():
    """Forks processes and says how they have ended, as long as the client lives. Returns in each process that was forked."""
    running = set()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        if method == "start":
            answer = os.fork()
            if not answer:
                return arguments
            running.add(answer)
        else:
            pid, status = os.waitpid(arguments["pid"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def _run(arguments, log, environment, folder=".", session=False):
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull) as nothing, open(log, "ab") as output:
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    sys.argv[:] = arguments
    sys.path[:0] = [str(Path(arguments[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import keras_dp.api  # noqa: F401

    gc.freeze()
    asked = _serve()
    if asked is not None:
        _run(**asked)
