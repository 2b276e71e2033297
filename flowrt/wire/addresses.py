"""Addresses of controllers, and which of them may be listened on."""

import ipaddress
import re

from flowrt.errors import ConfigError

_ADDRESS = re.compile(r"tcp://([^/\s]+):(\d{1,5})")
_LARGEST_PORT = 65535


def check_address(address: str, keyed: bool) -> None:
    """Raises ConfigError when the address is malformed, or open to other machines without keys."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) > _LARGEST_PORT:
        # ZeroMQ takes 70000 for 4464.
        raise ConfigError(
            f"controller address {address!r} is malformed; write tcp://HOST:PORT, port 0 for any free one"
        )
    if not keyed and not is_loopback(found[1]):
        # There is no switch to do it all the same: whoever reaches an open controller may run the whole job.
        raise ConfigError(
            f"controller address {address} can be reached from other machines, and there are no keys: anybody could "
            "take part in the run; make keys with flowrt keys DIR and set controller.keys, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach that host (a name counts only if it is localhost)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
