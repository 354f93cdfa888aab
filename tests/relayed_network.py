"""Relay what workers on this machine send each other, as a network of a chosen delay, rate and faults would.

`RelayedNetwork` starts this file as a process of its own. A worker connects to a port of the relay in place of another worker's
address. The relay passes the bytes on, in their order, when they would arrive. It needs no privileges.

Unlike a real network, this one loses no packets, so TCP sends nothing again, and it accepts each connection at once: where a
real one would let the connection wait, its bytes wait.
"""

import asyncio
import collections
import contextlib
import json
import math
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

VARIABLE = "RELAYED_NETWORK"  # holds the address at which workers find the relay; worker_scripts/relayed.py reads it

_QUEUE_SECONDS = 0.005  # of bytes that wait for their turn on a line; more of them wait at their sender
_PIECE_SECONDS = 0.001
_PIECE_BYTES = 2**16  # at most
_PIECES = 1024  # under way on one connection, at most
_RESET = struct.pack("ii", 1, 0)  # closing sends a reset


class Line(NamedTuple):
    """One direction between two workers.

    Attributes:
        delay: the seconds that each byte is under way.
        rate: the bytes that pass in a second, of all connections together.
    """

    delay: float = 0.0
    rate: float = math.inf

    def slower(self, times: float) -> "Line":
        """Returns a line of a lower rate."""
        return self._replace(rate=self.rate / times)


class RelayedNetwork:
    """A network between workers, whose lines can be changed, held and cut while they are used.

    Methods take the numbers of workers. Inside the `with` block, the relay runs.

    Args:
        line: what every direction between two workers is like at first.
    """

    def __init__(self, line: Line = Line()):  # noqa: B008
        self._line = line

    def __enter__(self) -> "RelayedNetwork":
        command = [sys.executable, __file__, json.dumps(self._line)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self._ask = Questions(self.address)
        return self

    def __exit__(self, *error: object) -> None:
        self._ask.close()
        self._process.kill()
        self._process.communicate()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which worker_scripts/relayed.py finds this network."""
        return {VARIABLE: self.address}

    def port(self, worker: int, other: int, address: str) -> int:
        """Returns the port at which a worker reaches another one, which listens at an address."""
        return self._ask("port", worker, other, address)

    def set_line(self, source: int, destination: int, line: Line) -> None:
        """Changes the line from one worker to another, for all that is sent from now on."""
        self._ask("set_line", source, destination, line)

    def hold(self, source: int, destination: int) -> None:
        """Lets nothing pass from one worker to another, and closes nothing."""
        self._ask("hold", source, destination)

    def release(self, source: int, destination: int) -> None:
        """Lets all that was held pass, and what follows it."""
        self._ask("release", source, destination)

    def hold_around(self, worker: int, others: tuple[int, ...]) -> None:
        """Holds both directions between a worker and each of some others."""
        for other in others:
            self.hold(worker, other)
            self.hold(other, worker)

    def release_around(self, worker: int, others: tuple[int, ...]) -> None:
        """Releases both directions between a worker and each of some others."""
        for other in others:
            self.release(worker, other)
            self.release(other, worker)

    def cut(self, worker: int, other: int) -> int:
        """Resets all connections between two workers, and returns their number. New ones may follow."""
        return self._ask("cut", worker, other)

    def refuse(self, worker: int, other: int) -> None:
        """Resets each new connection between two workers."""
        self._ask("refuse", worker, other)

    def accept(self, worker: int, other: int) -> None:
        """Lets two workers connect again."""
        self._ask("accept", worker, other)

    def passed(self, source: int, destination: int) -> int:
        """Returns the number of bytes that one worker has received from another so far."""
        return self._ask("passed", source, destination)


class Questions:
    """Asks the relay to do something, and waits until it is done.

    Args:
        address: of the relay.
    """

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._answers = self._socket.makefile()

    def __call__(self, command: str, *arguments: Any) -> Any:
        self._socket.sendall(json.dumps([command, *arguments]).encode() + b"\n")
        return json.loads(self._answers.readline())

    def close(self) -> None:
        """Ends the connection."""
        self._answers.close()
        self._socket.close()


class _Direction:
    """The line from one worker to another, and what is on it.

    Attributes:
        line: the line.
        passing: an event, cleared while the line is held.
        free_at: the time at which the line takes the next byte.
        passed: how many bytes have arrived.
    """

    def __init__(self, line: Line):
        self.line = line
        self.passing = asyncio.Event()
        self.passing.set()
        self.free_at = 0.0
        self.passed = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes the bytes of one connection on, until its end, which is passed on like a byte."""
        under_way: asyncio.Queue[tuple[float, bytes, bool]] = asyncio.Queue(_PIECES)
        await asyncio.gather(self._take(reader, under_way), self._give(under_way, writer))

    async def _take(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes, bool]]) -> None:
        while True:
            await _sleep_until(self.free_at - _QUEUE_SECONDS)
            await self.passing.wait()
            piece, is_reset = b"", False
            try:
                piece = await reader.read(max(1, min(_PIECE_BYTES, int(min(self.line.rate * _PIECE_SECONDS, _PIECE_BYTES)))))
            except ConnectionError:
                is_reset = True
            self.free_at = max(self.free_at, time.monotonic()) + len(piece) / self.line.rate
            await under_way.put((self.free_at + self.line.delay, piece, is_reset))
            if not piece:
                return

    async def _give(self, under_way: asyncio.Queue[tuple[float, bytes, bool]], writer: asyncio.StreamWriter) -> None:
        while True:
            arrival, piece, is_reset = await under_way.get()
            await _sleep_until(arrival)
            await self.passing.wait()
            if is_reset:
                _reset(writer)
            with contextlib.suppress(ConnectionError):  # The other direction tells the sender.
                if piece:
                    writer.write(piece)
                    await writer.drain()
                    self.passed += len(piece)
                elif not is_reset and writer.can_write_eof():
                    writer.write_eof()
            if not piece:
                return


class _Relay:
    """Carries all connections, and does what is asked."""

    def __init__(self, line: Line):
        self._directions: dict[tuple[int, int], _Direction] = collections.defaultdict(lambda: _Direction(line))
        self._connections: dict[frozenset[int], set[asyncio.StreamWriter]] = collections.defaultdict(set)
        self._refused: set[frozenset[int]] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Does what one `Questions` asks."""
        while line := await reader.readline():
            command, *arguments = json.loads(line)
            answer = await getattr(self, f"do_{command}")(*arguments)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def do_port(self, worker: int, other: int, address: str) -> int:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with self._counted(frozenset((worker, other)), writer):
                await self._connect(reader, writer, worker, other, address)

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, worker: int, other: int, address: str
    ) -> None:
        if frozenset((worker, other)) in self._refused:
            return
        there, back = self._directions[worker, other], self._directions[other, worker]
        for direction in (there, back):
            await asyncio.sleep(direction.line.delay)
            await direction.passing.wait()
        host, _, port = address.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        with self._counted(frozenset((worker, other)), far_writer):
            await asyncio.gather(there.carry(reader, far_writer), back.carry(far_reader, writer))
            for end in (writer, far_writer):
                end.close()

    @contextlib.contextmanager
    def _counted(self, pair: frozenset[int], writer: asyncio.StreamWriter) -> Iterator[None]:
        """Lets `cut` reset an end of a connection, and resets it if it is still open at the end."""
        self._connections[pair].add(writer)
        try:
            yield
        finally:
            self._connections[pair].discard(writer)
            if not writer.is_closing():
                _reset(writer)

    async def do_set_line(self, source: int, destination: int, line: list[float]) -> None:
        self._directions[source, destination].line = Line(*line)

    async def do_hold(self, source: int, destination: int) -> None:
        self._directions[source, destination].passing.clear()

    async def do_release(self, source: int, destination: int) -> None:
        self._directions[source, destination].passing.set()

    async def do_cut(self, worker: int, other: int) -> int:
        ends = list(self._connections[frozenset((worker, other))])
        for writer in ends:
            _reset(writer)
        return len(ends) // 2

    async def do_refuse(self, worker: int, other: int) -> None:
        self._refused.add(frozenset((worker, other)))

    async def do_accept(self, worker: int, other: int) -> None:
        self._refused.discard(frozenset((worker, other)))

    async def do_passed(self, source: int, destination: int) -> int:
        return self._directions[source, destination].passed


async def _sleep_until(moment: float) -> None:
    seconds = moment - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _serve(line: Line) -> None:
    relay = _Relay(line)
    server = await asyncio.start_server(relay.answer, "127.0.0.1", 0)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    # Standard input ends with the process that has started this one.
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    # Other selectors of Python round times up to milliseconds.
    asyncio.set_event_loop(asyncio.SelectorEventLoop(selectors.SelectSelector()))
    asyncio.get_event_loop().run_until_complete(_serve(Line(*json.loads(sys.argv[1]))))
