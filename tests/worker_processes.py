"""Start real worker processes on this machine's loopback interface, and end them within a time limit."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "worker_scripts"


def free_ports(count):
    """Returns ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def tf_config(ports, index):
    return json.dumps(
        {"cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]}, "task": {"type": "worker", "index": index}}
    )


class Workers:
    """Runs one of the scripts in W processes, and kills them at the end of the `with` block.

    Args:
        script: a file in tests/worker_scripts.
        count: the number of workers, W.
        directory: the directory for the outputs, worker_<i>.log.
        arguments: the arguments of the script.
        environment: further environment variables.
    """

    def __init__(self, script, count, directory, *arguments, **environment):
        self.script = SCRIPTS / script
        self.ports = free_ports(count)
        self.logs = [Path(directory, f"worker_{i}.log") for i in range(count)]
        self.arguments = arguments
        self.environment = {
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "parity", TESTS.parent, os.environ.get("PYTHONPATH", "")))),
            **environment,
        }
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, *indices, **environment):
        """Starts the workers at the given indices, or all of them."""
        for i in indices or range(len(self.ports)):
            with self.logs[i].open("wb") as log:
                self.processes[i] = subprocess.Popen(
                    [sys.executable, str(self.script), *map(str, self.arguments)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "TF_CONFIG": tf_config(self.ports, i), **self.environment, **environment},
                )
        return self

    def output(self, i):
        return self.logs[i].read_text(encoding="utf-8", errors="replace")

    def wait_for_output(self, text, *indices, seconds=120):
        """Waits until workers have printed a text."""
        end = time.monotonic() + seconds
        for i in indices or self.processes:
            while text not in self.output(i):
                assert time.monotonic() < end, f"worker {i} did not print {text!r}:\n{self.output(i)[-3000:]}"
                assert self.processes[i].poll() is None, f"worker {i} has ended:\n{self.output(i)[-3000:]}"
                time.sleep(0.05)

    def wait(self, *indices, seconds=120):
        """Waits until the workers have ended, and returns their exit codes."""
        end = time.monotonic() + seconds
        for i in indices or self.processes:
            try:
                self.processes[i].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"worker {i} did not end in {seconds} s:\n{self.output(i)[-3000:]}") from None
        return [self.processes[i].returncode for i in indices or self.processes]

    def signal(self, i, name):
        self.processes[i].send_signal(getattr(signal, f"SIG{name}"))
