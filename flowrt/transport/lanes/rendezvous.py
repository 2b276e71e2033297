"""Rendezvous stores, in which torch.distributed exchanges a few small keys when it makes a group.

- `SignalStore` sends each key of a lane to the other end as a `RendezvousKey` message, through the controller. So a
  lane needs no store server, no fixed port and no world group, and only workers that the controller has admitted can
  connect.
- `serve_tcp_store` is for processes that are not workers; it listens on one address only.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store, TCPStore

from flowrt.errors import TransferError, WaitExpired
from flowrt.protocol.messages import MAX_SIGNAL_BYTES
from flowrt.runtime.waits import poll_until_true

SENDER_RANK = 0
RECEIVER_RANK = 1


class SignalStore(Store):
    """The store of one lane incarnation; ``post`` sends a key to the other end.

    torch calls it on the lane's thread; the event loop calls ``deliver`` and ``close``.
    """

    def __init__(
        self, lane: str, post: Callable[[str, bytes], None], deadline_s: float, peer: str = "the other end"
    ) -> None:
        super().__init__()
        self.lane = lane
        self.peer = peer
        self._post = post
        self._deadline_s = deadline_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = ""

    def deliver(self, key: str, value: bytes) -> None:
        """Accept a key that the other end has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(data) > MAX_SIGNAL_BYTES:
            raise TransferError(
                f"lane {self.lane}: its library wants to send {len(data)} bytes as key {key!r}, more than "
                f"{MAX_SIGNAL_BYTES}; choose other lanes with controller.lanes"
            )
        self.deliver(key, data)
        self._post(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        deadline_s = self._deadline_s if timeout is None else min(self._deadline_s, timeout.total_seconds())
        with self._changed:
            try:
                poll_until_true(
                    self._changed,
                    lambda: self._closed or self._has(keys),
                    deadline_s,
                    f"the rendezvous of lane {self.lane}",
                    self.peer,
                )
            except WaitExpired:
                reason = f"lane {self.lane}: the other end did not connect within {deadline_s:.0f} s"
                raise TransferError(reason) from None
            if not self._has(keys):
                raise TransferError(f"lane {self.lane}: {self._closed}")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def take(self, key: str) -> bytes:
        """Wait for a key, and remove it."""
        self.wait([key])
        return self._values.pop(key)

    def close(self, reason: str) -> None:
        """Fail open and later waits: the other end will not connect."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def serve_tcp_store(host: str, deadline: timedelta, members: int | None = None) -> TCPStore:
    """A TCPStore that other processes can join, on ``host`` and a port chosen by the kernel.

    By default torch's store listens on all interfaces. Raises OSError if ``host`` is not an address of this host.
    """
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
