"""Workers train exactly over a slow network, and name what is lost when links stand still or connections break."""

import os
import re
import time

import pytest
from relayed_network import Line, RelayedNetwork
from unbroken_training import assert_unbroken
from worker_processes import SCRIPTS, TESTS, Launched, Workers

SLOW = Line(delay=1e-3, rate=100e6 / 8)
TIMEOUT = 20  # seconds, longer than a first step on processors that others use
TO_NOTICE = TIMEOUT + 10  # seconds until an error names what is lost
TO_END = 20  # seconds more until the process has ended, which collects garbage at last, on processors that others use
EPOCHS = 4
BOTH_WAYS = (0, 1), (1, 0)


def trained(network, count, directory, *arguments, epochs=EPOCHS, seconds_per_epoch=0.4):
    """Returns workers that train over a network, which are not started yet."""
    script = [SCRIPTS / "training.py", seconds_per_epoch, directory / "backup", "--epochs", epochs]
    return Workers("relayed.py", count, directory, *script, *arguments, **network.environment)


def test_over_a_slow_network_that_stands_still_for_a_while_nothing_is_lost(tmp_path):
    with RelayedNetwork(SLOW) as network, trained(network, 2, tmp_path) as workers:
        workers.start().wait_for_output("epoch 1")
        for way in BOTH_WAYS:
            network.hold(*way)
        time.sleep(1)
        before = workers.output(0)
        time.sleep(2)
        assert workers.output(0) == before, "the workers do not need what is held"
        for way in BOTH_WAYS:
            network.release(*way)
        assert workers.wait() == [0, 0]
        assert_unbroken(workers.output(0), EPOCHS)
        assert min(network.passed(*way) for way in BOTH_WAYS) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_numbers_over_a_slow_network_are_those_of_one_device(count, tmp_path):
    cases = ["even_and_uneven_batches", "synchronized_batch_norm", "sparse_gradients"]
    script = [SCRIPTS / "exactness.py", count, "12", *cases]
    with (
        RelayedNetwork(SLOW) as network,
        Workers("relayed.py", count, tmp_path, *script, **network.environment) as workers,
    ):
        codes = workers.start().wait(seconds=500)
        assert codes == [0] * count, workers.output(0)[-3000:]
        assert all(len(re.findall("^passed ", output, re.MULTILINE)) == 2 * len(cases) for output in workers.outputs())


CUTS = {
    "both": lambda network, other: (network.hold(1, other), network.hold(other, 1)),
    "to": lambda network, other: network.hold(other, 1),
    "from": lambda network, other: network.hold(1, other),
    "refuse": lambda network, other: (network.refuse(1, other), network.cut(1, other)),
}


def assert_all_end_with(workers, *named, seconds=TO_NOTICE):
    """Asserts that each worker ends with an error that names what is lost."""
    workers.wait_for_output("WorkerLostError: ", seconds=seconds)
    assert workers.wait(seconds=TO_END) == [1] * len(named)
    for output, one in zip(workers.outputs(), named, strict=True):
        assert re.search(rf"WorkerLostError: {one}", output)


LOST = r"Worker {} \(127.0.0.1:\d+\) is lost: "


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", CUTS.values(), ids=CUTS)
def test_a_worker_that_is_cut_off_is_named_by_all_others(cut_off, tmp_path):
    """The one that is cut off names the others, whom it has lost."""
    with RelayedNetwork() as network, trained(network, 3, tmp_path, "--timeout", TIMEOUT, epochs=1000) as workers:
        workers.start().wait_for_output("epoch 2")
        for other in (0, 2):
            cut_off(network, other)
        assert_all_end_with(workers, LOST.format(1), LOST.format("[02]"), LOST.format(1))


@pytest.mark.slow
def test_one_direction_of_one_link_that_is_held_ends_all(tmp_path):
    """Both ends of the link lose each other. The end that notices first tells all others, also the other end."""
    with RelayedNetwork() as network, trained(network, 3, tmp_path, "--timeout", TIMEOUT, epochs=1000) as workers:
        workers.start().wait_for_output("epoch 2")
        network.hold(0, 1)
        assert_all_end_with(workers, *[LOST.format("[01]")] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_connections_that_break_in_the_middle_of_a_step_are_named(count, tmp_path):
    """TensorFlow connects again, but does not send again what a collective has lost."""
    with RelayedNetwork() as network, trained(network, count, tmp_path, epochs=1000, seconds_per_epoch=0) as workers:
        workers.start().wait_for_output("epoch 2")
        network.hold(0, 1)
        time.sleep(3)  # until a step waits for what is held
        assert network.cut(0, 1)
        network.release(0, 1)
        broken = r"The connection between workers 0 \(.*\) and 1 \(.*\) broke in the middle of a step"
        assert_all_end_with(workers, *[broken] * count, seconds=20)


@pytest.mark.slow
def test_connections_that_break_between_two_steps_lose_nothing(tmp_path):
    with RelayedNetwork() as network, trained(network, 2, tmp_path, seconds_per_epoch=12) as workers:
        workers.start().wait_for_output("epoch 1")
        time.sleep(1.5)  # Each worker sleeps for three seconds after each step.
        assert network.cut(0, 1)
        assert workers.wait() == [0, 0]
        assert_unbroken(workers.output(0), EPOCHS)


@pytest.mark.slow
def test_launched_workers_start_again_when_the_network_is_back(tmp_path):
    """They resume after the last epoch, and end with the weights of an unbroken run."""
    script = [SCRIPTS / "relayed.py", SCRIPTS / "training.py", 2, tmp_path / "backup", "--epochs", EPOCHS]
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    with (
        RelayedNetwork() as network,
        Launched(tmp_path, "--workers 2 --max-restarts 1", *script, PYTHONPATH=paths, **network.environment) as launched,
    ):
        launched.wait_for_output("[0] epoch 2")
        network.refuse(0, 1)
        network.cut(0, 1)
        launched.wait_for_output("all workers start again, restart 1 of 1")
        network.accept(0, 1)
        output = launched.whole_output()
    assert re.findall(r"\[0\] epoch (\d)", output) == list("01223")
    assert_unbroken(output, EPOCHS)
