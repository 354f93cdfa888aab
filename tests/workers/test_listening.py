"""A worker's server accepts connections to the worker's own address alone, and a warning says where it cannot."""

import json
import os
import re
import socket
import sys
import threading

import pytest
from worker_processes import Workers, free_ports

from keras_dp.workers import listening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters what reaches a socket")

OWN = ["127.0.0.1", "127.0.0.2", "::1"]  # addresses of this machine, each of which its loopback interface has


def answers(address, port):
    """Returns whether a connection to an address is accepted; a filter drops the packets without an answer."""
    try:
        with socket.create_connection((address, port), timeout=0.3):
            return True
    except TimeoutError:
        return False


@pytest.fixture
def port():
    """Listens on all interfaces, for versions 4 and 6 of IP, as TensorFlow's server does."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert all(answers(address, port) for address in OWN), "without a filter, all are accepted"
        yield port


@pytest.mark.parametrize(
    ("host", "reason", "accepted"),
    [
        ("127.0.0.2", None, ["127.0.0.2"]),
        ("[::1]", None, ["::1"]),
        ("[::ffff:127.0.0.2]", None, ["127.0.0.2"]),
        ("localhost", None, ["127.0.0.1", "::1"]),
        ("alpha", "alpha is a name", OWN),
        ("203.0.113.7", "203.0.113.7 is not an address of this machine", OWN),
        ("[2001:db8::7]", "[2001:db8::7] is not an address of this machine", OWN),
        ("[::]", "[::] is not an address of this machine", OWN),
    ],
)
def test_an_address_of_this_machine_is_the_only_one_that_is_accepted(port, host, reason, accepted):
    before = os.listdir("/proc/self/fd")
    assert listening.accept_only(host, port) == reason
    assert len(os.listdir("/proc/self/fd")) == len(before), "a descriptor stays open"
    assert [address for address in OWN if answers(address, port)] == accepted


def test_a_system_that_does_not_filter_is_named(port, monkeypatch):
    monkeypatch.setattr(listening, "_SO_ATTACH_FILTER", 2**15)
    assert re.fullmatch(r"this system does not filter them \(.*not available.*\)", listening.accept_only("127.0.0.1", port))


def test_a_system_without_ipv6(port, monkeypatch):
    """A kernel without IPv6 makes no such socket, and Docker's default network has no ::1: localhost is 127.0.0.1 there."""
    make = socket.socket

    def without_ipv6(family=-1, *arguments, **named):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return make(family, *arguments, **named)

    monkeypatch.setattr(listening.socket, "socket", without_ipv6)
    assert listening.accept_only("localhost", port) is None
    monkeypatch.undo()
    assert [address for address in OWN if answers(address, port)] == ["127.0.0.1"]


def test_other_sockets_stay_blocking(port):
    """With a default timeout, Python makes each socket non-blocking of which it makes an object."""
    one, other = socket.socketpair()
    with one, other:
        socket.setdefaulttimeout(10)
        try:
            assert listening.accept_only("127.0.0.1", port) is None
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(one.fileno())


def test_nothing_listens():
    (port,) = free_ports(1)
    assert f"no socket of this process listens on port {port}" in listening.accept_only("127.0.0.1", port)


def test_large_messages_pass():
    """The value of a filter is the number of bytes that pass."""
    sent = os.urandom(2**20)
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        address = "127.0.0.1", listener.getsockname()[1]
        assert listening.accept_only(*address) is None
        with socket.create_connection(address) as client, listener.accept()[0] as server:
            sender = threading.Thread(target=server.sendall, args=(sent,))
            sender.start()
            assert client.recv(len(sent), socket.MSG_WAITALL) == sent
            sender.join()
            client.sendall(sent[:50_000])
            assert server.recv(50_000, socket.MSG_WAITALL) == sent[:50_000]


@pytest.mark.processes
def test_workers_accept_each_other_alone(tmp_path):
    with Workers("training.py", 2, tmp_path, 0.4, tmp_path / "backup", "--epochs", 1000) as workers:
        workers.start().wait_for_output("epoch 1")
        for port in workers.ports:
            assert answers("127.0.0.1", port)
            assert not answers("127.0.0.2", port)
        assert not any("accepts connections to all addresses" in workers.output(i) for i in range(2))


@pytest.mark.processes
def test_a_worker_with_a_name_warns_that_its_port_is_open(tmp_path):
    (port,) = free_ports(1)
    config = {"cluster": {"worker": [f"alpha:{port}", "beta:2222"]}, "task": {"type": "worker", "index": 0}}
    with Workers("training.py", 1, tmp_path, 0.4, tmp_path / "backup", "--start-timeout", 600) as workers:
        workers.start(TF_CONFIG=json.dumps(config)).wait_for_output("docs/security.md")
        assert all(answers(address, port) for address in OWN), "TensorFlow's server listens on all interfaces"
        warning = "Worker 0 accepts connections to all addresses of this machine, because alpha is a name."
        assert warning in workers.output(0)
        assert f"Anyone who reaches port {port} can" in workers.output(0)
