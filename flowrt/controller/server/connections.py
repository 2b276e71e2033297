"""Connections: the check of a worker's hello, the connected workers, and messages that wait for the ledger."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from flowrt.controller.core import Core
from flowrt.controller.events import KernelAlive
from flowrt.controller.state.membership import Membership
from flowrt.errors import EXIT_DISMISSED, WaitExpired
from flowrt.ids import OBSERVER, WorkerId
from flowrt.net.link import ServerLink
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.messages import Heartbeat, Message
from flowrt.runtime.waits import BoundedElsewhere, wait_until

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 4.0
SHUTDOWN = BoundedElsewhere("SHUTDOWN_TIMEOUT_S")
PROBE_DELAY_S = 0.05
MAX_BATCH_DELAY_S = 0.00005
"""A message waits at most this long for other messages that can share its commit."""


class Connections:
    """The connected workers by name and connection. `send` delays a message until all earlier decisions are durable."""

    def __init__(
        self,
        link: ServerLink,
        needs_commit: Callable[[], bool],
        flush: Callable[[], None],
        process_disconnects: Callable[[], None],
    ) -> None:
        """Take over the unsent messages of ``link``.

        Args:
            link: the server's socket.
            needs_commit: returns True while a decision is not durable.
            flush: commits, then calls `send_queued`.
            process_disconnects: called when `take_disconnected` may have a result.
        """
        self._link = link
        link.on_unreachable(self._on_unreachable)
        self._needs_commit = needs_commit
        self._flush = flush
        self._process_disconnects = process_disconnects
        self._probe_timer: asyncio.TimerHandle | None = None
        self._name: dict[bytes, WorkerId] = {}
        self._peer: dict[WorkerId, bytes] = {}
        self._role: dict[WorkerId, str] = {}
        self._source: dict[WorkerId, tuple[int, str]] = {}  # descriptor and address of each connection
        self._cut: dict[WorkerId, float] = {}  # since when each worker seems to be cut off, on the monotonic clock
        self._outbox: list[tuple[WorkerId, bytes]] = []
        self._outbox_since_s = 0.0
        self._disconnected: dict[WorkerId, None] = {}  # connection found closed; some of their messages may be unread
        self._is_processing_scheduled = False
        self._changed = asyncio.Event()

    def add(self, peer: bytes, worker: WorkerId, role: str, source: int) -> None:
        """Add a worker whose hello came over the connection with the descriptor ``source``."""
        self._name[peer] = worker
        self._peer[worker] = peer
        self._role[worker] = role
        self._source[worker] = (source, self._link.filter.address(source))
        self._link.filter.on_joined(peer, source)

    def _kernel_alive(self, membership: Membership, now: float) -> Iterator[KernelAlive]:
        """An event for each silent worker whose process still answers at the TCP level: its interpreter is busy."""
        for worker, last_message_s in membership.quiet(now):
            at_s = now - self._link.filter.idle_s(*self._source.get(worker, (-1, "")))
            if at_s > last_message_s:
                yield KernelAlive(worker, at_s)

    def check_links(self, membership: Membership, now: float) -> Iterator[KernelAlive]:
        """Close connections of stopped processes and log cut links; returns an event for each worker that is alive but
        busy. ``now``: seconds on the controller's clock.
        """
        self._link.filter.close_stopped()
        self._log_cut_links()
        return self._kernel_alive(membership, now)

    def _log_cut_links(self) -> None:
        """Log each worker whose link was cut (no TCP traffic at all) or is back since the last call."""
        cut: dict[WorkerId, float] = {}
        for worker, source in self._source.items() if self._link.filter.has_cut_links else ():
            if (since_s := self._link.filter.cut_since_s(*source)) is not None:
                cut[worker] = since_s
        for worker in cut.keys() - self._cut.keys():
            log.warning(
                "nothing has come from %s for %.1f s: its link is cut or its machine is gone (disconnected after 17 s)",
                worker,
                monotonic() - cut[worker],
            )
        for worker in self._cut.keys() - cut.keys():
            if worker in self and self._link.filter.is_open(*self._source[worker]):
                log.info("the link of %s is back", worker)
        self._cut = cut

    def cut_off(self) -> dict[str, float]:
        """Workers whose link seems to be cut, and for how many seconds nothing has come from them."""
        return {worker: round(monotonic() - since_s, 1) for worker, since_s in self._cut.items() if worker in self}

    def name(self, peer: bytes) -> WorkerId | None:
        """The worker of a connection; None if there is none."""
        return self._name.get(peer)

    def role(self, worker: WorkerId) -> str:
        """The role of a connected worker. Raises KeyError for another worker."""
        return self._role[worker]

    def __contains__(self, worker: str) -> bool:
        return worker in self._peer

    def workers(self, role: str = "") -> list[WorkerId]:
        """The connected workers of one role, or of all roles."""
        return [worker for worker in self._peer if self._role[worker] == role] if role else [*self._peer]

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker, if it is connected."""
        peer = self._peer.pop(worker, None)
        self._source.pop(worker, None)
        self._role.pop(worker, None)
        self._disconnected.pop(worker, None)
        if peer is not None:
            self._name.pop(peer, None)
        self._changed.set()

    async def shutdown(self, stop: Message, excluded_role: str) -> None:
        """Send ``stop`` to all workers; return when all but those of the excluded role have left, or after
        `SHUTDOWN_TIMEOUT_S`.
        """
        for worker in self.workers():
            self.send_now(worker, stop)
        try:
            await wait_until(self._wait_left(excluded_role), SHUTDOWN_TIMEOUT_S, "all workers to leave", "the workers")
        except WaitExpired:
            log.warning("ended although these workers have not left: %s", sorted(self.workers()))

    async def _wait_left(self, excluded_role: str) -> None:
        while len(self.workers()) > len(self.workers(excluded_role)):
            self._changed.clear()
            await wait_until(self._changed.wait(), SHUTDOWN, "the next worker to leave", "the workers")

    def take_disconnected(self, immediately: bool) -> Sequence[WorkerId]:
        """Remove and return the workers that have not sent a Leave and whose connections were found closed.

        Their last messages are handled first: while some may be unread, no worker is returned and
        ``process_disconnects`` is called again later, unless the result is needed ``immediately``.
        """
        if not self._disconnected:
            return ()
        if not (immediately or self._link.drain()):
            self._schedule_processing()
            return ()
        disconnected = list(self._disconnected)
        for worker in disconnected:
            log.warning("%s is gone: its connection is closed", worker)
            self.remove(worker)
        return disconnected

    def _schedule_processing(self) -> None:
        if not self._is_processing_scheduled:
            self._is_processing_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_processing)

    def _run_processing(self) -> None:
        self._is_processing_scheduled = False
        self._process_disconnects()

    def on_connection_closed(self) -> None:
        """Probe all workers after `PROBE_DELAY_S`, to find those whose connection has closed; one probe for several."""
        if self._probe_timer is None:
            self._probe_timer = asyncio.get_running_loop().call_later(PROBE_DELAY_S, self._probe_all)

    def _probe_all(self) -> None:
        self._probe_timer = None
        for worker in self.workers():
            self.send_now(worker, Heartbeat())
        self._process_disconnects()

    def close(self) -> None:
        """Cancel a pending probe."""
        if self._probe_timer is not None:
            self._probe_timer.cancel()

    # ---- out

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send when all earlier decisions are durable: a crash must not undo a decision that a worker knows of."""
        self.send_encoded(worker, encode(message))

    def send_encoded(self, worker: WorkerId, message: bytes) -> None:
        """As `send`, for an encoded message."""
        if not (self._outbox or self._needs_commit()):
            self._post(worker, message)
            self._link.flush()
            return
        if not self._outbox:
            # After all messages that wait to be read, so that their decisions share a commit.
            asyncio.get_running_loop().call_soon(self._flush)
            self._outbox_since_s = monotonic()
        self._outbox.append((worker, message))

    def flush_if_late(self) -> None:
        """Flush if a message has waited for `MAX_BATCH_DELAY_S`; called before each message is handled."""
        if self._outbox and monotonic() > self._outbox_since_s + MAX_BATCH_DELAY_S:
            self._flush()

    def send_queued(self) -> None:
        """Send the messages that waited for the commit."""
        outbox = self._outbox
        self._outbox = []
        for worker, message in outbox:
            self._post(worker, message)
        self._link.flush()

    def _on_unreachable(self, peer: bytes) -> None:
        """Note that a posted message could not be delivered: the connection is closed."""
        if (worker := self._name.get(peer)) is not None:
            self._disconnected[worker] = None
            self._schedule_processing()

    def _post(self, worker: WorkerId, message: bytes) -> None:
        if (peer := self._peer.get(worker)) is not None and worker not in self._disconnected:
            self._link.post_encoded(peer, message)

    def send_now(self, worker: WorkerId, message: Message) -> None:
        """Send without waiting for the ledger, and note whether the connection is closed."""
        peer = self._peer.get(worker)
        if peer is not None and worker not in self._disconnected and not self._link.send(peer, message):
            self._disconnected[worker] = None


MAX_NAME_CHARS = 200
MAX_HOST_CHARS = 1000
HANDLED_BY_SERVER = frozenset((m.Hello, m.Heartbeat, m.Report, m.SampleRecords, m.Follow, m.Leave))
"""Messages that the server handles, alone or before the core does."""
NOT_CONNECTED = m.Stop(
    "this worker is not in the run, or was removed from it and its leases given back; connect again",
    EXIT_DISMISSED,
)


def rejection_reason(hello: m.Hello, core: Core, is_taken: bool) -> str:
    """Why this worker cannot join; empty if it can. ``is_taken``: its name or connection is in use."""
    if hello.protocol != m.PROTOCOL:
        return f"the worker speaks protocol {hello.protocol}, the controller {m.PROTOCOL}; install the same flowrt"
    if not all(0 < len(name) <= MAX_NAME_CHARS and name.isprintable() for name in (hello.worker, hello.role)):
        return f"a name or role is empty, not printable or over {MAX_NAME_CHARS} characters; choose another"
    if len(hello.host) > MAX_HOST_CHARS:
        return f"the name of its host has {len(hello.host)} characters, over the limit of {MAX_HOST_CHARS}"
    if is_taken:
        return f"a worker named {hello.worker} is here already; give each worker its own --name"
    if core.ended is not None:
        return f"the run has ended: {core.ended.reason}"
    if hello.term and hello.worker not in core.state.recovery.awaited:
        return f"{hello.worker} counts as gone, and its samples were generated again or leased to others; restart it"
    return "" if hello.role == OBSERVER else core.state.lanes.fault(hello.lanes)


def rejection(hello: m.Hello, core: Core, reason: str, is_taken: bool) -> m.Message:
    """The answer to a worker that cannot join for this reason; ``is_taken``: its name is in use."""
    if hello.term and core.ended is not None:
        return m.Stop(core.ended.reason, core.ended.code)
    if is_taken and not hello.term and hello.protocol == m.PROTOCOL:
        return m.Rejected(m.NAME_TAKEN, reason)
    return m.Rejected(m.PERMANENT if hello.term and not core.state.recovery.is_active else 0, reason)


def dismissal(reason: str) -> m.Stop:
    """The message to a dismissed worker: the worker exits with `EXIT_DISMISSED`, and its supervisor may restart it."""
    return m.Stop(f"you were dismissed: {reason}; your leases were given back", EXIT_DISMISSED)
