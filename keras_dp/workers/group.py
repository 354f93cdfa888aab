"""Connect the workers, and report lost workers."""

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import random
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp import choices, console, installation
from keras_dp.choices import refuse_unknown
from keras_dp.devices.available import use_logical_cpus
from keras_dp.keras_internals import tensorflow_runtime
from keras_dp.workers.broken_connections import broken_connection
from keras_dp.workers.cluster import Cluster, find_cluster, other_launcher
from keras_dp.workers.collectives import Collectives, OneWorker
from keras_dp.workers.error_summary import error_summary
from keras_dp.workers.health_check import INTERVAL_SECONDS, SECONDS_TO_NOTICE, HealthCheck
from keras_dp.workers.listening import accept_only

TIMEOUT = 600.0
START_TIMEOUT = 1800.0

# The number of towers that `keras-dp launch --towers-per-worker` asks for.
TOWERS_VARIABLE = "KERAS_DP_TOWERS"
# Only `keras-dp launch` sets it.
LAUNCHED_VARIABLE = "KERAS_DP_RESTART"

_MARK = "keras_dp: "
_PASSED_ON = re.compile(_MARK + r"([^\n\\]+)")  # Where a message is quoted in another one, a line ends with a backslash.
_NO_PROXY_VARIABLE = "no_grpc_proxy"
_NO_SEED = tf.compat.v1.get_seed(0)[0]

logger = logging.getLogger("keras_dp")


class WorkerLostError(RuntimeError):
    """Says why workers cannot continue: another worker or a connection is lost, or some do not reach the same operation.

    All workers must start again, as `keras-dp launch --max-restarts` does it.

    >>> import sys, keras_dp
    >>> try:
    ...     keras_dp.connect_workers()
    ... except keras_dp.WorkerLostError as error:
    ...     sys.exit(f"A job that restarts this worker may try again: {error}")
    WorkerGroup(index=0, count=1)
    """


class WorkerGroup:
    """The W processes that train together, and the number of this process among them. `connect_workers` makes it.

    >>> import keras_dp
    >>> workers = keras_dp.connect_workers()
    >>> if workers.is_chief:
    ...     print(f"{workers.count} worker(s) write to results/")
    1 worker(s) write to results/

    Attributes:
        index: the number of this worker, 0 to W - 1.
        count: W.
        is_chief: whether this is the first worker, which writes files.
        collectives: sums and gathers over the workers.
    """

    def __init__(
        self,
        collectives: OneWorker | None = None,
        health_check: HealthCheck | None = None,
        cluster: Cluster | None = None,
    ):
        self.collectives = collectives or OneWorker()
        self.index = self.collectives.index
        self.count = self.collectives.count
        self.is_chief = self.index == 0
        self._health_check = health_check
        self._cluster = cluster
        self._own_error: weakref.ref[tf.errors.OpError] | None = None

    def __repr__(self) -> str:
        return f"WorkerGroup(index={self.index}, count={self.count})"

    def agree(self, facts: dict[str, Any]) -> None:
        """Checks that some facts, of JSON's types, are the same on all workers.

        Raises:
            ValueError: on all workers, if the facts differ. It names the first difference.
        """
        if self.count == 1:
            return
        own = json.dumps(facts).encode()
        with self.reporting_lost_workers():
            if len(set(self.collectives.exchange(hashlib.blake2b(own, digest_size=16).digest()))) == 1:
                return
            everywhere = [json.loads(message) for message in self.collectives.exchange(own)]
        other = next(i for i, facts in enumerate(everywhere) if facts != everywhere[0])
        path, first, second = _first_difference(everywhere[0], everywhere[other])
        raise ValueError(
            "The workers must run the same script with the same arguments on the same data, which keras_dp divides among them. "
            f"They differ in {', '.join(path)}: worker 0 has {first!r}, worker {other} has {second!r}."
        )

    @contextlib.contextmanager
    def reporting_lost_workers(self) -> Iterator[None]:
        """Replaces TensorFlow's error for a lost worker by an error that names it. Used where workers wait for each other.

        An operation that fails on this worker alone lets the others wait for the exchanges that it has left out. When the wait
        is over, the error says what has failed. If all fail alike, they may go on with another call.

        Raises:
            WorkerLostError: in place of TensorFlow's error.
        """
        try:
            with self._health_check.expecting_progress() if self._health_check is not None else contextlib.nullcontext():
                yield
        except Exception as error:
            reason = self._reason_of(error) if isinstance(error, tf.errors.OpError) else None
            if reason is None:
                self._note_failure(error)
                raise
            raise WorkerLostError(reason) from error
        self._note_failure(None)

    def _note_failure(self, error: Exception | None) -> None:
        """Notes why this worker may have left a step, or that it has reached the end of one, for later errors."""
        if isinstance(error, tf.errors.OpError):
            self._own_error = weakref.ref(error)
        # The end of a dataset is no failure.
        if self._health_check is not None and not isinstance(error, tf.errors.OutOfRangeError | StopIteration):
            self._health_check.failure = None if error is None else error_summary(error)

    def note_progress(self) -> None:
        """Notes that this worker makes progress, so that the timeout of `reporting_lost_workers` starts again."""
        if self._health_check is not None:
            self._health_check.note_progress()

    def answer_times(self) -> list[dict[int, float]]:
        """Returns for each worker the seconds until each other one answers it; see `HealthCheck`. The workers ask in turns.

        All workers must call it together.
        """
        if self._health_check is None:
            return [{}]
        rows = []
        for turn in range(self.count):
            own = self._health_check.answer_times() if turn == self.index else {}
            rows.append(json.loads(self.collectives.exchange(json.dumps(list(own.items())).encode())[turn]))
        return [dict(row) for row in rows]

    def _reason_of(self, error: tf.errors.OpError) -> str | None:
        # A call within another one has found out already that the error is this worker's own.
        if self._health_check is None or (self._own_error is not None and self._own_error() is error):
            return None
        if "Collective ops is aborted by: Shape mismatch" in error.message:
            return (
                "The workers have reached different operations: every worker must call fit(), evaluate(), predict() and the "
                f"like in the same order, with the same arguments. {error.message}"
            )
        if not isinstance(error, _ERRORS_OF_LOSSES):
            return None
        # TensorFlow passes the reason on, also from the worker that has noticed the loss first.
        passed_on = _PASSED_ON.search(error.message)
        if passed_on is not None:
            return passed_on[1]
        deadline = time.monotonic() + SECONDS_TO_NOTICE
        while self._health_check.lost is None and time.monotonic() < deadline:
            self.note_progress()  # A short timeout must not hide the reason.
            time.sleep(INTERVAL_SECONDS / 10)
        if self._health_check.lost is None and self._cluster is not None and isinstance(error, tf.errors.UnavailableError):
            return broken_connection(error.message, self._cluster)
        return self._health_check.lost


def _first_difference(one: Any, other: Any) -> tuple[list[str], Any, Any]:
    """Finds the first difference between two nested dictionaries, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                path, *values = _first_difference(one.get(name), other.get(name))
                return [name, *path], *values
    return [], one, other


_ERRORS_OF_LOSSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)

_current = WorkerGroup()


def current_workers() -> WorkerGroup:
    """Returns the workers that `connect_workers` has connected, or this process alone if it was not called.

    Raises:
        RuntimeError: if `keras-dp launch` has started several workers, but `connect_workers` was not called.
    """
    if _current.count == 1:
        _notice_others()
    return _current


def _notice_others() -> None:
    """Raises an error or logs a warning if there are several workers, but `connect_workers` was not called."""
    try:
        cluster = find_cluster()
    except ValueError as error:
        described = f"This process seems to be one of several workers, whose description is malformed ({error})"
    else:
        if cluster is None:
            _notice_other_launchers()
            return
        described = f"This process is worker {cluster.index} of {len(cluster.addresses)} according to {cluster.source}"
    message = (
        f"{described}, but connect_workers() was not called: each worker trains its own model on all of the data, and "
        "overwrites the others' files. Call connect_workers() at the top of the script, before TensorFlow does anything."
    )
    if LAUNCHED_VARIABLE in os.environ:
        raise RuntimeError(message)
    _warn_once(f"{message} Ignore this warning if each worker is meant to train alone.")


def _notice_other_launchers() -> None:
    """Logs a warning if a launcher whose variables keras_dp does not read has started several processes."""
    launched = other_launcher()
    if launched is not None:
        _warn_once(
            f"{launched.name} has started {launched.processes} processes, but no TF_CONFIG says who they are. Each trains "
            "a model of its own on all of the data, and overwrites the others' files. Start them with keras-dp launch, with "
            "srun, or with a TF_CONFIG for each, and call connect_workers() at the top of the script (docs/launching.md). "
            f"Ignore this if each process is meant to train alone. Received: {launched.variable}={launched.processes}"
        )


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def connect_workers(
    *, timeout: float = TIMEOUT, start_timeout: float = START_TIMEOUT, communication: choices.Communication = "ring"
) -> WorkerGroup:
    """Connects this process to the other workers, so that every `DataParallelModel` trains on all of them together.

    TF_CONFIG or Slurm's variables describe the workers; see docs/launching.md and `keras-dp launch`. Without these, or with
    one worker, nothing happens, and the script runs in a single process. Call it at the top of the script, before TensorFlow
    does anything, but after `use_logical_cpus`:

    >>> import keras_dp
    >>> workers = keras_dp.connect_workers()
    >>> workers.index, workers.count, workers.is_chief
    (0, 1, True)

    All workers run the same script. They pass the data and arguments of the global batch to `fit`, `evaluate` and `predict`,
    and each worker takes its part. The chief's random state of Python, NumPy and TensorFlow is sent to all workers.

    Args:
        timeout: seconds without an answer or progress, after which a worker counts as lost and the others raise a
            `WorkerLostError`. It must be longer than anything that one worker does alone, such as saving a checkpoint. A worker
            whose process has ended is noticed within seconds.
        start_timeout: seconds to wait for workers that start late.
        communication: "ring" over gRPC, or "nccl" between GPUs.

    Returns:
        A `WorkerGroup`.

    Raises:
        ValueError: if an argument or TF_CONFIG is malformed, or the workers have different minor versions of Python, or
            different versions of Keras, TensorFlow, NumPy or keras_dp.
        RuntimeError: if TensorFlow has started already, or this worker's port is taken.
        TimeoutError: if a worker does not start in time.
        WorkerLostError: if a worker is lost.
    """
    global _current
    console.show_messages()
    refuse_unknown("communication", communication, choices.Communication)
    for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
        if not isinstance(seconds, int | float) or seconds <= 0:
            raise ValueError(f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}")
    if _current.count > 1:
        return _current
    cluster = find_cluster()
    if TOWERS_VARIABLE in os.environ and not tf.config.list_physical_devices("GPU"):
        use_logical_cpus(int(os.environ[TOWERS_VARIABLE]))
    if cluster is None:
        _notice_other_launchers()
    else:
        _current = _connect(cluster, timeout, start_timeout, communication)
    return _current


def _connect(cluster: Cluster, timeout: float, start_timeout: float, communication: str) -> WorkerGroup:
    address = cluster.addresses[cluster.index]
    _go_around_proxies(cluster)
    try:
        tensorflow_runtime.start_server(cluster.jobs, cluster.job, cluster.task, leader=cluster.names[0])
    except RuntimeError as error:
        raise RuntimeError(
            "connect_workers() must be called before TensorFlow does anything. Call it at the top of the script, before "
            f"tensors, variables and models are made. Received: {error}"
        ) from error
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"TensorFlow's server did not start: does another process listen on the port of worker {cluster.index}? "
            f"Received: {address}, {error.message}"
        ) from error
    host, _, port = address.rpartition(":")
    reason = accept_only(host, int(port))
    if reason is not None:
        logger.warning(
            "Worker %d accepts connections to all addresses of this machine, because %s. Anyone who reaches port %s can read "
            "the model and run code in this process. Give the workers IP addresses, or block the port from outside "
            "(docs/security.md).",
            *(cluster.index, reason, port),
        )
    health_check = HealthCheck(cluster.addresses, cluster.index, timeout)
    atexit.register(health_check.stop)
    health_check.wait_for_all(start_timeout)
    health_check.start(lambda reason: tensorflow_runtime.abort_collectives(_MARK + reason))
    with WorkerGroup(health_check=health_check, cluster=cluster).reporting_lost_workers():
        collectives = Collectives(cluster.index, len(cluster.addresses), communication)
    group = WorkerGroup(collectives, health_check, cluster)
    group.agree({"versions": _versions(), "cluster": cluster.jobs})
    if tf.compat.v1.get_seed(0)[0] == _NO_SEED:
        tf.random.set_seed(random.SystemRandom().randrange(2**31))
    share_random_state(group)
    logger.info("Worker %d of %d, at %s", group.index, group.count, address)
    return group


def _go_around_proxies(cluster: Cluster) -> None:
    """Makes gRPC reach the workers directly, even if a proxy is set."""
    listed = os.environ.get(_NO_PROXY_VARIABLE, os.environ.get("no_proxy", ""))
    hosts = [address.rpartition(":")[0].strip("[]") for address in cluster.addresses]
    os.environ[_NO_PROXY_VARIABLE] = ",".join(filter(None, [listed, *dict.fromkeys(hosts)]))


def share_random_state(group: WorkerGroup) -> None:
    """Broadcasts the chief's random state of Python, NumPy and TensorFlow, so that all workers shuffle alike."""
    with group.reporting_lost_workers():
        own = _random_state()
        chiefs = group.collectives.broadcast(own)
    if chiefs == own:
        return
    python, numpy, seed = json.loads(chiefs)
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state((numpy[0], np.array(numpy[1], np.uint32), *numpy[2:]))
    if seed != tf.compat.v1.get_seed(0)[0]:
        tf.random.set_seed(seed)


def _random_state() -> bytes:
    state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = state
    return json.dumps([random.getstate(), [name, keys.tolist(), *rest], int(tf.compat.v1.get_seed(0)[0])]).encode()


def _versions() -> dict[str, str]:
    packages = {name: installation.version(name) for name in ("keras_dp", "keras", "tensorflow", "numpy")}
    return {**packages, "Python": ".".join(platform.python_version_tuple()[:2])}
