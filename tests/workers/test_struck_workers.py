"""Workers that are killed, ended and stopped at random moments end with the weights of an unbroken run."""

import os
import random
import re
import signal
import time

import pytest
from unbroken_training import assert_unbroken
from worker_processes import SCRIPTS, Launched

WORKERS, EPOCHS, SECONDS_PER_EPOCH, TIMEOUT = 2, 12, 0.5, 6
# The signals of each event, and the seconds between them. The last one is longer than the workers' timeout.
EVENTS = {
    "killed": ([signal.SIGKILL], 0),
    "ended": ([signal.SIGTERM], 0),
    "stopped for a moment": ([signal.SIGSTOP, signal.SIGCONT], 1),
    "stopped for long": ([signal.SIGSTOP, signal.SIGCONT], 3 * TIMEOUT),
}


def strike(launched, event, worker):
    """Does to a worker what an event says, if it still runs."""
    signals, seconds = EVENTS[event]
    process = launched.running()[worker]
    for i, number in enumerate(signals):
        end = time.monotonic() + seconds * bool(i)
        # A worker that is given up ends before it is continued.
        while time.monotonic() < end and launched.running()[worker] == process:
            time.sleep(0.1)
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return


def parts(output):
    """Returns what was printed until each restart, and after the last one."""
    return output.split("keras-dp launch: all workers start again")


def wait_for_epoch(launched, restarts):
    """Waits until an epoch has begun after so many restarts. Returns whether one has, before all workers have ended."""
    while launched.process.poll() is None:
        *before, last = parts(launched.output())
        if len(before) >= restarts and re.search(r"\[0\] epoch \d", last):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("seed", "events"),
    # Of 216, one ends, one is stopped for long, and one for a moment.
    [(216, 3), *(pytest.param(i, 10, marks=pytest.mark.slow) for i in range(1, 21))],
)
def test_struck_workers_end_as_if_unbroken(seed, events, tmp_path):
    draw = random.Random(seed)
    done, losses = [], 0
    script = [SCRIPTS / "training.py", SECONDS_PER_EPOCH, tmp_path / "backup", "--epochs", EPOCHS, "--timeout", TIMEOUT]
    with Launched(tmp_path, f"--workers {WORKERS} --max-restarts 1000", *script) as launched:
        while len(done) < events and wait_for_epoch(launched, losses):
            time.sleep(draw.uniform(0, 1.5 * SECONDS_PER_EPOCH))
            done.append(draw.choice(list(EVENTS)))
            strike(launched, done[-1], draw.randrange(WORKERS))
            losses += done[-1] != "stopped for a moment"
        output = launched.whole_output()
    print(f"seed {seed}: {', '.join(done)}")
    assert_unbroken(output, EPOCHS)
    named = re.findall(r"keras-dp launch: worker \d failed first, with ", output)
    assert len(named) == len(parts(output)) - 1
    # A worker may be struck when it has done its last step.
    assert losses - 1 <= len(named) <= losses
