"""The relayed network delays, slows and holds what passes through it, and keeps bytes in their order.

What it cuts and refuses, test_workers_over_network.py sees.
"""

import contextlib
import select
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from relayed_network import Line, RelayedNetwork

PATIENCE = 20.0
WORKER, OTHER = 0, 1


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what each connection sends, until it ends."""

    daemon_threads = True

    class RequestHandlerClass(socketserver.StreamRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                while piece := self.request.recv(2**16):
                    self.request.sendall(piece)


@pytest.fixture
def network_of():
    """Returns a network of a line, and a function that connects through it to a server that sends all back."""
    with Echo(("127.0.0.1", 0), Echo.RequestHandlerClass) as echo, contextlib.ExitStack() as stack:
        threading.Thread(target=echo.serve_forever, args=[0.05]).start()
        stack.callback(echo.shutdown)

        def make(line):
            network = stack.enter_context(RelayedNetwork(line))
            port = network.port(WORKER, OTHER, f"127.0.0.1:{echo.server_address[1]}")
            return network, lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))

        yield make


def received(connection, size):
    return connection.makefile("rb").read(size)


def round_trip(connection, message=b"x"):
    """Returns the seconds until a message has come back, byte for byte."""
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(connection.sendall, message)
        assert received(connection, len(message)) == message
    return time.monotonic() - begin


def test_each_direction_has_its_delay(network_of):
    _, connect = network_of(Line(delay=0.1))
    connection = connect()
    round_trip(connection)
    assert 0.2 <= min(round_trip(connection) for _ in range(3)) < 0.3
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""


def test_all_connections_of_a_direction_share_its_rate(network_of):
    """Two connections carry a megabyte each at four megabytes per second, there and back at the same time."""
    network, connect = network_of(Line(rate=4e6))
    message = b"".join(i.to_bytes(4, "little") for i in range(250_000))
    one, other = connect(), connect()
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(round_trip, (one, other), (message, message)))
    assert 0.45 < time.monotonic() - begin < 1.5
    assert network.passed(WORKER, OTHER) == network.passed(OTHER, WORKER) == 2 * len(message)


@pytest.mark.parametrize("held", [(WORKER, OTHER), (OTHER, WORKER)])
def test_what_is_held_in_one_direction_arrives_when_it_is_released(held, network_of):
    network, connect = network_of(Line())
    connection = connect()
    round_trip(connection)
    before = network.passed(*held)
    network.hold(*held)
    connection.sendall(b"in order")
    assert not select.select([connection], [], [], 0.3)[0]
    assert network.passed(*held) == before
    # The other direction goes on: where the answer is held, the question has passed.
    if held == (OTHER, WORKER):
        assert network.passed(WORKER, OTHER) == before + len(b"in order")
    network.release(*held)
    assert received(connection, 8) == b"in order"
