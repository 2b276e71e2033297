"""Facts about this host: its addresses, and the kernel namespaces in which ids and names are unique."""

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from flowrt.errors import ConfigError

_ADDRESS = re.compile(r"tcp://([^/\s]+):(\d{1,5})")
_LARGEST_PORT = 65535
ANY_HOST = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 (to be recognised, not to be bound)
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737): its route is the default route."""


def check_address(address: str, keyed: bool) -> None:
    """Raises ConfigError if the address is not ``tcp://HOST:PORT``, or not loopback while there are no keys."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > _LARGEST_PORT:
        # ZeroMQ would read port 70000 as 4464.
        raise ConfigError(
            f"controller address {address!r} is malformed; write tcp://HOST:PORT, port 0 for any free one"
        )
    if not keyed and not is_loopback(found[1]):
        # No option allows this: every process that reaches an open controller can run the whole job.
        raise ConfigError(
            f"controller address {address} can be reached from other machines, and there are no keys: any process "
            "there could take part in the run; make keys with flowrt keys DIR and set controller.keys, or listen on "
            "127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only. The only name that is recognised is localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one, by the interface's name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def own_address() -> str:
    """The IPv4 address by which other hosts probably reach this host; 127.0.0.1 if there is no other."""
    for address in (*_addresses_of_own_name(), *_default_route(), *interfaces().values()):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def local_address(controller: str) -> str:
    """This host's address on the route to ``tcp://HOST:PORT``, by which peers can reach it.

    Raises ConfigError if there is no such route, or no such host.
    """
    host, _, port = controller.removeprefix("tcp://").rpartition(":")
    try:
        return _source_address((host, int(port)))
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()!r} has no route to the controller at {controller}: {error.strerror}; check "
            "the address (controller.host) and the route to its network"
        ) from error


def reachable(bound: str, host: str) -> str:
    """The address that workers connect to, for a controller that is bound to ``bound``.

    If the controller listens on all interfaces, the host of the address is ``host``, or `own_address` if that is empty.
    """
    bound_host, _, port = bound.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host or own_address()}:{port}" if bound_host in ANY_HOST else bound


def pid_namespace() -> str:
    """Identifies the scope in which a process id is unique: host, boot and PID namespace.

    The host name alone is not enough, since hosts may share one.
    """
    return _namespace("pid", f"{socket.gethostname()}/")


def network_namespace() -> str:
    """Identifies the scope of abstract Unix sockets: boot and network namespace."""
    return _namespace("net", "")


def clock_name() -> str:
    """Identifies the monotonic clock that this process reads: boot and time namespace."""
    return _namespace("time", "")


def _namespace(kind: str, prefix: str) -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{prefix}{boot_id}/{os.stat(f'/proc/self/ns/{kind}').st_ino}"
    except OSError:
        return socket.gethostname()


def _addresses_of_own_name() -> list[str]:
    with contextlib.suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return []


def _default_route() -> list[str]:
    with contextlib.suppress(OSError):
        return [_source_address(_DOCUMENTATION_ADDRESS)]
    return []


def _source_address(destination: tuple[str, int]) -> str:
    """The local address that packets to ``destination`` are sent from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; the kernel only chooses a route.
        probe.connect(destination)
        return str(probe.getsockname()[0])
