"""torch's store of keys on one address of this host: left to itself it listens on all interfaces."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def store_at(host: str, deadline: timedelta, members: int | None = None) -> TCPStore:
    """One that others can join, on a port that the kernel chose. Raises OSError where ``host`` is not this host's."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            members,
            is_master=True,
            timeout=deadline,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
