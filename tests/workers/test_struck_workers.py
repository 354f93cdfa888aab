"""Workers that are killed, ended and stopped at random moments end with the weights of an unbroken run."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from unbroken_training import assert_unbroken
from worker_processes import SCRIPTS, TESTS

WORKERS, EPOCHS, SECONDS_PER_EPOCH, TIMEOUT = 2, 12, 0.5, 6
LAUNCH = [sys.executable, "-c", "import sys; from keras_dp.cli import main; sys.exit(main(sys.argv[1:]))", "launch"]
# The signals of each event, and the seconds between them. The last one is longer than the workers' timeout.
EVENTS = {
    "killed": ([signal.SIGKILL], 0),
    "ended": ([signal.SIGTERM], 0),
    "stopped for a moment": ([signal.SIGSTOP, signal.SIGCONT], 1),
    "stopped for long": ([signal.SIGSTOP, signal.SIGCONT], 3 * TIMEOUT),
}


class Launched:
    """Trains on workers that `keras-dp launch` starts again and again, and reads what they print."""

    def __init__(self, directory):
        script = [SCRIPTS / "training.py", SECONDS_PER_EPOCH, directory / "backup", "--epochs", EPOCHS, "--timeout", TIMEOUT]
        command = [*LAUNCH, "--workers", WORKERS, "--max-restarts", 1000, *script]
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS.parent
        )
        self.lines, self.processes = [], {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            connected = re.search(r"connected (\d) of \d, process (\d+)", line)
            if connected:
                self.processes[int(connected[1])] = int(connected[2])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    def strike(self, event, worker):
        """Does to a worker what an event says, if it still runs."""
        signals, seconds = EVENTS[event]
        process = self.processes[worker]
        for i, number in enumerate(signals):
            end = time.monotonic() + seconds * bool(i)
            # A worker that is given up ends before it is continued.
            while time.monotonic() < end and self.processes[worker] == process:
                time.sleep(0.1)
            try:
                os.kill(process, number)
            except ProcessLookupError:
                return

    @property
    def restarts(self):
        """The numbers of the lines that tell of a restart."""
        return [i for i, line in enumerate(self.lines) if "keras-dp launch: all workers start again" in line]

    def wait_for_epoch(self, restarts):
        """Waits until an epoch has begun after so many restarts. Returns whether one has, before all workers have ended."""
        while self.process.poll() is None:
            found = self.restarts
            if len(found) >= restarts and any(re.search(r"\[0\] epoch \d", line) for line in self.lines[max([0, *found]) :]):
                return True
            time.sleep(0.05)
        return False

    def output(self):
        """Returns what was printed, when all workers have ended."""
        assert self.process.wait(timeout=300) == 0, "\n".join(self.lines[-60:])
        self._reader.join()
        return "\n".join(self.lines)


@pytest.mark.parametrize(
    ("seed", "events"),
    [(0, 3), *(pytest.param(i, 10, marks=pytest.mark.slow) for i in range(1, 21))],
)
def test_struck_workers_end_as_if_unbroken(seed, events, tmp_path):
    draw = random.Random(seed)
    done, losses = [], 0
    with Launched(tmp_path) as launched:
        while len(done) < events and launched.wait_for_epoch(losses):
            time.sleep(draw.uniform(0, 1.5 * SECONDS_PER_EPOCH))
            done.append(draw.choice(list(EVENTS)))
            launched.strike(done[-1], draw.randrange(WORKERS))
            losses += done[-1] != "stopped for a moment"
        output = launched.output()
    print(f"seed {seed}: {', '.join(done)}")
    assert_unbroken(output, EPOCHS)
    named = [line for line in launched.lines if re.search(r"keras-dp launch: worker \d failed first, with ", line)]
    assert len(named) == len(launched.restarts)
    # A worker may be struck when it has done its last step.
    assert losses - 1 <= len(named) <= losses
