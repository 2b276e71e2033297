"""The asyncio shell around the mind: sockets, clock, disk. It decides nothing."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flowrt.clock import Clock, MonotonicClock, SteadyClock
from flowrt.controller.books import Books
from flowrt.controller.core import SOURCE, Core
from flowrt.controller.events import Command, Dismiss, End, Event, Gone, Joined, Persist, Said, Send, Suspend, Tick
from flowrt.controller.journal import Journal
from flowrt.controller.ledger import Ledger, LedgerBusy
from flowrt.controller.peers import FAREWELL_S, Peers
from flowrt.controller.reception import NOT_FOR_THE_MIND_ALONE, NOT_IN, dismissal, refusal, turned_away
from flowrt.controller.status import status
from flowrt.controller.waitgraph import OBSERVER
from flowrt.errors import EXIT_FAILED, EXIT_OK, EXIT_STALLED, MISTAKES, FlowError, RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.waiting import Guard, first_of, pause, until
from flowrt.wire import messages as m
from flowrt.wire.gate import Complaints
from flowrt.wire.keys import ControllerKeys
from flowrt.wire.link import ServerLink
from flowrt.wire.records import Column, Position

log = logging.getLogger(__name__)
TICK_S = 0.5
LOCKED_S = 30.0  # another process may keep the ledger locked; meanwhile the run goes on, its records wait
MOST_LINES = 200
STALLED = Guard("controller.stall_s")


class Server:
    """One run's controller. Workers find it at ``address``."""

    def __init__(
        self,
        core: Core,
        columns: tuple[Column, ...],
        config: str,
        run_dir: Path,
        heartbeat_s: float,
        wait_s: float,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        keys: ControllerKeys | None = None,
    ) -> None:
        self._core = core
        self._clock = SteadyClock(clock or MonotonicClock())
        self.ledger = ledger or Ledger(run_dir / "ledger.sqlite")
        times = (heartbeat_s, wait_s, core.settings.return_s, core.settings.lane_s, core.settings.lane_mb_per_s)
        known = (core.settings.store_bytes, columns, core.renewable, config)
        self._welcome = m.Welcome(self.ledger.term, *times, *known, Position())
        self.journal = Journal(run_dir, self._clock.now(), core.settings.position, self.ledger.began)
        self._books = Books(self.ledger, self.journal)
        self._unsaved: list[tuple[WorkerId, int]] = []  # who waits for what was done so far to be on disk
        self._link = ServerLink(self._receive, self._garbled, lambda: self._peers.somebody_left(), keys)
        self._peers = Peers(self._link, self.ledger.is_behind, self._flush, self._see_off)
        self._ended = asyncio.Event()
        self._complaints = Complaints()

    @property
    def refused_messages(self) -> int:
        """Messages that were malformed, illegal, or of somebody who is not in."""
        return self._complaints.count

    @property
    def refused_connections(self) -> int:
        """Connections whose handshake failed: with keys, everybody who does not have the right ones."""
        return self._link.gate.refused.count

    @property
    def ended(self) -> End | None:
        """How the run ended; None while it goes on."""
        return self._core.ended

    def bind(self, address: str) -> str:
        """Listen; returns the address with its real port. Raises ConfigError when it cannot be listened on."""
        return self._link.bind(address)

    async def run(self, when_over: Callable[[], None] = lambda: None) -> End:
        """Serve until the run ends and all have left (or had time to); ``when_over`` is called before they hear."""
        ticker = asyncio.create_task(self._tick())
        over = asyncio.create_task(until(self._ended.wait(), STALLED, "the end of the run", "the workers"))
        await first_of({ticker, over}, STALLED, "the end of the run, or of its deadlines", "the workers")
        if ticker.done():  # without it no deadline would ever pass, and nobody would know
            self._broken("a tick", ticker.exception())
        ticker.cancel()
        over.cancel()
        ended = self._core.ended
        assert ended is not None
        self._status()
        self._flush()
        self._books.tidy(ended=True)
        when_over()
        await self._peers.farewell(m.Stop(ended.reason, ended.code), OBSERVER)
        while not self._write(FAREWELL_S):
            await pause(TICK_S)
        self._books.tidy(ended=True)
        self.journal.close()
        self._peers.close()
        self._link.close()
        return self._core.ended or ended

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve in the background for the length of a block; leaving it ends the run."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self.end("the block that ran the controller has ended", EXIT_OK)
            await task
            self.ledger.close()

    def summary(self, bound: int) -> dict[str, Any]:
        """The numbers of the run so far, the ledger's account included."""
        account = self.ledger.account((one.epoch, one.prompt) for one in self._core.samples.board.groups.values())
        return self.journal.summary(account, bound, self._core.samples.retreat.dropped, self._clock.now())

    async def _tick(self) -> None:
        while True:
            await pause(TICK_S)
            for alive in self._peers.look_at_links(self._core.roster, self._clock.now()):
                self._handle(alive)
            self._handle(Tick())
            self._link.gate.look()
            self._status()
            self._flush()
            self._books.tidy()

    # ---- in

    def _receive(self, peer: bytes, message: m.Message) -> None:
        self._peers.hurry()
        if (worker := self._peers.name(peer)) is not None and not isinstance(message, NOT_FOR_THE_MIND_ALONE):
            self._handle(Said(worker, message))
        elif isinstance(message, m.Hello):
            self._greet(peer, message, self._link.source())
        elif worker is None:
            self._complain(peer, f"{type(message).__name__} from somebody who did not say hello")
            # Perhaps a worker that was away for so long that it counts as gone: it must not wait for an answer.
            self._answer_stranger(peer, NOT_IN)
        else:
            if isinstance(message, m.Report):
                self._books.report(worker, self._peers.role(worker), message, self._core.samples.window.step)
            self._handle(Said(worker, message))
            if isinstance(message, m.Bye):
                self._peers.forget(worker)

    def _garbled(self, peer: bytes, reason: str) -> None:
        """Malformed bytes cost the sender its connection."""
        self._complain(peer, reason)
        self._link.hang_up(peer)
        worker = self._peers.name(peer)
        if worker is not None:
            self._peers.forget(worker)
            self._handle(Gone(worker, f"it sent what is no message: {reason}"))

    def _complain(self, peer: bytes, reason: str) -> None:
        self._complaints.say("refused a message of %s: %s", self._peers.name(peer) or peer.hex(), reason)

    def _answer_stranger(self, peer: bytes, answer: m.Message) -> None:
        if self._link.gate.bears(peer):
            self._link.send(peer, answer)
        else:
            self._link.hang_up(peer)

    def _greet(self, peer: bytes, hello: m.Hello, source: int) -> None:
        if self._peers.name(peer) == hello.worker:
            return  # it had to wait, and has said hello again meanwhile
        if hello.worker in self._peers:
            # Perhaps it is gone, and this is who replaces it: a send shows it.
            self._peers.send_now(WorkerId(hello.worker), m.Heartbeat())
            self._see_off(at_once=True)
        known = self._peers.name(peer)
        fault = refusal(hello, self._core, hello.worker in self._peers or known is not None)
        if fault:
            if known is not None:
                self._peers.send(known, m.Refused(0, fault))
            else:
                self._answer_stranger(peer, turned_away(hello, self._core, fault))
            return
        worker = WorkerId(hello.worker)
        try:
            passed = self.ledger.passed() if hello.role == SOURCE else ()
        except LedgerBusy as busy:
            log.info("%s is let in when the ledger can be asked again: %s", worker, busy)
            asyncio.get_running_loop().call_later(TICK_S, self._greet, peer, hello, source)
            return
        except FlowError as error:
            self.end(str(error))
            return
        self._peers.add(peer, worker, hello.role, source)
        log.info("%s joined (%s on %r, pid %d)", worker, hello.role, hello.host, hello.pid)
        numbers = tuple(self.journal.numbers.items())
        position = dataclasses.replace(self._core.settings.position, passed=passed, numbers=numbers)
        self._peers.send(worker, dataclasses.replace(self._welcome, position=position))
        self._handle(Joined(worker, hello.role, hello.host, hello.lanes, hello.term))

    def _handle(self, event: Event) -> None:
        if self._core.ended is not None and not isinstance(event, Said):
            return
        now = self._clock.now()
        try:
            commands = self._core.handle(event, now)
        except RemoteProtocolError as error:
            self._complaints.say("refused: %s", error)
            if isinstance(event, Said):
                self.end(f"{event.worker}: {error}")
            return
        except (*MISTAKES, FlowError) as error:
            self._broken(type(event).__name__, error)
            return
        for command in commands:
            if type(command) is Send:  # nearly all of them
                self._peers.send(command.worker, command.message)
            else:
                self._execute(command, now)
        self._see_off()

    def _see_off(self, at_once: bool = False) -> None:
        """Some were found gone when they were spoken to; what was decided while they were there has been done."""
        for worker in self._peers.left(at_once):
            self._handle(Gone(worker, "its connection is closed; see its log"))

    # ---- out

    def _execute(self, command: Command, now: float) -> None:
        match command:
            case Dismiss(worker, reason):
                log.warning("%s is dismissed: %s", worker, reason)
                self._peers.send_now(worker, dismissal(reason))
                self._peers.forget(worker)
            case Persist(worker, request):
                self._unsaved.append((worker, request))
                self._write(LOCKED_S)
            case End(reason, code):
                log.info("the run ends: %s", reason)
                if code == EXIT_STALLED:
                    for sentence in self._core.wait_graph(now, self._welcome.wait_s).sentences(MOST_LINES):
                        log.error("stalled: %s", sentence)
                self._ended.set()
            case _:
                self._books.enter(command, now)

    def _flush(self) -> None:
        if self._write(LOCKED_S):  # else at the next tick
            self._peers.send_waiting()
            self._see_off()

    def _write(self, patience_s: float) -> bool:
        """Write the books, and say so to who waits for it; True when they are, or never will be: then the run fails."""
        try:
            if not self._books.write(self._clock.now(), patience_s, lasting=bool(self._unsaved)):
                return False
        except (FlowError, OSError) as error:
            if self._core.ended is None or self._core.ended.code == EXIT_OK:
                log.error("%s", error)
                self._core.ended = End(str(error), EXIT_FAILED)
                self._ended.set()
            return True
        for worker, request in self._unsaved:
            self._peers.send(worker, m.Committed(request, (), ""))
        self._unsaved.clear()
        return True

    def end(self, reason: str, code: int = EXIT_FAILED) -> None:
        """End the run from outside the mind: a signal, a full disk, a worker that breaks the rules."""
        if self._core.ended is None:
            self._core.ended = End(reason, code)
            self._ended.set()

    def suspend(self, order: Suspend) -> None:
        """End the run from outside, as `end` does, but save first what it has trained."""
        self._handle(order)
        self._flush()

    def _broken(self, what: str, error: BaseException | None) -> None:
        """A mistake of ours: what the mind holds is not to be trusted any more, and what is on disk is."""
        log.error("the controller has failed", exc_info=error)
        self.end(f"the controller failed at {what} ({error!r}): that is a mistake in flowrt, see its log")

    # ---- watching

    def _status(self) -> None:
        if observers := self._peers.all(OBSERVER):
            text = json.dumps(self.status())
            for worker in observers:
                self._peers.send(worker, m.Status(text))

    def status(self) -> dict[str, Any]:
        """Where the run is, who waits for what since when."""
        told = self.journal.latest, self.journal.numbers, self._peers.cut_off()
        return status(self._core, self._clock.now(), self._welcome.wait_s, *told)
