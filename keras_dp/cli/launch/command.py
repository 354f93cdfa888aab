"""Run `keras-dp launch`: start the workers of a script.

  keras-dp launch --workers 2 train.py --epochs 3
  keras-dp launch --hosts alpha,beta --towers-per-worker 4 train.py --epochs 3

All workers run the same script. TF_CONFIG tells each worker its number and the addresses of all workers. Each line of output
is printed after the worker's number. Progress bars are thinned out.

When a worker fails, the other workers are ended too, and the last lines of the failed worker are shown. With --max-restarts,
all workers then start again, and the script resumes from its last backup by keras.callbacks.BackupAndRestore. With
--min-workers, a worker that fails or is lost in two starts in a row, as on a broken GPU, is left out; the others take its rows.
When these start again for another reason, it is tried again.

SIGINT (Ctrl-C) and SIGTERM are sent to all workers; a second signal kills them. The exit code is the code of the worker that
failed first, or 128 + the number of the signal.
"""

import argparse
import codecs
import contextlib
import itertools
import json
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

from keras_dp.cli.launch import cores
from keras_dp.cli.launch.members import Members
from keras_dp.cli.launch.output import TAIL_LINES, WorkerOutput, print_line
from keras_dp.devices import nvidia

GRACE_SECONDS = 5.0  # for the other workers to notice that one is lost
KILL_SECONDS = 10.0  # from a signal to SIGKILL, which also ends stopped processes
_PIECE_BYTES = 2**16
_MOST_PORT = 2**16 - 1
DRAIN_SECONDS = 2.0  # to wait for an ended worker's output, if another process holds its pipes

_HOST = re.compile(r"(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+)(?::(\d+))?")
_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    # An abbreviated option may belong to the script.
    parser.allow_abbrev = False
    parser.add_argument(
        "--workers", type=_integer(1, _MOST_PORT), metavar="N", help="how many processes to start on this machine"
    )
    parser.add_argument(
        "--hosts",
        type=_hosts,
        metavar="HOST[:PORT],...",
        help="start nothing, and print the command for each of these hosts; write IPv6 addresses in brackets",
    )
    parser.add_argument("--port", type=_port, default=2222, help="port of hosts without one (default: %(default)s)")
    parser.add_argument(
        "--towers-per-worker",
        type=_integer(1),
        metavar="N",
        help="devices of each worker (default: its share of the GPUs; without GPUs, one CPU device)",
    )
    parser.add_argument(
        "--max-restarts", type=_integer(0), default=0, metavar="N", help="how often to restart after a failure (default: 0)"
    )
    parser.add_argument(
        "--min-workers",
        type=_integer(1),
        metavar="N",
        help="after two failures of the same worker in a row, go on without it while N are left (default: with all)",
    )
    parser.add_argument(
        "--share-cores",
        action="store_true",
        help="let every worker run on all cores (default: each has its own, if there are enough; Linux only)",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is a module, as in python -m")
    parser.add_argument("script", help="the script that every worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    """Runs the workers until all have ended, or prints the commands for the hosts.

    Args:
        options: the arguments that `add_arguments` declares.

    Returns:
        The exit code: 128 + the number of the signal that the launcher received, if any. Otherwise the code of the worker that
        failed first, which is 128 + the number of a signal that ended it. Otherwise 0.

    Raises:
        argparse.ArgumentError: if options contradict each other, the script is missing, or the GPUs cannot be divided.
    """
    _check(options)
    script = [*(["-m"] if options.is_module else []), options.script, *options.arguments]
    if options.hosts:
        _print_commands(options, script)
        return 0
    gpus = _gpus_of_workers(options.workers, options.towers_per_worker)
    members = Members(options.workers, options.min_workers or options.workers)
    events: _Events = queue.SimpleQueue()
    with _signals_into(events):
        for restart in itertools.count():
            count = len(members.places)
            shares = [frozenset[int]()] * count if options.share_cores else cores.shares(count)
            addresses = _free_addresses(count)
            # All workers iterate over sets in one order, which is the order of their collectives.
            shared = {"PYTHONHASHSEED": "0", **os.environ, "PYTHONUNBUFFERED": "1", "KERAS_DP_RESTART": str(restart)}
            environments = [
                {**shared, **_place(addresses, index, options.towers_per_worker), **gpus[place]}
                for index, place in enumerate(members.places)
            ]
            failed, received = _run_workers([sys.executable, *script], environments, shares, events)
            if failed is not None:
                print_line(f"keras-dp launch: {failed.failure()}", sys.stderr)
            if received is not None:
                return 128 + received
            if failed is None or restart == options.max_restarts:
                break
            again = members.start_again(failed.culprit())
            print_line(f"keras-dp launch: {again}, restart {restart + 1} of {options.max_restarts}.", sys.stderr)
    return 0 if failed is None else failed.exit_code()


class _Worker:
    """Runs the script in a process group of its own, and prints its output line by line.

    The worker puts itself into `events` when its process has ended.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str], events: "_Events"):
        self.index = index
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.outputs = [WorkerOutput(index, stream, self.tail) for stream in (sys.stdout, sys.stderr)]
        self.readers = [
            threading.Thread(target=_read, args=arguments, daemon=True)
            for arguments in zip((self.process.stdout, self.process.stderr), self.outputs, strict=True)
        ]
        for thread in (*self.readers, threading.Thread(target=self._wait, args=(events,), daemon=True)):
            thread.start()

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and to the processes that it has started."""
        # For a group whose processes have all ended, macOS raises PermissionError instead of ProcessLookupError.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def drain(self) -> None:
        """Waits until the worker's output is printed, at most `DRAIN_SECONDS` for each stream."""
        for reader in self.readers:
            reader.join(DRAIN_SECONDS)

    def exit_code(self) -> int:
        """Returns the exit code as a shell reports it: 128 + the number of a signal."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def failure(self) -> str:
        """Describes the failure, with the last lines of the output."""
        code = self.process.returncode
        reason = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        last = [*self.tail, *(output.unfinished for output in self.outputs if output.unfinished)][-TAIL_LINES:]
        lines = [f"[{self.index}] {line}" for line in last]
        return "\n".join([f"worker {self.index} failed first, with {reason}. Its last lines:", *lines])

    def culprit(self) -> int:
        """Returns the index of the worker that is to blame: this one, or another one that this one says it has lost."""
        lost = re.search(r"WorkerLostError: (?:Worker|The last step or call of worker) (\d+) ", "\n".join(self.tail))
        return int(lost[1]) if lost else self.index

    def _wait(self, events: "_Events") -> None:
        self.process.wait()
        self.signal(signal.SIGKILL)  # to the processes that it leaves behind
        events.put(self)


def _read(pipe: IO[bytes], output: WorkerOutput) -> None:
    """Passes on the output of a worker until the worker closes its end of the pipe."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    # If the launcher's own output is closed, printing fails. The worker's pipe is then closed too, as without a launcher.
    with pipe, contextlib.suppress(OSError):
        while piece := os.read(pipe.fileno(), _PIECE_BYTES):
            output.feed(decoder.decode(piece))
        output.feed(decoder.decode(b"", final=True))
        output.close()


_Events: TypeAlias = queue.SimpleQueue[_Worker | int]


def _run_workers(
    command: Sequence[str],
    environments: Iterable[Mapping[str, str]],
    shares: Sequence[frozenset[int]],
    events: _Events,
) -> tuple[_Worker | None, int | None]:
    """Runs a worker in each of the environments until all have ended.

    Args:
        command: the command of all workers.
        environments: the environment variables of each worker.
        shares: the cores of each worker, as `cores.shares` returns them.
        events: the queue of ended workers, and of the numbers of signals to the launcher.

    Returns:
        The first worker that has failed before any signal, and the first signal to the launcher. Each may be None.
    """
    failed: _Worker | None = None
    received: int | None = None
    signals: list[tuple[float, int]] = []  # the time and the number of each signal to send
    workers: list[_Worker] = []
    running: set[_Worker] = set()
    try:
        for index, environment in enumerate(environments):
            workers.append(_Worker(index, command, environment, events))
            running.add(workers[-1])
            cores.confine(workers[-1].process.pid, shares[index])
        while running:
            try:
                event = events.get(timeout=max(0.0, signals[0][0] - time.monotonic()) if signals else None)
            except queue.Empty:
                _send(running, signals.pop(0)[1])
                continue
            now = time.monotonic()
            if isinstance(event, _Worker):
                running.remove(event)
                if event.process.returncode and failed is None and received is None:
                    failed = event
                    end = now + GRACE_SECONDS
                    signals = [(end, signal.SIGTERM), (end + KILL_SECONDS, signal.SIGKILL)]
            elif received is None:
                received = event
                signals = [(now, received), (now + KILL_SECONDS, signal.SIGKILL)]
            else:
                signals = [(now, signal.SIGKILL)]
    finally:
        _send(running, signal.SIGKILL)
    for worker in workers:
        worker.drain()
    return failed, received


def _send(workers: Iterable[_Worker], number: int) -> None:
    for worker in workers:
        worker.signal(number)


@contextlib.contextmanager
def _signals_into(events: _Events) -> Iterator[None]:
    """Makes signals that would end the launcher put their numbers into `events` instead."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda number, frame: events.put(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _place(addresses: Sequence[str], index: int, towers: int | None) -> dict[str, str]:
    """Returns the environment variables with a worker's number, all addresses, and the number of towers of a worker."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(config)} | ({} if towers is None else {"KERAS_DP_TOWERS": str(towers)})


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        try:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for listener in sockets:
                listener.bind(("127.0.0.1", 0))
        except OSError as error:
            raise argparse.ArgumentError(None, f"--workers: {count} ports cannot be had at once: {error}") from error
        return [f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]


def _print_commands(options: argparse.Namespace, script: Sequence[str]) -> None:
    """Prints, for each host, the command to paste into a shell there."""
    addresses: list[str] = []
    for host, port in options.hosts:
        candidates = (f"{host}:{number}" for number in itertools.count(port or options.port))
        addresses.append(next(address for address in candidates if address not in addresses))
    for index, address in enumerate(addresses):
        variables = _place(addresses, index, options.towers_per_worker).items()
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables)
        print(f"# {address}\n{assignments} {shlex.join(['python', *script])}\n")


def _visible_gpus() -> list[str]:
    """Lists this machine's GPUs for CUDA_VISIBLE_DEVICES. As in CUDA, the first entry that is no GPU ends the list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(nvidia.count_gpus())]
    return list(itertools.takewhile(_GPU.fullmatch, (name.strip() for name in visible.split(","))))


def _gpus_of_workers(workers: int, towers: int | None) -> list[dict[str, str]]:
    """Returns the environment variable with the GPUs of each worker; no variable if there are no GPUs."""
    gpus = _visible_gpus()
    if not gpus:
        return [{}] * workers
    if len(gpus) < workers * towers if towers else len(gpus) % workers:
        raise argparse.ArgumentError(
            None,
            f"Each of {workers} workers needs {towers or 'the same number of'} GPUs. Received: {len(gpus)} GPUs. Change "
            "--workers or --towers-per-worker, or set CUDA_VISIBLE_DEVICES to the GPUs to use, or to -1 for the CPU.",
        )
    count = towers or len(gpus) // workers
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * count : (index + 1) * count])} for index in range(workers)]


def _check(options: argparse.Namespace) -> None:
    """Refuses options that contradict each other, and a script that does not exist."""
    problem = None
    if options.hosts:
        if options.workers not in (None, len(options.hosts)):
            problem = f"--workers and --hosts differ. Received: {options.workers} and {len(options.hosts)}. Leave one out."
        elif options.max_restarts:
            problem = f"--hosts starts nothing. Received: --max-restarts {options.max_restarts}. Leave it out."
        elif options.min_workers:
            problem = f"--hosts starts nothing. Received: --min-workers {options.min_workers}. Leave it out."
        elif options.share_cores:
            problem = "--hosts starts nothing. Received: --share-cores. Leave it out."
    elif options.workers is None:
        problem = "Either --workers or --hosts is needed. Received: neither. Add --workers 2."
    elif options.min_workers and options.min_workers > options.workers:
        problem = f"--min-workers is more than --workers. Received: {options.min_workers} and {options.workers}."
    elif options.min_workers and not options.max_restarts:
        problem = "--min-workers is for restarts. Received: no --max-restarts. Add --max-restarts 3."
    elif not options.is_module and not Path(options.script).exists():
        problem = f"There is no such script. Received: {options.script!r}. Give its path, or put -m before a module's name."
    if problem is not None:
        raise argparse.ArgumentError(None, problem)


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns a type for argparse: an integer in a range."""
    span = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(value: str) -> int:
        if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
            raise argparse.ArgumentTypeError(f"must be an integer {span}. Received: {value!r}")
        return int(value)

    return parse


def _hosts(value: str) -> list[tuple[str, int | None]]:
    hosts = []
    for name in value.split(","):
        match = _HOST.fullmatch(name)
        if match is None:
            raise argparse.ArgumentTypeError(f"A host is name, name:port or [IPv6]:port. Received: {name!r}")
        hosts.append((match[1], None if match[2] is None else _port(match[2])))
    return hosts


_port = _integer(1, _MOST_PORT)
