"""Start real worker processes on this machine's loopback interface, and end them within a time limit."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from forked_processes import TESTS, Process

SCRIPTS = TESTS / "worker_scripts"


def free_ports(count):
    """Returns ports on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def tf_config(ports, index):
    addresses = [f"127.0.0.1:{port}" for port in ports]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


class Workers:
    """Runs a script of tests/worker_scripts in W processes, and kills them at the end of the `with` block.

    The outputs are in the directory, as worker_<i>.log. `environment` has further environment variables.
    """

    def __init__(self, script, count, directory, *arguments, **environment):
        self.command = [SCRIPTS / script, *arguments]
        self.ports = free_ports(count)
        self.logs = [Path(directory, f"worker_{i}.log") for i in range(count)]
        self.environment = environment
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes.values():
            process.__exit__(*error)

    def start(self, *indices, **environment):
        """Starts the workers at the given indices, or all of them."""
        for i in indices or range(len(self.ports)):
            variables = {"TF_CONFIG": tf_config(self.ports, i), **self.environment, **environment}
            self.processes[i] = Process(*self.command, log=self.logs[i], environment=variables, server=i)
        return self

    def output(self, i):
        return self.logs[i].read_text(encoding="utf-8", errors="replace")

    def outputs(self):
        return [self.output(i) for i in range(len(self.logs))]

    def wait_for_output(self, text, *indices, seconds=120):
        """Waits until workers have printed a text."""
        for i in indices or self.processes:
            wait_for(lambda i=i: text in self.output(i), self.processes[i], lambda i=i: self.output(i), seconds)

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


class Launched:
    """Runs `keras-dp launch` with its options, a script and its arguments, and kills it at the end of the `with` block.

    The output is in the directory. `environment` has further environment variables.
    """

    def __init__(self, directory, options, *script, **environment):
        self._log = directory / "launched.log"
        command = [sys.executable, "-m", "keras_dp", "launch", *options.split(), *map(str, script)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=TESTS.parent, env={**os.environ, **environment}
            )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()

    def output(self):
        return self._log.read_text()

    def wait_for_output(self, text):
        wait_for(lambda: text in self.output(), self.process, self.output)

    def whole_output(self, seconds=300):
        """Returns what was printed, when all workers have ended without an error."""
        assert self.process.wait(seconds) == 0, self.output()[-3000:]
        return self.output()

    def running(self):
        """Returns the number of the process of each worker, as it has printed it."""
        return {int(worker): int(pid) for worker, pid in re.findall(r"connected (\d) of \d, process (\d+)", self.output())}


def wait_for(condition, process, output, seconds=120):
    """Waits until a condition holds, while a process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain:\n{output()[-3000:]}"
        assert process.poll() is None or condition(), f"the process has ended:\n{output()[-3000:]}"
        time.sleep(0.05)
