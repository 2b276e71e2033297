"""Facts about this host: its addresses, and the kernel namespaces in which ids and names are unique."""

import contextlib
import fcntl
import os
import re
import socket
import struct
from pathlib import Path

from flowrt.errors import ConfigError
from flowrt.runtime.addresses import ANY_HOST, Endpoint, is_ipv6, is_loopback, parse_address, source_address

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16
_INET6_INTERFACES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPES = ("00", "10")
"""Scopes of addresses that have no interface in them: global (or private), and the host's own."""
_DOCUMENTATION_ADDRESSES = (Endpoint("192.0.2.1", 9), Endpoint("2001:db8::1", 9))
"""Addresses reserved for documentation (RFC 5737, RFC 3849): their route is the default route."""


def check_address(address: str, keyed: bool) -> None:
    """Raises ConfigError if the address is not ``tcp://HOST:PORT``, or not loopback while there are no keys."""
    if not is_loopback(parse_address(address).host) and not keyed:
        # No option allows this: every process that reaches an open controller can run the whole job.
        raise ConfigError(
            f"controller address {address} can be reached from other machines, and there are no keys: any process "
            "there could take part in the run; make keys with flowrt keys DIR and set controller.keys, or listen on "
            "127.0.0.1"
        )


def interfaces() -> dict[str, str]:
    """The address of each network interface that has one, by the interface's name: IPv4, else IPv6 beyond its link."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: _NAME_BYTES - 1])
            with contextlib.suppress(OSError):
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
    for name, address in _inet6_addresses():
        addresses.setdefault(name, address)
    return addresses


def interface_of(address: str) -> str:
    """The network interface with this address; empty if there is none."""
    pairs = (*interfaces().items(), *_inet6_addresses(link_local=True))
    plain, _, scope = address.partition("%")
    return next((name for name, own in pairs if own == plain and scope in ("", name)), "")


def _inet6_addresses(*, link_local: bool = False) -> list[tuple[str, str]]:
    """Pairs of an interface and its IPv6 address; with ``link_local`` also addresses of one link."""
    with contextlib.suppress(OSError):
        fields = [line.split() for line in _INET6_INTERFACES.read_text().splitlines()]
        return [
            (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
            for address, _, _, scope, _, name in fields
            if link_local or scope in _GLOBAL_SCOPES
        ]
    return []


def own_address() -> str:
    """The address by which other hosts probably reach this host, IPv4 if there is one; 127.0.0.1 if there is none."""
    for is_wanted in (lambda address: not is_ipv6(address), is_ipv6):
        for address in (*_addresses_of_own_name(), *_default_routes(), *interfaces().values()):
            if is_wanted(address) and not is_loopback(address):
                return address
    return "127.0.0.1"


def local_address(controller: str) -> str:
    """This host's address on the route to ``tcp://HOST:PORT``, by which peers can reach it.

    Raises ConfigError if there is no such route, or no such host.
    """
    try:
        return source_address(parse_address(controller))[1]
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()!r} has no route to the controller at {controller}: {error.strerror}; check "
            "the address (controller.host) and the route to its network"
        ) from error


def reachable(bound: str, host: str) -> str:
    """The address that workers connect to, for a controller that is bound to ``bound``.

    If the controller listens on all interfaces, the host of the address is ``host``, or `own_address` if that is empty.
    """
    endpoint = parse_address(bound)
    own = host.strip("[]") or own_address()
    return Endpoint(own, endpoint.port).address if endpoint.host in ANY_HOST else bound


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
        addresses = [
            str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
        return [address for address in addresses if "%" not in address]
    return []


def _default_routes() -> list[str]:
    addresses = []
    for endpoint in _DOCUMENTATION_ADDRESSES:
        with contextlib.suppress(OSError):
            addresses.append(source_address(endpoint)[1])
    return [address for address in addresses if "%" not in address]


NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs", "smb3")
)
_MOUNTS = Path("/proc/self/mountinfo")


def is_on_network(path: Path) -> bool:
    """Whether a file is on a file system that other hosts share, or on FUSE, which may be one; False if unknown."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return False
    kinds: dict[Path, str] = {}
    for line in lines:  # a later mount hides an earlier one at the same place
        left, _, right = line.partition(" - ")
        kinds[Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4]))] = right.split()[0]
    kind = next((kinds[folder] for folder in (place, *place.parents) if folder in kinds), "")
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
