"""Make a worker's server accept connections to the worker's own address alone.

TensorFlow's server listens on all network interfaces, whatever address it is told, and no setting changes this. Linux can
filter the packets that reach a socket by a small program, which needs no privileges (man 7 socket, SO_ATTACH_FILTER). The
connections that the socket accepts inherit the filter.
"""

import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOOPBACK = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]

_SO_ATTACH_FILTER = 26
# The instructions of Linux's packet filters, and where they find the header of IP (linux/filter.h).
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_HEADER = 2**32 - 0x100000
_DESTINATION = {4: 16, 6: 24}  # bytes into the header, by the version of IP
_WHOLE_PACKET = 2**32 - 1


def accept_only(host: str, port: int) -> str | None:
    """Makes this process accept connections to a host's address alone, on a port on which it listens already.

    A name is not filtered: other machines may know another address by it than this one does.

    Args:
        host: an IP address, in brackets if it is of version 6, or a name.
        port: the port.

    Returns:
        The reason why connections to all addresses of this machine are accepted; None if they are not.
    """
    try:
        addresses = _LOOPBACK if host == "localhost" else [_address(host.strip("[]"))]
    except ValueError:
        return f"{host} is a name"
    addresses = list(filter(_is_of_this_machine, addresses))
    if not addresses:
        return f"{host} is not an address of this machine"
    code = ctypes.create_string_buffer(filter_program(addresses))
    count = len(code.raw) // struct.calcsize("HBBI")
    program = struct.pack("HP", count, ctypes.addressof(code))
    try:
        for listener in _listeners(port):
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        return f"this system does not filter them ({error})"
    return None


def filter_program(addresses: Sequence[Address]) -> bytes:
    """Returns a program for Linux's packet filter that lets packets to some addresses pass, and drops all others."""
    instructions = []
    for address in addresses:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        tests = [(_LOAD_BYTE, _HEADER), (_AND, 0xF0), (_JUMP_IF_EQUAL, address.version << 4)]
        for position, word in enumerate(words):
            tests += [(_LOAD_WORD, _HEADER + _DESTINATION[address.version] + 4 * position), (_JUMP_IF_EQUAL, word)]
        tests.append((_RETURN, _WHOLE_PACKET))
        # Where a comparison fails, the tests of the next address follow.
        for left, (operation, operand) in zip(reversed(range(len(tests))), tests, strict=True):
            instructions.append((operation, 0, left if operation == _JUMP_IF_EQUAL else 0, operand))
    instructions.append((_RETURN, 0, 0, 0))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text)
    return (address.version == 6 and address.ipv4_mapped) or address


def _is_of_this_machine(address: Address) -> bool:
    if address.is_unspecified:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        # What a machine sends to its own address comes from this address. No packet is sent.
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.connect((str(address), 9))
            return address.is_loopback or ipaddress.ip_address(tried.getsockname()[0]) == address
    except OSError:  # the system may have no IPv6
        return False


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yields the sockets of this process that listen on a port, each until the next one.

    Raises:
        OSError: if there are none, or the system does not list them.
    """
    found = False
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            is_blocking = os.get_blocking(int(descriptor))
            listener = socket.socket(fileno=os.dup(int(descriptor)))
            # Python's default timeout would change the other descriptor, too.
            os.set_blocking(int(descriptor), is_blocking)
        except OSError:  # it is closed by now
            continue
        with listener:
            is_internet = listener.family in (socket.AF_INET, socket.AF_INET6)
            if (
                is_internet
                and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and listener.getsockname()[1] == port
            ):
                found = True
                yield listener
    if not found:
        raise OSError(f"no socket of this process listens on port {port}")
