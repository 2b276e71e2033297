"""Who is connected under which name, and what is still to be said to whom."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from flowrt.controller.events import Alive
from flowrt.controller.roster import Roster
from flowrt.errors import WaitExpired
from flowrt.ids import WorkerId
from flowrt.waiting import Guard, until
from flowrt.wire.link import ServerLink
from flowrt.wire.messages import Heartbeat, Message

log = logging.getLogger(__name__)
FAREWELL_S = 4.0
FAREWELL = Guard("the deadline of the farewell")
ROLL_CALL_S = 0.05
CUT = "nothing has come from %s for %.1f s: its link is cut or its machine is gone (it is given up after 17 s)"
LATE_S = 0.00005
"""What is to be said waits no longer than this for more that could be written down with it."""


class Peers:
    """Names of connections. What is sent waits until everything that was decided before it is written down."""

    def __init__(
        self, link: ServerLink, is_behind: Callable[[], bool], flush: Callable[[], None], see_off: Callable[[], None]
    ) -> None:
        """``is_behind`` says whether something is not written down; ``flush`` does that, then calls `send_waiting`.

        ``see_off`` is called when somebody may have been found gone (`left`) whom nobody had spoken to.
        """
        self._link = link
        link.unsent = self._unreachable
        self._is_behind = is_behind
        self._flush = flush
        self._see_off = see_off
        self._roll_call: asyncio.TimerHandle | None = None
        self._name: dict[bytes, WorkerId] = {}
        self._peer: dict[WorkerId, bytes] = {}
        self._role: dict[WorkerId, str] = {}
        self._source: dict[WorkerId, tuple[int, str]] = {}  # connections: their descriptors and addresses
        self._cut: dict[WorkerId, float] = {}  # nothing comes from them, since when
        self._outbox: list[tuple[WorkerId, Message]] = []
        self._outbox_since_s = 0.0
        self._left: dict[WorkerId, None] = {}  # found gone; perhaps not all that they have said has been read
        self._sees_off = False
        self._changed = asyncio.Event()  # somebody has left

    def add(self, peer: bytes, worker: WorkerId, role: str, source: int) -> None:
        """It has said who it is, over the connection with this descriptor."""
        self._name[peer], self._peer[worker], self._role[worker] = worker, peer, role
        self._source[worker] = source, self._link.gate.address(source)

    def _breathing(self, roster: Roster, now: float) -> Iterator[Alive]:
        """Those that have said nothing for a while, though their processes answer: their interpreters are busy."""
        for worker, heard_s in roster.quiet(now):
            at_s = now - self._link.gate.quiet_s(*self._source.get(worker, (-1, "")))
            if at_s > heard_s:
                yield Alive(worker, at_s)

    def look_at_links(self, roster: Roster, now: float) -> Iterator[Alive]:
        """End the connections of stopped processes, say whose links are cut; returns who lives and is busy."""
        self._link.gate.end_stopped()
        self._say_who_is_cut_off()
        return self._breathing(roster, now)

    def _say_who_is_cut_off(self) -> None:
        """Of whom nothing comes any more, not even from their kernels, and of whom it does again."""
        cut: dict[WorkerId, float] = {}
        for worker, source in self._source.items() if self._link.gate.has_cuts else ():
            if (since_s := self._link.gate.cut_since_s(*source)) is not None:
                cut[worker] = since_s
        for worker in cut.keys() - self._cut.keys():
            log.warning(CUT, worker, monotonic() - cut[worker])
        for worker in self._cut.keys() - cut.keys():
            if worker in self and self._link.gate.is_open(*self._source[worker]):
                log.info("%s is heard again", worker)
        self._cut = cut

    def cut_off(self) -> dict[str, float]:
        """For how many seconds nothing has come from those who seem to be cut off."""
        return {worker: round(monotonic() - since_s, 1) for worker, since_s in self._cut.items() if worker in self}

    def name(self, peer: bytes) -> WorkerId | None:
        return self._name.get(peer)

    def role(self, worker: WorkerId) -> str:
        return self._role[worker]

    def __contains__(self, worker: str) -> bool:
        return worker in self._peer

    def all(self, role: str = "") -> list[WorkerId]:
        """Those of one role, or of every role."""
        return [worker for worker in self._peer if self._role[worker] == role] if role else [*self._peer]

    def forget(self, worker: WorkerId) -> None:
        peer = self._peer.pop(worker, None)
        self._source.pop(worker, None)
        self._role.pop(worker, None)
        self._left.pop(worker, None)
        if peer is not None:
            self._name.pop(peer, None)
        self._changed.set()

    async def farewell(self, stop: Message, but: str) -> None:
        """Tell everybody to stop, and return when nobody is left, but for those of one role, or it took too long."""
        for worker in self.all():
            self.send_now(worker, stop)
        try:
            await until(self._gone(but), FAREWELL_S, "the goodbye of all workers", "the workers")
        except WaitExpired:
            log.warning("left without a goodbye from %s", sorted(self.all()))

    async def _gone(self, but: str) -> None:
        while len(self.all()) > len(self.all(but)):
            self._changed.clear()
            await until(self._changed.wait(), FAREWELL, "the next goodbye", "the workers")

    def left(self, at_once: bool) -> Sequence[WorkerId]:
        """Those whose connections were found closed and who have not said goodbye; they are forgotten.

        Their last words come first: where those may be waiting, this is asked again (``see_off``), unless it has to be
        known ``at_once``.
        """
        if not self._left:
            return ()
        if not (at_once or self._link.drain()):
            self._see_off_soon()
            return ()
        left = list(self._left)
        for worker in left:
            log.warning("%s is gone: its connection is closed", worker)
            self.forget(worker)
        return left

    def _see_off_soon(self) -> None:
        if not self._sees_off:
            self._sees_off = True
            asyncio.get_running_loop().call_soon(self._see_off_later)

    def _see_off_later(self) -> None:
        self._sees_off = False
        self._see_off()

    def somebody_left(self) -> None:
        """A connection has closed: find out whose, at once but not for each of many that leave together."""
        if self._roll_call is None:
            self._roll_call = asyncio.get_running_loop().call_later(ROLL_CALL_S, self._call_roll)

    def _call_roll(self) -> None:
        self._roll_call = None
        for worker in self.all():
            self.send_now(worker, Heartbeat())
        self._see_off()

    def close(self) -> None:
        if self._roll_call is not None:
            self._roll_call.cancel()

    # ---- out

    def send(self, worker: WorkerId, message: Message) -> None:
        """Say it as soon as everything before it is durable: nobody is told what a crash could take back."""
        if not (self._outbox or self._is_behind()):
            self._post(worker, message)
            self._link.flush()
            return
        if not self._outbox:
            # After all that is waiting to be read: what came together is written together.
            asyncio.get_running_loop().call_soon(self._flush)
            self._outbox_since_s = monotonic()
        self._outbox.append((worker, message))

    def hurry(self) -> None:
        """Between one message and the next: long work must not hold up the answers to what came before it."""
        if self._outbox and monotonic() > self._outbox_since_s + LATE_S:
            self._flush()

    def send_waiting(self) -> None:
        """Everything is written down: say what has waited for that."""
        outbox, self._outbox = self._outbox, []
        for worker, message in outbox:
            self._post(worker, message)
        self._link.flush()

    def _unreachable(self, peer: bytes) -> None:
        """It was posted something, and is gone."""
        if (worker := self._name.get(peer)) is not None:
            self._left[worker] = None
            self._see_off_soon()

    def _post(self, worker: WorkerId, message: Message) -> None:
        if (peer := self._peer.get(worker)) is not None and worker not in self._left:
            self._link.post(peer, message)

    def send_now(self, worker: WorkerId, message: Message) -> None:
        """Say it at once, whatever the ledger knows."""
        peer = self._peer.get(worker)
        if peer is not None and worker not in self._left and not self._link.send(peer, message):
            self._left[worker] = None
