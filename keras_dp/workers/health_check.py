"""Check that the other workers are there, and notice when one is gone."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc

PROBE_SECONDS = 5.0  # for an answer
INTERVAL_SECONDS = 1.0  # between two questions
REFUSALS = 2  # that follow each other, until a worker counts as gone
MESSAGE_SECONDS = 10.0  # between two messages about who is waited for

# TensorFlow's own server answers this with a description of its devices, in which each process has numbers of its own,
# whatever the process is doing otherwise. The question is empty.
_STATUS = "/tensorflow.WorkerService/GetStatus"
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

logger = logging.getLogger("keras_dp")


class HealthCheck:
    """Asks the servers of the other workers every second whether they are there.

    A worker is lost if its server is gone, if it is another one than before, or if it has not answered for a time. If all are
    there, and this one still does not get on, some of them do not come to where it waits.

    Args:
        addresses: W addresses, "host:port".
        index: which of them this process is.
        timeout: seconds without an answer, or without progress.

    Attributes:
        lost: says which worker is lost and why, or what this one waits for in vain; None as long as all is well.
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

    def wait_for_all(self, timeout: float) -> None:
        """Returns when all workers have answered.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: if some have not.
        """
        begin = told = time.monotonic()
        missing = sorted(self._channels)
        while missing:
            # All in one round: one that was there may have been started anew since.
            self._answered.clear()
            self._devices.clear()
            self._ask(list(self._channels))
            missing = sorted(self._channels.keys() - self._answered.keys())
            waited = time.monotonic() - begin
            if missing and waited > timeout:
                raise TimeoutError(
                    f"{self._names(missing)} did not start within {timeout:g} s. Start all workers with the same TF_CONFIG but "
                    "for the index, let their ports through the firewall, or wait longer: connect_workers(start_timeout=...)."
                )
            if missing and time.monotonic() - told > MESSAGE_SECONDS:
                told = time.monotonic()
                logger.warning("Waiting for %s, %d s so far", self._names(missing), waited)
            if missing:
                time.sleep(INTERVAL_SECONDS / 4)

    def start(self, on_loss: Callable[[str], None]) -> None:
        """Checks from now on.

        Args:
            on_loss: called once, on another thread, with what `lost` says.
        """

        def check() -> None:
            while not self._stopped.wait(INTERVAL_SECONDS):
                self._ask(list(self._channels))
                losses = [reason for i in self._channels if (reason := self._reason(i)) is not None]
                losses += [self._in_vain()] if not losses and self._waits_in_vain() else []
                if losses and not self._stopped.is_set():
                    self.lost = " ".join(losses)
                    on_loss(self.lost)
                    return

        self._thread = threading.Thread(target=check, name="keras_dp.health_check", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def expecting_progress(self) -> Iterator[None]:
        """Expects progress of this worker inside, said by `note_progress`."""
        before, self._progress = self._progress, time.monotonic()
        try:
            yield
        finally:
            self._progress = None if before is None else time.monotonic()

    def note_progress(self) -> None:
        """This worker has got on."""
        if self._progress is not None:
            self._progress = time.monotonic()

    def _waits_in_vain(self) -> bool:
        progress = self._progress
        return progress is not None and time.monotonic() - progress > self._timeout

    def _in_vain(self) -> str:
        return (
            f"Worker {self._index} has waited for {self._timeout:g} s in vain: all workers are there, but not all have come to "
            "the same step. Every worker must call fit(), evaluate(), predict() and the like; if one of them is only slow, "
            "wait longer: connect_workers(timeout=...)."
        )

    def stop(self) -> None:
        """Watches no longer."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(PROBE_SECONDS)
        for channel in self._channels.values():
            channel.close()

    def _ask(self, workers: Sequence[int]) -> None:
        """Asks workers all at once, and notes what became of it."""
        seconds = min(PROBE_SECONDS, self._timeout / 2)  # Or who has answered would seem silent until the others have.
        calls = {i: self._channels[i].unary_unary(_STATUS).future(b"", timeout=seconds) for i in workers}
        for i, call in calls.items():
            try:
                self._note_answer(i, call.result())
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                gone = isinstance(error, grpc.Call) and error.code() == grpc.StatusCode.UNAVAILABLE
                self._refused[i] = self._refused[i] + 1 if gone else 0

    def _note_answer(self, i: int, devices: bytes) -> None:
        self._answered[i] = time.monotonic()
        is_another = self._devices.setdefault(i, devices) != devices
        self._refused[i] = REFUSALS if is_another else 0

    def _reason(self, i: int) -> str | None:
        """Why a worker is lost, if it is."""
        if self._refused[i] >= REFUSALS:
            return f"{self._names([i])} is lost: its process has ended, or was started anew."
        silence = time.monotonic() - self._answered[i]
        if silence > self._timeout:
            return f"{self._names([i])} is lost: it has not answered for {silence:.0f} s."
        return None

    def _names(self, workers: Sequence[int]) -> str:
        named = ", ".join(f"{i} ({self._addresses[i]})" for i in workers)
        return f"Worker{'s' if len(workers) > 1 else ''} {named}"
