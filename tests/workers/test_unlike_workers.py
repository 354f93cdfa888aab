"""A worker that is slow, whose clock is wrong, or whose disk is full holds the others up at most, or is named."""

import re
import time
from pathlib import Path

import pytest
from unbroken_training import assert_unbroken
from worker_processes import Workers

EPOCHS = 2


def trained(directory, *options):
    """Returns three workers that train, and sleep for 0.05 s after each batch."""
    return Workers("training.py", 3, directory, 0.2, directory / "backup", "--epochs", EPOCHS, *options)


def assert_nothing_is_lost(workers):
    assert workers.wait() == [0, 0, 0]
    assert_unbroken(workers.output(0), EPOCHS)
    assert all("lost" not in output for output in workers.outputs())


def test_a_worker_that_is_ten_times_as_slow_is_waited_for(tmp_path):
    """It sleeps for 0.5 s after each of 8 batches."""
    with trained(tmp_path, "--slower", 10, "--timeout", 20) as workers:
        workers.start().wait_for_output("epoch 0")
        begin = time.monotonic()
        assert_nothing_is_lost(workers)
        assert time.monotonic() - begin > 3


def test_another_clock_changes_nothing(tmp_path):
    with trained(tmp_path, "--ahead", 86_400) as workers:
        assert_nothing_is_lost(workers.start())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_chief_whose_disk_is_full_ends_with_the_error_and_is_named(tmp_path):
    with trained(tmp_path, "--full") as workers:
        workers.start().wait_for_output("No space left on device", 0)
        begin = time.monotonic()
        assert workers.wait(seconds=20) == [1, 1, 1]
        assert time.monotonic() - begin < 15
        for i in (1, 2):
            assert "No space left" not in workers.output(i)
            assert re.search(rf"WorkerLostError: Worker 0 \(127.0.0.1:{workers.ports[0]}\) is lost", workers.output(i))
