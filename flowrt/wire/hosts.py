"""The addresses of this host: under which of them others find what listens here."""

import contextlib
import fcntl
import ipaddress
import socket
import struct

ANY_HOST = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 (to be recognised, not to be bound)
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_SOMEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): whatever route it takes is the default one."""


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by the interface's name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def own_address() -> str:
    """The address by which other hosts probably reach this one; loopback when it has no other."""
    for address in (*_named(), *_default_route(), *interfaces().values()):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def reachable(bound: str, host: str) -> str:
    """The address to tell workers of a controller that is bound to ``bound``.

    One that listens on all interfaces is found under ``host``, or `own_address` where that is empty.
    """
    where, _, port = bound.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host or own_address()}:{port}" if where in ANY_HOST else bound


def _named() -> list[str]:
    """The addresses that this host's own name resolves to."""
    with contextlib.suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return []


def _default_route() -> list[str]:
    # Connecting a datagram socket sends nothing; it only makes the kernel choose a route.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        return [str(probe.getsockname()[0])]
    return []
