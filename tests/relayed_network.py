"""Relay what workers on this machine send each other, as a network of a chosen delay, rate and faults would.

`RelayedNetwork` starts this file as a process of its own. A worker connects to a port of the relay in place of another worker's
address. The relay passes the bytes on, in their order, when they would arrive. It needs no privileges.

Unlike a real network, this one loses no packets, so TCP sends nothing again, and it accepts each connection at once: where a
real one would let the connection wait, its bytes wait.
"""

import asyncio
import collections
import contextlib
import functools
import json
import math
import selectors
import socket
import struct
import subprocess
import sys
import time
from typing import NamedTuple

VARIABLE = "RELAYED_NETWORK"  # holds the address at which workers find the relay; worker_scripts/relayed.py reads it

_QUEUE_SECONDS = 0.005  # of bytes that wait for their turn on a line; more of them wait at their sender
_PIECE_SECONDS = 0.001
_PIECE_BYTES = 2**16  # at most
_PIECES = 1024  # under way on one connection, at most
_RESET = struct.pack("ii", 1, 0)  # closing sends a reset


class Line(NamedTuple):
    """One direction between two workers: each byte is under way for `delay` seconds, and `rate` bytes pass in a second."""

    delay: float = 0.0
    rate: float = math.inf


class RelayedNetwork:
    """A network between workers, whose lines can be held and cut while they are used.

    Inside the `with` block, the relay runs, and does what it is asked; the numbers are those of workers.

        port(worker, other, address)            returns the port at which a worker reaches another one at its address
        hold(source, destination)               lets nothing pass, and closes nothing
        release(source, destination)            lets all that was held pass, and what follows it
        cut(worker, other)                      resets all connections, and returns their number; new ones may follow
        refuse(worker, other)                   resets each new connection
        accept(worker, other)                   lets two workers connect again
        passed(source, destination)             returns the number of bytes that have arrived

    Args:
        line: what every direction between two workers is like at first.
    """

    def __init__(self, line=Line()):  # noqa: B008
        self._line = line

    def __enter__(self):
        command = [sys.executable, __file__, json.dumps(self._line)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.environment = {VARIABLE: self._process.stdout.readline().strip()}
        self._ask = Questions(self.environment[VARIABLE])
        return self

    def __exit__(self, *error):
        self._ask.close()
        self._process.kill()
        self._process.communicate()

    def __getattr__(self, name):
        return functools.partial(self.__dict__["_ask"], name)


class Questions:
    """Asks the relay at an address to do something, and waits until it is done."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._answers = self._socket.makefile()

    def __call__(self, command, *arguments):
        self._socket.sendall(json.dumps([command, *arguments]).encode() + b"\n")
        return json.loads(self._answers.readline())

    def close(self):
        self._answers.close()
        self._socket.close()


class _Direction:
    """The line from one worker to another, and what is on it.

    Attributes:
        passing: an event, cleared while the line is held.
        free_at: the time at which the line takes the next byte.
        passed: how many bytes have arrived.
    """

    def __init__(self, line):
        self.line = line
        self.passing = asyncio.Event()
        self.passing.set()
        self.free_at = 0.0
        self.passed = 0

    async def carry(self, reader, writer):
        """Passes the bytes of one connection on, until its end, which is passed on like a byte."""
        under_way = asyncio.Queue(_PIECES)
        await asyncio.gather(self._take(reader, under_way), self._give(under_way, writer))

    async def _take(self, reader, under_way):
        while True:
            await _sleep_until(self.free_at - _QUEUE_SECONDS)
            await self.passing.wait()
            piece, is_reset = b"", False
            try:
                piece = await reader.read(max(1, int(min(self.line.rate * _PIECE_SECONDS, _PIECE_BYTES))))
            except ConnectionError:
                is_reset = True
            self.free_at = max(self.free_at, time.monotonic()) + len(piece) / self.line.rate
            await under_way.put((self.free_at + self.line.delay, piece, is_reset))
            if not piece:
                return

    async def _give(self, under_way, writer):
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

    def __init__(self, line):
        self._directions = collections.defaultdict(lambda: _Direction(line))
        self._connections = collections.defaultdict(set)
        self._refused = set()

    async def answer(self, reader, writer):
        """Does what one `Questions` asks."""
        while line := await reader.readline():
            command, *arguments = json.loads(line)
            answer = await getattr(self, f"do_{command}")(*arguments)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def do_port(self, worker, other, address):
        async def connect(reader, writer):
            with self._counted(frozenset((worker, other)), writer):
                await self._connect(reader, writer, worker, other, address)

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _connect(self, reader, writer, worker, other, address):
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
    def _counted(self, pair, writer):
        """Lets `cut` reset an end of a connection, and resets it if it is still open at the end."""
        self._connections[pair].add(writer)
        try:
            yield
        finally:
            self._connections[pair].discard(writer)
            if not writer.is_closing():
                _reset(writer)

    async def do_hold(self, source, destination):
        self._directions[source, destination].passing.clear()

    async def do_release(self, source, destination):
        self._directions[source, destination].passing.set()

    async def do_cut(self, worker, other):
        ends = list(self._connections[frozenset((worker, other))])
        for writer in ends:
            _reset(writer)
        return len(ends) // 2

    async def do_refuse(self, worker, other):
        self._refused.add(frozenset((worker, other)))

    async def do_accept(self, worker, other):
        self._refused.discard(frozenset((worker, other)))

    async def do_passed(self, source, destination):
        return self._directions[source, destination].passed


async def _sleep_until(moment):
    seconds = moment - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


def _reset(writer):
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


async def _serve(line):
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
