"""Server: connects the core to sockets, the clock and the disk.

Each message and each tick becomes an event; the core's commands are executed in order (`Server._handle`). The loop of a
run, as pseudo-code: `flowrt.controller.core`.
"""

import asyncio
import dataclasses
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from flowrt.controller.core import Core
from flowrt.controller.diagnostics.health import Health
from flowrt.controller.diagnostics.status import brief_text, followed, status
from flowrt.controller.events import (
    Command,
    ControllerStalled,
    Dismiss,
    EndRun,
    EvaluationClosed,
    Event,
    LogEvent,
    MessageReceived,
    Persist,
    PreemptRun,
    Send,
    Shutdown,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.server.connections import (
    HANDLED_BY_SERVER,
    NOT_CONNECTED,
    SHUTDOWN_TIMEOUT_S,
    Connections,
    dismissal,
    rejection,
    rejection_reason,
)
from flowrt.controller.server.guard_command import GuardCommand
from flowrt.controller.storage.accounting import Accounting
from flowrt.controller.storage.event_log import END_TEXT, EventLog
from flowrt.controller.storage.journals import delete_journals, find_outdated, kept_summary
from flowrt.controller.storage.ledger import Ledger, LedgerBusy
from flowrt.controller.storage.recording_writer import EventRecording
from flowrt.controller.storage.run_files import RunFiles
from flowrt.controller.storage.run_metrics import RunMetrics
from flowrt.controller.storage.sample_store import SampleStore
from flowrt.controller.storage.time_files import TimeFilesStart
from flowrt.controller.storage.timeline_file import DEFAULT_MAX_BYTES
from flowrt.errors import EXIT_FAILED, EXIT_OK, EXIT_STALLED, PROGRAMMING_ERRORS, FlowError, LocalProtocolError
from flowrt.ids import OBSERVER, SOURCE, WorkerId
from flowrt.net.connection_filter import RateLimitedLog
from flowrt.net.curve_keys import ControllerKeys
from flowrt.net.link import ServerLink
from flowrt.protocol import messages as m
from flowrt.protocol.codec import encode
from flowrt.protocol.journals import journal_of
from flowrt.protocol.messages import Passed, Position
from flowrt.runtime.clock import Clock, MonotonicClock, OwnAbsence, SteadyClock
from flowrt.runtime.host import clock_name
from flowrt.runtime.waits import BoundedElsewhere, pause, wait_any, wait_until

log = logging.getLogger(__name__)
TICK_S = 0.5
HEALTH_S = 5.0
LOCKED_TIMEOUT_S = 30.0  # while another process has the ledger locked, the run continues and its records are buffered
MAX_GRAPH_LINES = 200
MAX_FOLLOWED = 4096
MAX_UNJOINED, MAX_UNJOINED_CHARS = 8, 1000
"""Workers that one observer may follow."""
MAX_DISMISSED = 10_000
"""Dismissed workers whose reason is kept, in case they reconnect."""
STALLED = BoundedElsewhere("controller.no_progress_timeout_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observability:
    """Settings of what a controller stores of a run beyond ledger, metrics, events and attribution."""

    samples: SampleStore | None = None
    """Store of the samples that workers send, before its `begin`; None: samples are ignored."""
    recording: EventRecording | None = None
    """Recording of all events for replay, before its `begin`; None: events are not recorded."""
    timeline_bytes: int = DEFAULT_MAX_BYTES
    """Maximum size of the timeline on disk."""
    guard_command: str = ""
    """Command of the user that is run for each guard that fires; empty: none."""


DEFAULT_OBSERVABILITY = Observability()


class Server:
    """The controller of one run."""

    def __init__(
        self,
        core: Core,
        config: str,
        run_dir: Path,
        heartbeat_s: float,
        request_timeout_s: float,
        clock: Clock | None = None,
        ledger: Ledger | None = None,
        keys: ControllerKeys | None = None,
        observability: Observability = DEFAULT_OBSERVABILITY,
    ) -> None:
        """Open the files of the run; `bind` opens the socket.

        Args:
            core: the state machine of the run.
            config: the run's resolved configuration as TOML, for the workers.
            run_dir: the run directory.
            heartbeat_s: seconds between heartbeats of a worker.
            request_timeout_s: seconds that a worker waits for one answer.
            clock: the controller's clock; None: the monotonic clock of this host.
            ledger: the run's ledger; None: that of ``run_dir`` is opened or created.
            keys: CURVE keys; None: connections are not encrypted.
            observability: what else is stored of the run.

        Raises FlowError if the ledger cannot be opened or lacks steps.
        """
        self._core = core
        self._recording = observability.recording
        self._samples = observability.samples
        self._clock = SteadyClock(clock or MonotonicClock())
        self.ledger = ledger or Ledger(run_dir / "ledger.sqlite")
        self._welcome = m.Welcome(
            term=self.ledger.term,
            heartbeat_s=heartbeat_s,
            request_timeout_s=request_timeout_s,
            reconnect_timeout_s=core.settings.reconnect_timeout_s,
            transfer_idle_timeout_s=core.settings.transfer_idle_timeout_s,
            min_transfer_mb_per_s=core.settings.min_transfer_mb_per_s,
            store_bytes=core.settings.store_bytes,
            columns=core.env.flow.columns,
            renewable=core.renewable,
            config=config,
            position=Position(),
            clock=clock_name() if clock is None or isinstance(clock, MonotonicClock) else "",
            journals=core.settings.journals,
        )
        position = core.settings.position
        lines = self.ledger.step_lines(position.step)
        self.metrics = RunMetrics(
            run_dir=run_dir,
            start_s=self._clock.now(),
            position=position,
            resumed_from=self.ledger.resumed_from,
            lines=lines,
            evaluations=self.ledger.evaluation_lines(),
        )
        self.events = EventLog(run_dir, self.metrics.start_s, self.ledger.term)
        now = self._clock.now()
        start = TimeFilesStart(
            run_dir=str(run_dir),
            now=now,
            origin_s=self.metrics.start_s,
            step=position.step,
            heartbeat_s=heartbeat_s,
            timeline_bytes=observability.timeline_bytes,
        )
        self.times = Accounting(start)
        self._files = RunFiles(
            ledger=self.ledger,
            metrics=self.metrics,
            events=self.events,
            times=self.times,
            samples=self._samples,
        )
        self._persist_requests: list[tuple[WorkerId, int]] = []  # answered when all commands so far are on disk
        self._awaiting_welcome: list[WorkerId] = []
        """Connected sources that are sent the run's position when recovery is over."""
        self._absence = OwnAbsence(TICK_S)
        self._followed: dict[WorkerId, m.Follow] = {}
        """By observer: the workers that each of its statuses names."""
        self._dismissed: dict[str, str] = {}
        """Why workers were dismissed: a connection that closes under load may lose the message that says so."""
        self._link = ServerLink(
            self._receive, self._on_malformed, lambda: self._connections.on_connection_closed(), keys
        )
        self._connections = Connections(
            link=self._link,
            needs_commit=self.ledger.needs_commit,
            flush=self._flush,
            process_disconnects=self._process_disconnects,
        )
        self._ended = asyncio.Event()
        self._end_s: float | None = None
        """When the attribution ended; None before."""
        self._refused = RateLimitedLog()
        self._guard_command = GuardCommand(observability.guard_command, run_dir, self.warn)
        self._run_dir = run_dir
        self._health = Health()
        self._health_watch: asyncio.Task[None] | None = None
        self._checkpoint = core.settings.position.step
        self._cleaning: asyncio.Task[None] | None = None  # of journals
        if self._samples is not None:
            self._samples.begin(self.ledger.run_attempt, self.ledger.resumed_from or 0)
        self._log_start()

    def close(self) -> None:
        """Close the files and sockets of a run that cannot start."""
        if self._samples is not None:
            self._samples.close()
        self.metrics.close()
        self.events.close()
        self.times.close(self._clock.now(), [], [])
        self._link.close()
        self.ledger.close()

    @property
    def refused_messages(self) -> int:
        """Number of messages that were malformed or came from an unknown peer."""
        return self._refused.count

    @property
    def refused_connections(self) -> int:
        """Number of connections whose handshake failed; with keys set, including connections without a valid key."""
        return self._link.filter.refused.count

    @property
    def ended(self) -> EndRun | None:
        """How the run ended; None until then."""
        return self._core.ended

    def watch_health(self) -> None:
        """Start to watch for unusual waits and a disk that is nearly full, until the run ends."""
        self._health_watch = asyncio.create_task(self._watch_health())

    def bind(self, address: str) -> str:
        """Listen; returns the address with its actual port. Raises ConfigError if the address cannot be used."""
        return self._link.bind(address)

    async def run(self, on_end: Callable[[], None] = lambda: None) -> EndRun:
        """Serve until the run has ended and all workers have left, or `SHUTDOWN_TIMEOUT_S` has passed since its end.

        ``on_end`` is called before the workers are told to stop. Returns how the run ended. Closes all files but the
        ledger.
        """
        if self._recording is not None:
            self._recording.begin(self.metrics.start_s)
        ticker = asyncio.create_task(self._tick())
        over = asyncio.create_task(wait_until(self._ended.wait(), STALLED, "the end of the run", "the workers"))
        await wait_any({ticker, over}, STALLED, "the end of the run, or of its deadlines", "the workers")
        if ticker.done():  # without ticks no deadline would ever expire
            self._fail("a tick", ticker.exception())
        ticker.cancel()
        over.cancel()
        ended = self._core.ended
        assert ended is not None
        self._send_status()
        self._flush()
        self._files.compact(run_ended=True)
        on_end()
        await self._connections.shutdown(m.Stop(ended.reason, ended.code), OBSERVER)
        while not self._commit(SHUTDOWN_TIMEOUT_S):
            await pause(TICK_S)
        self._files.compact(run_ended=True)
        self._files.write_samples(self._core.state.window.step, self._clock.now(), run_ended=True)
        if self._recording is not None:
            self._recording.close()
        self.metrics.close()
        if self._health_watch is not None:
            self._health_watch.cancel()
        await self._guard_command.finish()
        self.events.close()
        now = self._end_s = self._clock.now()
        self.times.close(now, self._core.waits.take(), self._core.waits.open_waits(now))
        self._connections.close()
        self._link.close()
        return self._core.ended or ended

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve in the background during a ``with`` block; leaving the block ends the run."""
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            self.end("the block that ran the controller has ended", EXIT_OK)
            await task
            self.ledger.close()

    def summary(self, bound: int) -> dict[str, Any]:
        """The numbers of summary.json for the run so far; ``bound`` is the maximum staleness in versions."""
        account = self.ledger.account((group.epoch, group.prompt) for group in self._core.state.table.groups.values())
        return {
            **self.metrics.summary(account, bound, self._core.state.dropped, self._end_s or self._clock.now()),
            "kept": kept_summary(self.metrics.numbers, self._core.state.kept.discarded),
            "busy_fraction": self.times.busy(),
            "time": self.times.shares(),
            "spans_dropped": self.times.dropped,
        }

    async def _tick(self) -> None:
        while True:
            await pause(TICK_S)
            for alive in self._connections.check_links(self._core.state.membership, self._clock.now()):
                self._handle(alive)
            self._handle(Tick())
            self._flush_recording()
            self._link.filter.check()
            self._send_status()
            self._flush()
            self._files.compact()
            self._files.write_samples(self._core.state.window.step, self._clock.now())
            self._write_times()

    def _flush_recording(self) -> None:
        if self._recording is None:
            return
        self._recording.flush()
        if reason := self._recording.stopped():
            text = f"the recording for flowrt replay has stopped, and the run goes on: {reason}"
            log.warning("%s", text)
            self.events.add("recorder", text, self._core.state.window.step, self._clock.now())

    def _write_times(self) -> None:
        now = self._clock.now()
        self.times.tick(now, self._core.waits.take(), self._core.waits.open_waits(now))
        if text := self.times.notice():
            self.warn(text)

    # ---- in

    def _receive(self, peer: bytes, message: m.Message) -> None:
        data = self._link.latest  # read first: other messages may be received before this message is handled
        self._connections.flush_if_late()
        worker = self._connections.name(peer)
        if worker is not None and type(message) not in HANDLED_BY_SERVER:  # nearly all
            self._handle(MessageReceived(worker, message), data)
        elif isinstance(message, m.Hello):
            self._handshake(peer, message, self._link.source())
        elif worker is None:
            self._log_refused(peer, f"{type(message).__name__} from a peer without a handshake")
            # Possibly a worker that was disconnected for too long: without an answer it would wait.
            self._answer_unknown_peer(peer, NOT_CONNECTED)
        elif isinstance(message, m.Follow) and self._connections.role(worker) == OBSERVER:
            unjoined = tuple((name, text[:MAX_UNJOINED_CHARS]) for name, text in message.unjoined[:MAX_UNJOINED])
            self._followed[worker] = m.Follow(message.workers[:MAX_FOLLOWED], unjoined)
        elif isinstance(message, m.SampleRecords):
            self._files.record_samples(message, self._core.state.window.step, self._clock.now())
        else:
            if isinstance(message, m.Heartbeat):
                self.times.note_report(worker, min(message.reported_s, self._clock.now()))
            elif isinstance(message, m.Report):
                self._files.record_report(worker, message, self._core.state.window.step)
            now = self._clock.now()
            self._handle(MessageReceived(worker, message), data, now)
            if isinstance(message, m.Leave):
                self._remove(worker, now)

    def _on_malformed(self, peer: bytes, reason: str) -> None:
        """Close the connection of the sender."""
        self._log_refused(peer, reason)
        self._link.disconnect(peer)
        worker = self._connections.name(peer)
        if worker is not None:
            now = self._clock.now()
            self._remove(worker, now)
            self._handle(WorkerDisconnected(worker, f"it sent a malformed message: {reason}"), now=now)

    def _log_refused(self, peer: bytes, reason: str) -> None:
        self._refused.warn("refused a message of %s: %s", self._connections.name(peer) or peer.hex(), reason)

    def _answer_unknown_peer(self, peer: bytes, answer: m.Message) -> None:
        if self._link.filter.may_reply(peer):
            self._link.send(peer, answer)
        else:
            self._link.disconnect(peer)

    def _handshake(self, peer: bytes, hello: m.Hello, source: int) -> None:
        if not self._link.filter.carries(source, peer):
            return  # the connection has closed since
        if self._connections.name(peer) == hello.worker:
            return  # repeated while the first hello was delayed
        if hello.worker in self._connections:
            # Possibly the connection of a dead process that this worker replaces: a send shows whether it is closed.
            self._connections.send_now(WorkerId(hello.worker), m.Heartbeat())
            self._process_disconnects(immediately=True)
        known = self._connections.name(peer)
        if not hello.term:
            self._dismissed.pop(hello.worker, None)  # another process of that name
        elif known is None and hello.worker in self._dismissed:
            self._answer_unknown_peer(peer, dismissal(self._dismissed[hello.worker]))
            return
        reason = rejection_reason(hello, self._core, hello.worker in self._connections or known is not None)
        if reason:
            if known is not None:
                self._connections.send(known, m.Rejected(0, reason))
            else:
                is_taken = hello.worker in self._connections
                self._answer_unknown_peer(peer, rejection(hello, self._core, reason, is_taken))
            return
        worker = WorkerId(hello.worker)
        if hello.role == SOURCE and not hello.term and self._core.state.recovery.is_active:
            # It replaces a source that died while no controller was there. Prompts that only the dead source could send
            # become unread when recovery is over, and this source has to offer them: its welcome waits until then.
            self._admit(peer, hello, source)
            self._awaiting_welcome = [*(other for other in self._awaiting_welcome if other != worker), worker]
            self._join(worker, hello)
            return
        try:
            passed = self.ledger.passed() if hello.role == SOURCE else ()
        except LedgerBusy as busy:
            log.info("%s is admitted when the ledger can be read again: %s", worker, busy)
            asyncio.get_running_loop().call_later(TICK_S, self._handshake, peer, hello, source)
            return
        except FlowError as error:
            self.end(str(error))
            return
        self._admit(peer, hello, source)
        self._send_welcome(worker, passed)
        self._join(worker, hello)

    def _join(self, worker: WorkerId, hello: m.Hello) -> None:
        now = self._clock.now()
        if hello.role != OBSERVER:
            self.times.joined(worker, hello.role, now)
        joined = WorkerConnected(worker=worker, role=hello.role, host=hello.host, lanes=hello.lanes, term=hello.term)
        self._handle(joined, now=now)

    def _remove(self, worker: WorkerId, now: float) -> None:
        self._connections.remove(worker)
        self.times.gone(worker, now)

    def _admit(self, peer: bytes, hello: m.Hello, source: int) -> None:
        self._connections.add(peer, WorkerId(hello.worker), hello.role, source)
        log.info("%s joined (%s on %r, pid %d)", hello.worker, hello.role, hello.host, hello.pid)

    def _send_welcome(self, worker: WorkerId, passed: tuple[Passed, ...]) -> None:
        numbers = tuple(self.metrics.numbers.items())
        evaluations = self.metrics.evaluated() if self._connections.role(worker) == SOURCE else ()
        position = msgspec.structs.replace(
            self._core.settings.position, passed=passed, numbers=numbers, evaluations=evaluations
        )
        try:
            self._connections.send(worker, msgspec.structs.replace(self._welcome, position=position))
        except LocalProtocolError as error:
            self.end(
                f"{worker} cannot be told where the run continues ({error}): a million consumed prompts that are "
                "numbered from 0 take 0.2 MB, and a million that are far apart (hashes) 19 MB, of which there "
                "may be 1.3 million; number them from 0"
            )

    def _send_delayed_welcomes(self) -> None:
        """Welcome the sources that waited for the end of recovery; while the ledger is locked, they stay queued."""
        waiting = self._awaiting_welcome
        self._awaiting_welcome = []
        for worker in waiting:
            if worker not in self._connections:
                continue
            try:
                passed = self.ledger.passed()
            except LedgerBusy:
                self._awaiting_welcome.append(worker)
            except FlowError as error:
                self.end(str(error))
            else:
                self._send_welcome(worker, passed)

    def _handle(self, event: Event, data: bytes = b"", now: float | None = None) -> None:
        """Let the core handle an event, and execute its commands.

        Args:
            event: what has happened.
            data: a message as it came from the socket.
            now: when, if the clock was read for this event already: that a worker joins or leaves has the same
                time in the event log and in the attribution.
        """
        if self._core.ended is not None and not isinstance(event, MessageReceived | Shutdown):
            return
        now = self._clock.now() if now is None else now
        if (stalled_s := self._absence.take(now)) > 0.0:
            log.warning("the controller did not run for %.1f s; its deadlines are extended by that time", stalled_s)
            self._handle(ControllerStalled(stalled_s))
        recording = self._recording if self._recording is not None and self._recording.is_active else None
        try:
            commands = self._core.handle(event, now)
            # All messages are encoded before the first command is executed, which may lead to other events.
            encoded = [encode(command.message) if type(command) is Send else b"" for command in commands]
        except (*PROGRAMMING_ERRORS, FlowError) as error:
            if recording is not None:
                recording.add(event, now, (), (), data)
            self._fail(type(event).__name__, error)
            return
        if recording is not None:
            recording.add(event, now, commands, encoded, data)
        for command, message in zip(commands, encoded, strict=True):
            if type(command) is Send:  # nearly all of them
                self._connections.send_encoded(command.worker, message)
            else:
                self._execute(command, now)
        if self._awaiting_welcome and not self._core.state.recovery.is_active:
            self._send_delayed_welcomes()
        self._process_disconnects()

    def _process_disconnects(self, immediately: bool = False) -> None:
        """Report workers whose connection was found closed, after the commands decided while they were connected."""
        for worker in self._connections.take_disconnected(immediately):
            now = self._clock.now()
            self.times.gone(worker, now)
            self._handle(WorkerDisconnected(worker, "its connection is closed; see its log"), now=now)

    # ---- out

    def _execute(self, command: Command, now: float) -> None:
        match command:
            case Dismiss(worker, reason):
                log.warning("%s is dismissed: %s", worker, reason)
                self._connections.send_now(worker, dismissal(reason))
                self._remove(worker, now)
                if len(self._dismissed) >= MAX_DISMISSED:
                    del self._dismissed[next(iter(self._dismissed))]
                self._dismissed[worker] = reason
            case Persist(worker, request):
                self._persist_requests.append((worker, request))
                self._commit(LOCKED_TIMEOUT_S)
                self._clean_journals(self._core.state.window.step)
            case LogEvent(kind, step, text, about, fields):
                if kind in ("guard", "warning"):
                    log.warning("step %d: %s", step, text)
                event = self.events.add(kind, text, step, now, about, **dict(fields))
                if kind == "guard":
                    self._guard_command.send(event)
            case EndRun(reason, code):
                log.info("the run ends: %s", reason)
                self.events.add("ended", f"{END_TEXT}{reason}", self._core.state.window.step, now, code=code)
                if code == EXIT_STALLED:
                    for line in self._core.wait_graph(now, self._welcome.request_timeout_s).sentences(MAX_GRAPH_LINES):
                        log.error("stalled: %s", line)
                self._ended.set()
            case EvaluationClosed(name):
                self._files.record(command, now)
                if self._health_watch is not None:
                    step = self._core.state.window.step
                    self._alarm(self._health.evaluation(name, self.metrics.evaluations, step))
            case _:
                self._files.record(command, now)

    def _clean_journals(self, checkpoint: int) -> None:
        """Delete what journals of lost processes have and no run needs that goes back to the checkpoint before."""
        journals, may_train = self._core.settings.journals, self._core.env.policies.admission.may_train
        before, self._checkpoint = self._checkpoint, checkpoint
        if journals and (self._cleaning is None or self._cleaning.done()):
            self._cleaning = asyncio.create_task(self._delete_outdated(journals, partial(may_train, before)))

    async def _delete_outdated(self, journals: str, may_train: Callable[[int], bool]) -> None:
        in_use = self._journals_in_use(journals)
        outdated = await asyncio.to_thread(find_outdated, self._run_dir, in_use, may_train)
        joined = self._journals_in_use(journals) - in_use  # their new files may not have a sample yet
        gone = [path for path in outdated if str(path.parent.relative_to(self._run_dir)) not in joined]
        await asyncio.to_thread(delete_journals, gone)

    def _journals_in_use(self, journals: str) -> set[str]:
        return {journal_of(journals, worker) for worker in self._connections.workers()}

    def _alarm(self, text: str) -> None:
        """Warn of a finding of the health watch, as a guard does; no effect for an empty text or after the end."""
        if text and self._core.ended is None:
            self._execute(LogEvent("guard", self._core.state.window.step, text), self._clock.now())

    async def _watch_health(self) -> None:
        """Check waits and the disk every `HEALTH_S` seconds."""
        while True:
            await pause(HEALTH_S)
            step = self._core.state.window.step
            self._alarm(self._health.oldest_wait(self._core.waiting(), self._clock.now(), step))
            try:
                # If the file system hangs, only this task hangs.
                usage = await asyncio.to_thread(shutil.disk_usage, self._run_dir)
            except OSError:
                continue
            self._alarm(self._health.disk(usage.free, usage.total, str(self._run_dir), step))

    def warn(self, text: str) -> None:
        """Warn in the log and in events.jsonl."""
        self._execute(LogEvent("warning", self._core.state.window.step, text), self._clock.now())

    def _log_start(self) -> None:
        """Add to events.jsonl that the run has started, or was resumed, or that its controller was restarted."""
        now, step = self._clock.now(), self._core.settings.position.step
        if self._core.state.recovery.is_active:
            text = f"a controller was restarted in step {step}, as number {self.ledger.term} of the run"
            self.events.add("controller_restarted", text, step, now)
        elif self.ledger.term > 1:
            if (undone := self.metrics.rolled_back) is not None:
                text = f"steps {undone[0]} to {undone[1]} are rolled back: the newest checkpoint has {step} steps"
                self.events.add("rolled_back", text, step, now, first=undone[0], last=undone[1])
            self.events.add("resumed", f"the run is resumed after {step} steps{self._kept_text()}", step, now)
        else:
            self.events.add("started", f"a run of {self._core.settings.steps} steps has started", step, now)

    def _kept_text(self) -> str:
        kept = kept_summary(self.metrics.numbers, {})
        return f", with {kept['tokens']} tokens that were generated before" if kept["tokens"] else ""

    def _flush(self) -> None:
        if self._commit(LOCKED_TIMEOUT_S):  # otherwise at the next tick
            self._connections.send_queued()
            self._process_disconnects()

    def _commit(self, patience_s: float) -> bool:
        """Commit the buffered records and answer the workers that wait for the commit; a failed disk ends the run.

        Returns False while the ledger is locked, which means that the call has to be repeated.
        """
        try:
            if not self._files.write(self._clock.now(), patience_s, sync=bool(self._persist_requests)):
                return False
        except (FlowError, OSError) as error:
            if self._core.ended is None or self._core.ended.code == EXIT_OK:
                log.error("%s", error)
                self._handle(Shutdown(str(error), EXIT_FAILED, even_if_complete=True))
            return True
        for worker, request in self._persist_requests:
            self._connections.send(worker, m.Committed(request, (), ""))
        self._persist_requests.clear()
        return True

    def end(self, reason: str, code: int = EXIT_FAILED) -> None:
        """End the run for a reason outside the core, such as a signal or a full disk."""
        self._handle(Shutdown(reason, code))

    def deadlock(self, returned: Collection[str], quiet_s: float) -> str:
        """`Core.deadlock` at the current time."""
        return self._core.deadlock(self._clock.now(), returned, quiet_s)

    def preempt(self, order: PreemptRun) -> None:
        """Preempt the run: it ends after a checkpoint of what it has trained."""
        self._handle(order)
        self._flush()

    def _fail(self, what: str, error: BaseException | None) -> None:
        """End the run because of a bug: the core's state is unreliable, but the files are intact."""
        log.error("the controller has failed", exc_info=error)
        self.end(f"the controller failed at {what} ({error!r}): that is a bug in flowrt, see its log")

    # ---- observers

    def _send_status(self) -> None:
        """Send the brief status to all observers; without observers no status is computed."""
        observers = self._connections.workers(OBSERVER)
        self._followed = {worker: names for worker, names in self._followed.items() if worker in observers}
        if observers:
            text = brief_text(self.status(brief=True))
            for worker in observers:
                follow = self._followed.get(worker)
                own = "" if follow is None else f', "followed": {json.dumps(followed(self._core, follow.workers))}}}'
                self._connections.send(worker, m.Status(f"{text[:-1]}{own}" if own else text))

    def status(self, *, brief: bool = False) -> dict[str, Any]:
        """The content of a Status message: progress, workers, and wait-for graph; ``brief``: parts of bounded size."""
        content = status(
            core=self._core,
            now=self._clock.now(),
            request_timeout_s=self._welcome.request_timeout_s,
            latest=self.metrics.latest,
            numbers=self.metrics.numbers,
            cut_off=self._connections.cut_off(),
            time=self.times.latest,
            evaluated=self.metrics.evaluation_summary(),
            brief=brief,
        ) | {
            "eta_s": self.metrics.eta_s(self._core.state.window.steps),
            "resources": self.times.resources,
            "unjoined": dict(pair for follow in self._followed.values() for pair in follow.unjoined),
        }
        content["guards"]["log"] += [list(entry) for entry in self._health.log]
        return content
