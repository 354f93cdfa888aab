"""Check every second that the other workers answer, and notice lost workers."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

PROBE_SECONDS = 5.0  # to wait for an answer
INTERVAL_SECONDS = 1.0  # between two questions
REFUSALS = 2  # in succession, after which a worker counts as lost
SECONDS_TO_NOTICE = (REFUSALS + 1) * INTERVAL_SECONDS + PROBE_SECONDS  # a worker whose process has ended
MESSAGE_SECONDS = 10.0  # between two messages about missing workers

# TensorFlow's own server answers this empty request at any time, whatever else the process is doing. The answer describes the
# devices with numbers that are different in each process. TensorFlow's own check of a peer, which is not public, sends the same
# request, but holds Python's lock until it times out, and does not notice that a process was restarted.
_STATUS = "/tensorflow.WorkerService/GetStatus"
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

logger = logging.getLogger("keras_dp")


class HealthCheck:
    """Checks every second that the servers of the other workers answer.

    A worker is lost if its server is gone, was restarted, or has not answered within the timeout. If all workers answer but
    this worker makes no progress, nor do others say why, some workers have not reached the operation at which it waits.

    Args:
        addresses: the W addresses, "host:port".
        index: the number of this worker.
        timeout: seconds without an answer, or without progress.

    Attributes:
        lost: a message that says which workers are lost and why, or that this worker makes no progress; None before that.
        failure: why the last step or call of this worker failed, in a line; None if it did not.
    """

    def __init__(self, addresses: Sequence[str], index: int, timeout: float):
        self._addresses = addresses
        self._index = index
        self._progress: float | None = None
        self._timeout = timeout
        self._channels = {i: grpc.insecure_channel(a, _OPTIONS) for i, a in enumerate(addresses) if i != index}
        self._answered: dict[int, float] = {}
        self._devices: dict[int, bytes] = {}
        self._refused = dict.fromkeys(self._channels, 0)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: str | None = None
        self.failure: str | None = None

    def wait_for_all(self, timeout: float) -> None:
        """Waits until all workers have answered.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: if some workers have not answered in time.
        """
        begin = told = time.monotonic()
        missing = sorted(self._channels)
        while missing:
            # All must answer in the same round: a worker that answered earlier may have been restarted since.
            self._answered.clear()
            self._devices.clear()
            self._ask(list(self._channels))
            missing = sorted(self._channels.keys() - self._answered.keys())
            waited = time.monotonic() - begin
            if missing and waited > timeout:
                raise TimeoutError(
                    f"{self._names(missing)} did not start within {timeout:g} s. Start all workers with the same TF_CONFIG "
                    "except the index, open their ports in the firewall, or wait longer: connect_workers(start_timeout=...)."
                )
            if missing and time.monotonic() - told > MESSAGE_SECONDS:
                told = time.monotonic()
                logger.warning("Waiting for %s, %d s so far", self._names(missing), waited)
            if missing:
                time.sleep(INTERVAL_SECONDS / 4)

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Starts to check, on another thread.

        Args:
            on_loss: a function that is called once, on that thread, with the message `lost`.
        """

        def check() -> None:
            while not self._stopped.wait(INTERVAL_SECONDS):
                asked = time.monotonic()
                self._ask(list(self._channels))
                losses = [reason for i in self._channels if (reason := self._reason(i)) is not None]
                if not losses and self._is_stuck() and min(self._answered.values()) >= asked:
                    losses = [self._stuck()]
                if losses and not self._stopped.is_set():
                    self.lost = " ".join(losses)
                    on_loss(self.lost)
                    return

        self._thread = threading.Thread(target=check, name="keras_dp.health_check", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def expecting_progress(self) -> Iterator[None]:
        """Times out inside if this worker does not call `note_progress` within the timeout."""
        before, self._progress = self._progress, time.monotonic()
        try:
            yield
        finally:
            self._progress = None if before is None else time.monotonic()

    def note_progress(self) -> None:
        """Notes that this worker makes progress."""
        if self._progress is not None:
            self._progress = time.monotonic()

    def _is_stuck(self) -> bool:
        progress = self._progress
        if self.failure:
            # It says why others wait, before these say that they do. It may first have found out whether they are lost.
            later = max(self._timeout - SECONDS_TO_NOTICE, self._timeout / 2)
        else:
            # Two others may have lost each other. They notice it in this time, and say so.
            later = self._timeout + self._seconds_to_answer + 2 * INTERVAL_SECONDS
        return progress is not None and time.monotonic() - progress > later

    def _stuck(self) -> str:
        if self.failure:
            return (
                f"The last step or call of worker {self._index} failed, and others still wait for it: all workers must start "
                f"again. Received: {self.failure}"
            )
        return (
            f"Worker {self._index} has waited for {self._timeout:g} s without progress: all workers answer, but not all have "
            "reached the same step. Every worker must call fit(), evaluate(), predict() and the like. If a worker is only "
            "slow, wait longer: connect_workers(timeout=...)."
        )

    def answer_times(self, questions: int = 10) -> dict[int, float]:
        """Returns the least time until each other worker answers, in seconds, by its number; infinity if it does not answer.

        Args:
            questions: how many questions to ask each of them, one after the other.
        """
        return {i: self._answer_time(channel, questions) for i, channel in self._channels.items()}

    def _answer_time(self, channel: grpc.Channel, questions: int) -> float:
        least = math.inf
        for _ in range(questions):
            begin = time.perf_counter()
            try:
                channel.unary_unary(_STATUS)(b"", timeout=PROBE_SECONDS)
            except grpc.RpcError:
                return math.inf
            least = min(least, time.perf_counter() - begin)
        return least

    def stop(self) -> None:
        """Stops checking, and closes the connections."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(PROBE_SECONDS)
        for channel in self._channels.values():
            channel.close()

    def _ask(self, workers: Sequence[int]) -> None:
        """Sends a request to all given workers at once, and notes their answers and refusals."""
        seconds = self._seconds_to_answer
        calls = {i: self._channels[i].unary_unary(_STATUS).future(b"", timeout=seconds) for i in workers}
        for i, call in calls.items():
            try:
                self._note_answer(i, call.result())
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                gone = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE
                self._refused[i] = self._refused[i] + 1 if gone else 0

    @property
    def _seconds_to_answer(self) -> float:
        return min(PROBE_SECONDS, self._timeout / 2)  # A longer wait for one worker would let others seem silent.

    def _note_answer(self, i: int, devices: bytes) -> None:
        self._answered[i] = time.monotonic()
        is_another = self._devices.setdefault(i, devices) != devices
        self._refused[i] = REFUSALS if is_another else 0

    def _reason(self, i: int) -> str | None:
        """Returns the reason why a worker is lost; None if it is not."""
        if self._refused[i] >= REFUSALS:
            return f"{self._names([i])} is lost: its process has ended or was restarted, or its network refuses connections."
        silence = time.monotonic() - self._answered[i]
        if silence > self._timeout:
            return f"{self._names([i])} is lost: it has not answered for {silence:.0f} s."
        return None

    def _names(self, workers: Sequence[int]) -> str:
        named = ", ".join(f"{i} ({self._addresses[i]})" for i in workers)
        return f"Worker{'s' if len(workers) > 1 else ''} {named}"
