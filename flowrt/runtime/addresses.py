"""Addresses of hosts and HTTP servers: the one place that splits and joins host and port, and knows IPv6 brackets.

``tcp://HOST:PORT`` names a controller. HOST is a name, an IPv4 address, an IPv6 address in brackets (``[::1]``, with a
scope ``[fe80::1%eth0]``), or ``*`` for all interfaces.
"""

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flowrt.errors import ConfigError

SCHEME = "tcp://"
ANY_HOST = ("*", "0.0.0.0", "::")  # noqa: S104 (to be recognised, not to be bound)
MAX_PORT = 65535
_ENDPOINT = re.compile(r"(?:\[([^\[\]\s/]+)\]|([^\[\]\s/:]+)):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port; ``host`` has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def address(self) -> str:
        """``tcp://HOST:PORT``."""
        return f"{SCHEME}{self}"


def bracketed(host: str) -> str:
    """The host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def split_endpoint(text: str) -> Endpoint:
    """Parse ``HOST:PORT``. Raises ConfigError if it is none."""
    match = _ENDPOINT.fullmatch(text)
    # ZeroMQ would read port 70000 as 4464.
    if match is None or int(match[3]) > MAX_PORT or (match[1] and not is_ipv6(match[1])):
        raise ConfigError(f"{text!r} is not HOST:PORT; write an IPv6 address in brackets, as [::1]:5555")
    return Endpoint(match[1] or match[2], int(match[3]))


def parse_address(text: str) -> Endpoint:
    """Parse a controller's address ``tcp://HOST:PORT``. Raises ConfigError if it is malformed."""
    if text.startswith(SCHEME):
        with contextlib.suppress(ConfigError):
            return split_endpoint(text.removeprefix(SCHEME))
    raise ConfigError(
        f"controller address {text!r} is malformed; write tcp://HOST:PORT, port 0 for any free one, and an IPv6 "
        "address in brackets, as tcp://[::1]:0"
    )


def is_ipv6(host: str) -> bool:
    """Whether the host is an IPv6 address, without brackets."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only. The only name that is recognised is localhost."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def unmapped(host: str) -> str:
    """An address in its usual form: IPv4 if it is an IPv6 address that maps one, as a socket of both families has it.

    A name is returned unchanged.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)
    return host


def source_address(endpoint: Endpoint) -> tuple[socket.AddressFamily, str]:
    """The family that reaches an endpoint, IPv4 if both do, and the address of this host that packets are sent from.

    Raises OSError if there is no such host, or no route to it.
    """
    addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    failure = OSError(f"{endpoint.host} has no address")
    for family, _, _, _, destination in sorted(addresses, key=lambda info: info[0] != socket.AF_INET):
        try:
            return family, _source(family, destination)
        except OSError as error:
            failure = error
    raise failure


def _source(family: socket.AddressFamily, destination: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; the kernel only chooses a route.
        probe.connect(destination)
        # With the interface of an address that is valid on one link only: without it nothing can listen there.
        return socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def needs_ipv6(host: str) -> bool:
    """Whether a socket must speak IPv6 to reach ``host``, or to listen on it: not if IPv4 does.

    A name without an IPv4 route counts as IPv6, with which addresses of both families can be connected later.
    """
    if host in ANY_HOST:
        return host != "0.0.0.0"  # noqa: S104
    try:
        return source_address(Endpoint(host, 1))[0] != socket.AF_INET
    except OSError:
        return not _is_ipv4(host)


def _is_ipv4(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).version == 4
    return False


def check_url(key: str, url: str, fix: str) -> None:
    """Check that ``url`` is http(s)://HOST[:PORT][/PATH]. Raises ConfigError, in which no password is shown.

    Args:
        key: name of the configuration key.
        url: its value.
        fix: where a password or key belongs instead: the configuration is written to files.
    """
    try:
        parts = urlsplit(url)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a wrong IPv6 address
        raise ConfigError(f"{key} has a wrong host or port; write http://HOST:PORT") from None
    if "@" in (parts.netloc if is_complete else url):
        raise ConfigError(f"{key} has a user name or password, which would be written to the run's files; {fix}")
    if not is_complete:
        raise ConfigError(f"{key} is {url!r}; use an address that begins with http:// or https://")
