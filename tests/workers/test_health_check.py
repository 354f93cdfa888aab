"""A worker waits until the others have started, and notices when one of them is lost."""

import contextlib
import logging
import math
import re
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest
from worker_processes import free_ports

from keras_dp.workers import health_check as module
from keras_dp.workers.health_check import HealthCheck

GONE = "its process has ended or was restarted, or its network refuses connections."
PATIENCE = 20.0  # seconds to wait for events that should happen at once


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(module, "MESSAGE_SECONDS", 0.1)


class Server:
    """Answers like TensorFlow's server, until it is stopped. Questions wait while the event `may_answer` is cleared."""

    def __init__(self, port, answer=b"devices"):
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.answered_at = 0.0
        self.answers = 0
        self._answer = answer
        self._threads = futures.ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads)
        handlers = {"GetStatus": grpc.unary_unary_rpc_method_handler(self._status)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("tensorflow.WorkerService", handlers)])
        assert self._server.add_insecure_port(f"127.0.0.1:{port}") == port
        self._server.start()

    def _status(self, request, context):
        assert request == b""
        self.may_answer.wait(PATIENCE)
        self.answered_at = time.monotonic()
        self.answers += 1
        return self._answer

    def stop(self):
        self.may_answer.set()
        self._server.stop(0).wait(PATIENCE)
        self._threads.shutdown()


class Group:
    """Runs the health check of worker 0, and the servers of the others. `losses` are those that it has reported."""

    def __init__(self, count=2, timeout=PATIENCE):
        self.ports = free_ports(count)
        self.addresses = [f"127.0.0.1:{port}" for port in self.ports]
        self.servers = {}
        self.health_check = HealthCheck(self.addresses, 0, timeout)
        self.losses = []

    def start(self, *indices, **arguments):
        for i in indices or range(1, len(self.ports)):
            self.servers[i] = Server(self.ports[i], **arguments)

    def begin(self):
        """Starts all workers and the health check, and returns the group."""
        self.start()
        self.health_check.wait_for_all(PATIENCE)
        self.health_check.start(self.losses.append)
        return self

    def loss(self):
        """Waits for the only loss that is reported, and returns it."""
        wait_until(lambda: self.losses)
        assert self.health_check.lost == self.losses[0]
        (loss,) = self.losses
        return loss

    def has_lost_nobody(self):
        return self.health_check.lost is None and not self.losses

    def wait_for_answers(self, count, *indices):
        for i in indices or self.servers:
            before = self.servers[i].answers
            wait_until(lambda server=self.servers[i], before=before: server.answers >= before + count)

    def close(self):
        self.health_check.stop()
        for server in self.servers.values():
            server.stop()


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def group_of():
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(contextlib.closing(Group(*arguments, **options)))


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "keras_dp.health_check"]


def test_workers_that_start_late_are_waited_for_and_named(group_of, caplog):
    group = group_of(4)
    group.start(1, 3)

    def start_once_missed():
        wait_until(lambda: "Waiting for" in caplog.text)
        group.start(2)

    late = threading.Thread(target=start_once_missed)
    late.start()
    with caplog.at_level(logging.WARNING, "keras_dp"):
        group.health_check.wait_for_all(PATIENCE)
    late.join()
    assert set(caplog.messages) == {f"Waiting for Worker 2 ({group.addresses[2]}), 0 s so far"}


def test_workers_that_do_not_come_in_time_are_named(group_of):
    """Another service at the address is no worker."""
    group = group_of(4)
    group.start(2)
    with futures.ThreadPoolExecutor(1) as threads:
        other = grpc.server(threads)
        other.add_insecure_port(group.addresses[1])
        other.start()
        with pytest.raises(TimeoutError) as error:
            group.health_check.wait_for_all(0.5)
        other.stop(0).wait(PATIENCE)
    expected = f"Workers 1 ({group.addresses[1]}), 3 ({group.addresses[3]}) did not start within 0.5 s. Start all workers with"
    assert str(error.value).startswith(expected)


def test_a_worker_whose_server_is_gone_is_lost(group_of, caplog):
    """The loss is told once, and the health check ends. No worker was missed at the beginning."""
    group = group_of(3).begin()
    group.wait_for_answers(3)
    assert group.health_check.lost is None
    assert not caplog.messages
    with group.health_check.expecting_progress():
        group.servers[2].stop()
        assert group.loss() == f"Worker 2 ({group.addresses[2]}) is lost: {GONE}"
    wait_until(lambda: not watching())
    group.servers[1].stop()
    time.sleep(5 * module.INTERVAL_SECONDS)
    assert len(group.losses) == 1


def test_workers_that_are_lost_together_are_named_together(group_of):
    group = group_of(4)
    group.start()
    group.health_check.wait_for_all(PATIENCE)
    for i in (1, 3):
        group.servers[i].stop()
    group.health_check.start(group.losses.append)
    assert group.loss() == " ".join(f"Worker {i} ({group.addresses[i]}) is lost: {GONE}" for i in (1, 3))


def test_a_worker_that_was_started_anew_is_lost(group_of):
    group = group_of(2).begin()
    # A short absence alone would not count.
    group.servers[1].stop()
    group.start(1, answer=b"devices of another process")
    assert group.loss() == f"Worker 1 ({group.addresses[1]}) is lost: {GONE}"


def test_a_connection_that_breaks_for_a_moment_is_no_loss(group_of, monkeypatch):
    monkeypatch.setattr(module, "REFUSALS", 10**6)
    group = group_of(2).begin()
    group.wait_for_answers(2)
    group.servers[1].stop()
    time.sleep(0.3)
    group.start(1)
    group.wait_for_answers(5)
    assert group.has_lost_nobody()


def test_a_worker_that_is_silent_for_longer_than_the_timeout_is_lost(group_of, monkeypatch):
    """Who answers is not lost with it, although the timeout is as short as the time limit of one question."""
    monkeypatch.setattr(module, "PROBE_SECONDS", 1.0)
    group = group_of(3, timeout=1.0).begin()
    group.wait_for_answers(2)
    server = group.servers[1]
    server.may_answer.clear()
    loss = group.loss()
    assert 1.0 < time.monotonic() - server.answered_at < 10.0
    assert re.fullmatch(rf"Worker 1 \({group.addresses[1]}\) is lost: it has not answered for \d+ s.", loss)


def test_an_answer_that_takes_less_than_the_timeout_is_no_loss(group_of):
    """The answer may take longer than the time limit of one question."""
    group = group_of(3, timeout=PATIENCE).begin()
    group.servers[1].may_answer.clear()
    # Meanwhile, the others are asked.
    group.wait_for_answers(3, 2)
    group.servers[1].may_answer.set()
    group.wait_for_answers(3)
    assert group.has_lost_nobody()


def test_a_worker_without_progress_gives_up(group_of, monkeypatch):
    """Others have time to notice a loss before: they ask, wait for an answer, and ask again, after the same timeout."""
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.4)
    group = group_of(3, timeout=0.8).begin()
    with group.health_check.expecting_progress():
        # Progress is still expected after a wait within another.
        with group.health_check.expecting_progress():
            group.health_check.note_progress()
        begin = time.monotonic()
        loss = group.loss()
    assert 0.8 + 0.4 + 2 * module.INTERVAL_SECONDS - 0.05 < time.monotonic() - begin < 10.0
    assert loss.startswith("Worker 0 has waited for 0.8 s without progress: all workers answer, but not all have reached")


def test_a_worker_that_does_not_answer_is_named_also_where_progress_ended_before(group_of):
    """It still answered when this worker began to wait: not all answer, and so it is not this worker that gives up."""
    group = group_of(3, timeout=1.0).begin()
    with group.health_check.expecting_progress():
        time.sleep(0.8)
        group.servers[1].may_answer.clear()
        loss = group.loss()
    assert loss.startswith(f"Worker 1 ({group.addresses[1]}) is lost: it has not answered for ")


def test_progress_is_expected_only_where_it_must_be_made(group_of):
    group = group_of(2, timeout=0.8).begin()
    with group.health_check.expecting_progress():
        for _ in range(18):
            time.sleep(0.05)
            group.health_check.note_progress()
    # Between two calls, the script need not make progress.
    group.health_check.note_progress()
    time.sleep(0.9)
    assert group.has_lost_nobody()


def test_nothing_is_told_after_the_end_which_does_not_wait_for_an_answer(group_of):
    group = group_of(2).begin()
    assert watching()
    group.servers[1].may_answer.clear()
    begin = time.monotonic()
    group.health_check.stop()
    assert time.monotonic() - begin < 2
    wait_until(lambda: not watching())
    group.servers[1].stop()
    time.sleep(5 * module.INTERVAL_SECONDS)
    assert group.has_lost_nobody()
    group.health_check.stop()  # as a process does that exits


def test_the_time_of_answers(group_of):
    group = group_of(4).begin()
    late = SimpleNamespace(wait=lambda seconds: time.sleep(0.05), set=lambda: None)
    group.servers[2].may_answer = late
    group.servers[3].may_answer.clear()
    times = group.health_check.answer_times(2)
    assert sorted(times) == [1, 2, 3]
    assert 0 < times[1] < times[2]
    assert 0.05 <= times[2] < times[3] == math.inf
