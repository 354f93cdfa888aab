"""In one process, `connect_workers` needs no other workers, and a group turns errors of workers into losses."""

import contextlib
import logging
import os
import random
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.workers import group as module
from keras_dp.workers.cluster import Cluster
from keras_dp.workers.collectives import OneWorker
from keras_dp.workers.group import WorkerGroup, current_workers, share_random_state
from keras_dp.wrapping.one_state import own_of

TWO_WORKERS = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
ONE_WORKER = '{"cluster": {"worker": ["host:2222"]}, "task": {"type": "worker", "index": 0}}'
SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "a",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "a",
    "SLURM_LOCALID": "1",
}


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch):
    others = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "RANK", "no_proxy", "no_grpc_proxy")
    for name in ("TF_CONFIG", "KERAS_DP_TOWERS", "KERAS_DP_RESTART", *others, *SLURM):
        monkeypatch.setenv(name, "")  # Also a variable that the code sets is restored after the test.
        monkeypatch.delenv(name)
    module._warn_once.cache_clear()
    monkeypatch.setattr(module, "SECONDS_TO_NOTICE", 0.1)
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.1)


@pytest.fixture
def set_variables(monkeypatch):
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "keras_dp"]


# Alone


@pytest.mark.parametrize(
    "variables", [{}, {"TF_CONFIG": ONE_WORKER, "KERAS_DP_RESTART": "0"}], ids=["nothing", "one that was launched"]
)
def test_nothing_happens_to_a_process_alone(variables, set_variables, caplog):
    set_variables(variables)
    wrap_a_model()  # which needs no connection
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with caplog.at_level(logging.INFO, "keras_dp"):
        workers = keras_dp.connect_workers()
    assert (workers.index, workers.count, workers.is_chief) == (0, 1, True)
    assert repr(workers) == "WorkerGroup(index=0, count=1)"
    # There is one group, which has nothing to agree on.
    assert isinstance(workers, keras_dp.WorkerGroup)
    assert keras_dp.connect_workers(timeout=5, start_timeout=0.5, communication="nccl") is workers is current_workers()
    workers.agree({"not": {"of": "JSON"}, "types": object()})
    share_random_state(workers)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert not messages(caplog)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "horovodrun has started 2 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, r"mpirun .Open MPI. has started 4 processes"),
        ({"PMI_SIZE": "3"}, "mpiexec .PMI. has started 3 processes"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "torchrun has started 2 processes"),
        ({"WORLD_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
)
def test_other_launchers_are_noticed(variables, named, set_variables, caplog):
    """Their processes would train models of their own, and overwrite each other's files, in silence."""
    set_variables(variables)
    for notices in (keras_dp.connect_workers, current_workers):
        module._warn_once.cache_clear()
        caplog.clear()
        notices()
        assert len(messages(caplog)) == (named is not None)
        if named:
            expected = f"{named}, but no TF_CONFIG says.*keras-dp launch.*Received: {next(iter(variables))}="
            assert re.search(expected, messages(caplog)[0])


def test_seconds_are_not_a_number_of_workers():
    with pytest.raises(TypeError, match="positional"):
        keras_dp.connect_workers(2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("communication", value, "`communication` must be one of 'ring', 'nccl'") for value in ("RING", None)),
        *(("timeout", seconds, "`timeout` must be a positive number of seconds.") for seconds in (0, "60", None)),
        ("start_timeout", -1.0, "`start_timeout` must be a positive number of seconds."),
    ],
)
def test_wrong_arguments_are_refused(name, value, said):
    with pytest.raises(ValueError, match=f"{said}.* Received: {name}={value!r}"):
        keras_dp.connect_workers(**{name: value})


def test_it_is_too_late_once_tensorflow_has_started(set_variables):
    tf.constant(1.0)
    set_variables({"TF_CONFIG": TWO_WORKERS})
    with pytest.raises(RuntimeError, match=r"connect_workers\(\) must be called before TensorFlow does anything"):
        keras_dp.connect_workers()
    assert current_workers().count == 1


def test_the_launcher_says_how_many_towers_there_are(monkeypatch):
    monkeypatch.setenv("KERAS_DP_TOWERS", "4")
    assert keras_dp.connect_workers().count == 1
    monkeypatch.setenv("KERAS_DP_TOWERS", "3")
    with pytest.raises(RuntimeError, match="count=3, while TensorFlow has already started with 4"):
        keras_dp.connect_workers()


# Not connected


def wrap_a_model():
    return keras_dp.DataParallelModel(keras.Sequential([keras.layers.Dense(1)]), devices=1)


def test_launched_workers_that_nobody_connects_are_refused(set_variables):
    """Each worker would silently train a separate model, and overwrite the files of the others."""
    set_variables({"TF_CONFIG": TWO_WORKERS, "KERAS_DP_RESTART": "0"})
    said = r"worker 1 of 2 according to TF_CONFIG, but connect_workers\(\) was not called.*top of the script"
    with pytest.raises(RuntimeError, match=said):
        wrap_a_model()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TF_CONFIG": TWO_WORKERS}, "worker 1 of 2 according to TF_CONFIG"),
        (SLURM, "worker 1 of 2 according to Slurm"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
    ],
    ids=["TF_CONFIG", "Slurm", "malformed"],
)
def test_other_workers_that_nobody_connects_are_warned_of_once(variables, said, set_variables, caplog):
    set_variables(variables)
    for _ in range(2):
        wrap_a_model()
    (message,) = messages(caplog)
    assert said in message
    assert "connect_workers() was not called" in message
    assert "Ignore this warning if each worker is meant to train alone." in message


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"no_proxy": "localhost,.corp"}, "localhost,.corp,alpha,beta.example,::1"),
        ({"no_proxy": "localhost", "no_grpc_proxy": "other"}, "other,alpha,beta.example,::1"),
    ],
    ids=["no_proxy", "both"],
)
def test_workers_do_not_reach_each_other_through_proxies(variables, expected, set_variables):
    set_variables(variables)
    jobs = {"worker": ["alpha:1", "alpha:2", "beta.example:1", "[::1]:1"]}
    module._go_around_proxies(Cluster(jobs, "worker", 0))
    name = "no_grpc_proxy"
    assert os.environ[name] == expected


# Random state


class Broadcast(OneWorker):
    """Simulates the second of two workers, which receives the first one's broadcast message."""

    def __init__(self, message):
        super().__init__()
        self.index, self.count = 1, 2
        self.message = message

    def broadcast(self, message):
        self.sent = message
        return message if self.message is None else self.message


def draw():
    return [random.random(), random.gauss(0, 1)], np.random.normal(size=5).tolist(), tf.random.normal([3]).numpy().tolist()


def seed(number):
    random.seed(number)
    np.random.seed(number)
    tf.random.set_seed(number)


def test_random_numbers_become_the_first_workers():
    """Two generators keep the second of a pair of normal numbers for the next call."""
    seed(1)
    random.gauss(0, 1)
    np.random.normal()
    chief = Broadcast(None)
    share_random_state(WorkerGroup(chief))
    expected = draw()
    seed(2)
    assert draw() != expected
    share_random_state(WorkerGroup(Broadcast(chief.sent)))
    assert draw() == expected


def test_random_numbers_that_are_the_same_go_on():
    """TensorFlow's generator starts over whenever it gets a seed, so that it must not get one."""
    seed(1)
    chief = Broadcast(None)
    share_random_state(WorkerGroup(chief))
    expected = [tf.random.normal([3]).numpy().tolist() for _ in range(2)]
    for draws_more in (lambda: None, random.random, np.random.random):  # The others' numbers may differ.
        seed(1)
        received = [tf.random.normal([3]).numpy().tolist()]
        draws_more()
        share_random_state(WorkerGroup(Broadcast(chief.sent)))
        assert [*received, tf.random.normal([3]).numpy().tolist()] == expected


# Errors


class Watched:
    expecting_progress = staticmethod(contextlib.nullcontext)

    def __init__(self, lost=None):
        self.lost = lost
        self.progress = 0
        self.failure = None

    def note_progress(self):
        self.progress += 1


def named(error, check, cluster=None):
    """Returns the error that results when an error is raised where workers wait for each other."""
    group = WorkerGroup(health_check=check, cluster=cluster)
    with pytest.raises((RuntimeError, tf.errors.OpError)) as caught, group.reporting_lost_workers():
        raise error
    if caught.value is not error:
        assert isinstance(caught.value, keras_dp.WorkerLostError)
        assert caught.value.__cause__ is error
    return caught.value


ERRORS = [
    *(tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.InternalError),
    *(tf.errors.UnavailableError, tf.errors.UnknownError),
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_that_losses_cause_name_the_lost_worker(kind):
    check = Watched("Worker 1 (a:1) is lost: gone.")
    assert str(named(kind(None, None, "Connection reset by peer"), check)) == check.lost
    # The error carries the reason for aborting the collectives, from the worker that noticed first.
    aborted = "Collective ops is aborted by: keras_dp: Worker 2 (b:1) is lost: gone.\nIt could be from a previous operation."
    assert str(named(kind(None, None, aborted), Watched())) == "Worker 2 (b:1) is lost: gone."
    # A worker that passes the error on quotes it.
    quoted = 'grpc_message:"Collective ops is aborted by: keras_dp: Worker 2 (b:1) is lost: gone.\\nIt could be."'
    for message in (quoted, f"{aborted}\n{quoted}"):
        assert str(named(kind(None, None, message), Watched())) == "Worker 2 (b:1) is lost: gone."


def test_a_loss_is_waited_for_that_is_noticed_after_the_error():
    """To wait for the reason is no lack of progress, for which the health check would give up."""

    class NoticesLater(Watched):
        def note_progress(self):
            self.progress += 1
            self.lost = "Worker 1 is lost" if self.progress == 3 else None

    assert str(named(tf.errors.UnavailableError(None, None, "reset"), NoticesLater())) == "Worker 1 is lost"


BROKEN = "Collective ops is aborted by: recvmsg:Connection reset by peer"
RECEIVED = "\nAdditional GRPC error information from remote target /job:{} while calling /tensorflow.WorkerService/RecvBuf:"


@pytest.mark.parametrize(
    ("senders", "own", "ends"),
    [
        (["worker/replica:0/task:1"], 0, "0 (a:1) and 2 (c:1)"),
        (["chief/replica:0/task:0"], 2, "0 (a:1) and 2 (c:1)"),
        # The worker between has passed on what the first that failed has told it.
        (["worker/replica:0/task:1", "worker/replica:0/task:0"], 0, "1 (b:1) and 2 (c:1)"),
        (["worker/replica:0/task:1", "chief/replica:0/task:0", "worker/replica:0/task:1"], 1, "0 (a:1) and 2 (c:1)"),
    ],
)
def test_a_connection_that_breaks_is_named_where_all_workers_answer(senders, own, ends):
    cluster = Cluster({"worker": ["b:1", "c:1"], "chief": ["a:1"]}, *(("worker", own - 1) if own else ("chief", 0)))
    message = BROKEN + "".join(RECEIVED.format(sender) for sender in senders)
    broken = named(tf.errors.UnavailableError(None, None, message), Watched(), cluster)
    assert str(broken).startswith(f"The connection between workers {ends} broke in the middle of a step")
    lost = Watched("Worker 1 is lost")
    assert str(named(tf.errors.UnavailableError(None, None, message), lost, cluster)) == lost.lost
    # What has failed on another worker is no broken connection, and neither is an error that names no worker of these.
    for error in (tf.errors.InternalError(None, None, message), tf.errors.UnavailableError(None, None, BROKEN)):
        assert named(error, Watched(), cluster) is error
    other = tf.errors.UnavailableError(None, None, BROKEN + RECEIVED.format("ps/replica:0/task:0"))
    assert named(other, Watched(), cluster) is other


def test_a_worker_that_does_something_else_is_no_loss():
    mismatch = "Collective ops is aborted by: Shape mismatch in the collective instance 5."
    other = named(tf.errors.InternalError(None, None, mismatch), Watched("Worker 1 is lost"))
    assert str(other).startswith("The workers have reached different operations: every worker must call fit()")
    assert str(other).endswith(mismatch)


def test_errors_that_are_the_scripts_own_stay():
    own = [tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError, tf.errors.ResourceExhaustedError]
    for error in (*(kind(None, None, "labels out of range") for kind in own), RuntimeError("of the user")):
        assert named(error, Watched("Worker 1 is lost")) is error
    error = tf.errors.InternalError(None, None, "CUDA")
    assert named(error, Watched()) is named(error, None) is error


def test_what_has_failed_is_noted_until_a_step_succeeds():
    check = Watched()
    group = WorkerGroup(health_check=check)
    message = "Graph execution error:\n\nDetected at node a/B defined at (most recent call last):\n<stack traces unavailable>\n"
    undecoded = "'utf-8' codec can't decode byte 0xff in position 0: ? is none"
    several = "2 root error(s) found.\n  (0) INVALID_ARGUMENT:  \\d is too large\n\t [[{{node a/B}}]]"
    for error, noted in (
        (tf.errors.InvalidArgumentError(None, None, f"{message}{several}"), "InvalidArgumentError: /d is too large"),
        (tf.errors.InternalError(None, None, "{{function_node __inference_2}} CUDA"), "InternalError: CUDA"),
        (tf.errors.OutOfRangeError(None, None, "end"), "InternalError: CUDA"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\ud800 is none"), f"UnicodeDecodeError: {undecoded}"),
        (RuntimeError(), "RuntimeError"),
        (None, None),
    ):
        with contextlib.suppress(Exception), group.reporting_lost_workers():
            if error is not None:
                raise error
        assert check.failure == noted


def test_an_error_is_examined_once():
    """A call within a call must not name workers that are lost later in place of its error."""
    check = Watched()
    group = WorkerGroup(health_check=check)
    error = tf.errors.UnknownError(None, None, "OSError: a file is gone")

    def fails():
        with group.reporting_lost_workers(), contextlib.ExitStack() as stack:
            stack.callback(setattr, check, "lost", "Worker 0 is lost")
            with group.reporting_lost_workers():
                raise error

    with pytest.raises(tf.errors.UnknownError, match="a file is gone"):
        fails()


def test_progress_is_expected_where_workers_wait_for_each_other():
    check = mock.MagicMock()
    group = WorkerGroup(health_check=check)
    with group.reporting_lost_workers():
        check.expecting_progress().__enter__.assert_called_once_with()
        check.expecting_progress().__exit__.assert_not_called()
        group.note_progress()
    check.note_progress.assert_called_once_with()
    check.expecting_progress().__exit__.assert_called_once()


def test_eager_steps_are_refused_on_several_workers(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model, devices=1)
    parallel.compile("sgd", "mse", run_eagerly=True)
    monkeypatch.setattr(own_of(parallel), "workers", mock.Mock(count=2, reporting_lost_workers=contextlib.nullcontext))
    with pytest.raises(ValueError, match="run_eagerly=True is for debugging.*Received: run_eagerly=True on 2 workers"):
        parallel.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
