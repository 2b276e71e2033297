"""The rendezvous of a lane's two ends, carried by the controller's own channel.

torch.distributed asks a Store for a few small keys when a group is made. Ours sends each key to the other end as a
`Signal` through the controller, so a lane needs no store server, no fixed port and no world group, and whoever the
controller let in can reach whoever else it let in.
"""

import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from flowrt.errors import ConfigError, TransferError, WaitExpired
from flowrt.waiting import until_true
from flowrt.wire.records import MAX_SIGNAL_BYTES

SENDER_RANK = 0
RECEIVER_RANK = 1


class SignalStore(Store):
    """A store of one lane incarnation, shared by its two ends through ``post``.

    Called from the lane's own thread by torch; ``deliver`` is called by the event loop.
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
        """The other end has set a key."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if len(data) > MAX_SIGNAL_BYTES:
            raise TransferError(
                f"lane {self.lane}: its library wants to tell the other end {len(data)} bytes as {key!r}, and at most "
                f"{MAX_SIGNAL_BYTES} can be; choose other lanes with controller.lanes"
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
                until_true(
                    self._changed,
                    lambda: self._closed or self._has(keys),
                    deadline_s,
                    f"the rendezvous of lane {self.lane}",
                    self.peer,
                )
            except WaitExpired:
                reason = f"lane {self.lane}: the other end did not come within {deadline_s:.0f} s"
                raise TransferError(reason) from None
            if not self._has(keys):
                raise TransferError(f"lane {self.lane}: {self._closed}")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return self._has(keys)

    def take(self, key: str) -> bytes:
        """Wait for a key and forget it."""
        self.wait([key])
        return self._values.pop(key)

    def close(self, reason: str) -> None:
        """The other end will not come: whoever waits for it is told."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def local_address(controller: str) -> str:
    """This host's address on the route to ``tcp://HOST:PORT``: the one by which peers can reach it.

    Raises ConfigError when there is no such route, or no such host.
    """
    host, _, port = controller.removeprefix("tcp://").rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only makes the kernel choose a route.
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"host {socket.gethostname()!r} has no way to the controller at {controller}: {error.strerror}; is the "
            "address right (controller.host), and is there a route to its network?"
        ) from error
