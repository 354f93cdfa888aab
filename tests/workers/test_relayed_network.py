"""The relayed network delays, slows, holds, resets and refuses what passes through it, and keeps bytes in their order."""

import contextlib
import socket
import socketserver
import threading
import time

import pytest
from relayed_network import Line, RelayedNetwork

PATIENCE = 20.0
WORKER, OTHER = 0, 1


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what each connection sends, until it ends. Counts the connections."""

    daemon_threads = True
    connections = 0

    class RequestHandlerClass(socketserver.BaseRequestHandler):
        def handle(self):
            self.server.connections += 1
            with contextlib.suppress(OSError):
                while piece := self.request.recv(2**16):
                    self.request.sendall(piece)

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)


@pytest.fixture
def echo():
    with Echo() as running:
        threading.Thread(target=running.serve_forever, args=[0.05]).start()
        yield running
        running.shutdown()


@pytest.fixture
def network_of(echo):
    """Returns a network of a line, and a function that connects through it to `echo`."""
    with contextlib.ExitStack() as stack:

        def make(line):
            network = stack.enter_context(RelayedNetwork(line))
            port = network.port(WORKER, OTHER, f"127.0.0.1:{echo.server_address[1]}")

            def connect():
                return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))

            return network, connect

        yield make


def received(connection, size):
    parts = []
    while size:
        parts.append(connection.recv(size))
        if not parts[-1]:
            raise ConnectionError
        size -= len(parts[-1])
    return b"".join(parts)


def round_trip(connection, message=b"x"):
    begin = time.monotonic()
    connection.sendall(message)
    assert received(connection, len(message)) == message
    return time.monotonic() - begin


def has_passed(connection, seconds=0.3):
    """Returns whether a byte arrives within some seconds."""
    connection.settimeout(seconds)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return False
    finally:
        connection.settimeout(PATIENCE)


def test_bytes_arrive_in_their_order_and_are_counted_and_so_does_the_end(network_of):
    network, connect = network_of(Line())
    connection = connect()
    message = b"".join(i.to_bytes(4, "little") for i in range(250_000))
    threading.Thread(target=connection.sendall, args=[message]).start()
    assert received(connection, len(message)) == message
    assert network.passed(WORKER, OTHER) == network.passed(OTHER, WORKER) == len(message)
    assert network.passed(WORKER, 2) == 0
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""


def test_each_direction_has_its_delay(network_of):
    network, connect = network_of(Line(delay=0.1))
    connection = connect()
    round_trip(connection)
    assert 0.2 <= min(round_trip(connection) for _ in range(3)) < 0.3
    network.set_line(OTHER, WORKER, Line())
    assert 0.1 <= min(round_trip(connection) for _ in range(3)) < 0.2


def test_all_connections_of_a_direction_share_its_rate(network_of):
    """Two connections carry a megabyte each at four megabytes per second, there and back at the same time."""
    network, connect = network_of(Line(rate=4e6))
    message = bytes(1_000_000)
    connections = connect(), connect()
    begin = time.monotonic()
    for connection in connections:
        threading.Thread(target=connection.sendall, args=[message]).start()
    for connection in connections:
        received(connection, len(message))
    assert 0.45 < time.monotonic() - begin < 1.5
    network.set_line(WORKER, OTHER, Line(rate=4e5))
    assert 0.45 < round_trip(connections[0], message[:200_000]) < 1.5


@pytest.mark.parametrize("held", [(WORKER, OTHER), (OTHER, WORKER)])
def test_what_is_held_in_one_direction_arrives_when_it_is_released(held, network_of):
    network, connect = network_of(Line())
    connection = connect()
    round_trip(connection)
    before = network.passed(*held)
    network.hold(*held)
    connection.sendall(b"in order")
    assert not has_passed(connection)
    assert network.passed(*held) == before
    # The other direction goes on: where the answer is held, the question has passed.
    if held == (OTHER, WORKER):
        assert network.passed(WORKER, OTHER) == before + len(b"in order")
    network.release(*held)
    assert received(connection, 8) == b"in order"


def test_connections_are_reset_and_new_ones_follow(network_of):
    network, connect = network_of(Line())
    connections = connect(), connect()
    for connection in connections:
        round_trip(connection)
    assert network.cut(OTHER, WORKER) == 2
    for connection in connections:
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    round_trip(connect())


def test_new_connections_are_refused_and_old_ones_go_on(network_of, echo):
    network, connect = network_of(Line())
    connection = connect()
    round_trip(connection)
    network.refuse(WORKER, OTHER)
    with pytest.raises(ConnectionError):
        round_trip(connect())
    assert echo.connections == 1
    round_trip(connection)
    network.accept(WORKER, OTHER)
    round_trip(connect())
    echo.shutdown()
    echo.socket.close()
    with pytest.raises(ConnectionError):  # nobody listens any more
        round_trip(connect())
