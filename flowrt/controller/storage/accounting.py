"""Accounting of time outside of the event loop: what the controller knows goes to a process of its own.

- The event loop appends records to a list; at each tick they become one packed frame, which a thread passes to the
  accounting process (`flowrt.controller.storage.accounting_process`). The process answers every frame.
- The queue of frames is bounded: above `MAX_PENDING_BYTES`, spans and waits are dropped and counted. Their time then
  counts as `other`.
- A process that was killed, or that answers nothing any more, costs the attribution and not the run.
"""

import logging
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any, NamedTuple

import msgspec

from flowrt.controller.attribution.causes import WaitInterval
from flowrt.controller.storage.time_files import TimeFilesStart
from flowrt.protocol.resources import MAX_RECORD_BYTES
from flowrt.protocol.spans import count_spans
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, blocking, join_thread

log = logging.getLogger(__name__)
MODULE = "flowrt.controller.storage.accounting_process"
FRAME_BYTES = 8 << 20
"""Bytes of spans after which a frame is passed on before the tick."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes that the process has not answered, above which spans and waits are dropped; at twice as many it is given up."""
CLOSE_TIMEOUT_S = 20.0
END_S = 5.0
OPEN = BoundedElsewhere("Accounting.close")
"""Waits of the thread are waits of the controller: a worker in the same process does not report them as its own."""
JOINED, GONE, TRAINING_STARTED, STEP_CLOSED, REPORTED, SPANS, RESOURCES = range(7)
"""Kinds of records, by their first item."""
Record = tuple[Any, ...]


class Frame(NamedTuple):
    """What happened since the last frame, in order; the waits follow the records. First a `TimeFilesStart`."""

    records: list[Record]
    waits: list[WaitInterval]
    """Waits that have ended."""
    open_waits: list[WaitInterval]
    tick_s: float | None
    """The steps that are complete at this time are written; None: the tick has not come yet."""
    is_last: bool


class Answer(NamedTuple):
    """What the process knows after a frame."""

    latest: dict[str, Any] | None
    """The line of the last complete step; None: as before."""
    shares: dict[str, dict[str, float]]
    malformed: int
    """Records of spans and resources that could not be read, in all."""
    resources: dict[str, Any] | None = None
    """What the workers use now; None: as before."""


HEADER = struct.Struct("<I")
encode = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class Accounting:
    """The controller's end. Times are seconds on the controller's clock; only `close` waits for the process."""

    def __init__(self, start: TimeFilesStart, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        """Start nothing yet: the process starts when the first worker has joined.

        Args:
            start: of the files that the process writes.
            max_pending_bytes: see `MAX_PENDING_BYTES`.
        """
        self.dropped = 0
        """Spans and waits that were dropped because the process is too slow or gone."""
        self._max_pending_bytes = max_pending_bytes
        self._records: list[Record] = []
        self._waits: list[WaitInterval] = []
        self._span_bytes = 0
        self._is_training = False
        self._has_dropped = self._has_failed = False
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._queued_bytes = 0
        self._process = _AccountingProcess(self._queue)
        self._thread: Thread | None = None
        self._start = start

    # ---- records

    def joined(self, worker: str, role: str, now: float) -> None:
        """Attribute the time of a worker from ``now`` on."""
        self._records.append((JOINED, worker, role, now))
        if self._thread is None and not self._process.failed:
            self._begin()

    def gone(self, worker: str, now: float) -> None:
        """Attribute the time of a worker only up to ``now``."""
        self._records.append((GONE, worker, now))

    def training_started(self, now: float) -> None:
        """Begin the time in which the run trains at ``now``; later calls change nothing."""
        if not self._is_training:
            self._is_training = True
            self._records.append((TRAINING_STARTED, now))

    def close_step(self, step: int, now: float) -> None:
        """End the account of ``step`` and begin that of the next step."""
        self._records.append((STEP_CLOSED, step, now))

    def note_report(self, worker: str, until_s: float) -> None:
        """Record that a worker has reported all its spans up to ``until_s``."""
        self._records.append((REPORTED, worker, until_s))

    def add_spans(self, worker: str, records: Sequence[bytes]) -> None:
        """Add spans that a worker has reported, as packed by `flowrt.protocol.spans.pack_spans`."""
        for record in records:
            self._records.append((SPANS, worker, record))
            self._span_bytes += len(record)
        if self._span_bytes > FRAME_BYTES:
            self._hand_over(())

    def add_resources(self, worker: str, record: bytes) -> None:
        """Add what a worker uses, as packed by `flowrt.protocol.resources.pack_use`."""
        if len(record) <= MAX_RECORD_BYTES:
            self._records.append((RESOURCES, worker, record))

    def tick(self, now: float, waits: list[WaitInterval], open_waits: list[WaitInterval]) -> None:
        """Pass on what was recorded, with the waits that have ended and those in progress."""
        self._waits += waits
        self._hand_over(open_waits, now)

    # ---- what is known

    @property
    def pid(self) -> int | None:
        """The process; None before it is started."""
        return self._process.pid

    @property
    def latest(self) -> dict[str, Any] | None:
        """The line of the last complete step."""
        return self._process.latest

    @property
    def resources(self) -> dict[str, Any] | None:
        """What the workers use now, see `flowrt.controller.attribution.resources`; None before the first reports."""
        return self._process.resources

    def shares(self) -> dict[str, dict[str, float]]:
        """By role and kind, the fraction of the role's time in complete steps of this controller that the kind took."""
        return self._process.shares

    def busy(self) -> dict[str, float]:
        """By role, the fraction of the role's time in complete steps of this controller in which it was busy."""
        return {role: of["busy"] for role, of in self.shares().items()}

    def notice(self) -> str:
        """What is missing from the attribution: a sentence, once for each reason; empty otherwise."""
        if self._process.failed:
            if self._has_failed:
                return ""
            self._has_failed = True
            return f"where the time goes is not recorded any more, and the run goes on: {self._process.failed}"
        if self.dropped and not self._has_dropped:
            self._has_dropped = True
            return "some spans and waits are left out of where the time goes: its process does not keep up"
        return ""

    def close(self, now: float, waits: list[WaitInterval], open_waits: list[WaitInterval]) -> None:
        """Pass on everything, and wait until it is written, or for `CLOSE_TIMEOUT_S`; the step in progress ends now."""
        self._waits += waits
        self._hand_over(open_waits, now, is_last=True)
        if self._thread is None:
            return
        self._queue.put(None)
        if not join_thread(self._thread, CLOSE_TIMEOUT_S):
            log.warning("where the time goes has not been written after %.0f s and is left out", CLOSE_TIMEOUT_S)
            self._process.kill()
        if text := self.notice():
            log.warning("%s", text)
        if missing := self.dropped + self._process.malformed:
            log.warning("%d spans and waits are left out of where the time goes", missing)

    # ---- to the process

    def _hand_over(
        self, open_waits: Iterable[WaitInterval], now: float | None = None, *, is_last: bool = False
    ) -> None:
        records, waits = self._records, self._waits
        self._records, self._waits, self._span_bytes = [], [], 0
        pending_bytes = self._queued_bytes - self._process.answered_bytes
        if self._process.failed or pending_bytes > 2 * self._max_pending_bytes:
            self._drop(records, waits)
            self._process.give_up()
            return
        if self._thread is None:  # no worker has joined
            return
        if pending_bytes > self._max_pending_bytes:
            records, waits = self._drop(records, waits), []
        self._put(encode(Frame(records, waits, list(open_waits), now, is_last)))

    def _put(self, data: bytes) -> None:
        self._queued_bytes += len(data)
        self._queue.put(data)

    def _begin(self) -> None:
        """Start the thread, and with it the process."""
        self._put(encode(self._start))
        thread = Thread(target=self._process.run, name="accounting", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._process.fail(str(error))
        else:
            self._thread = thread

    def _drop(self, records: list[Record], waits: Sequence[WaitInterval]) -> list[Record]:
        """Count the spans and waits that are dropped; returns the other records."""
        self.dropped += len(waits) + sum([count_spans(record[2]) for record in records if record[0] == SPANS])
        return [record for record in records if record[0] != SPANS]


class _AccountingProcess:
    """The process and its thread: `run` is the body of the thread."""

    def __init__(self, queue: "SimpleQueue[bytes | None]") -> None:
        self._queue = queue
        self._child: subprocess.Popen[bytes] | None = None
        self.answered_bytes = 0
        self.latest: dict[str, Any] | None = None
        self.resources: dict[str, Any] | None = None
        self.shares: dict[str, dict[str, float]] = {}
        self.malformed = 0
        self.failed = ""
        """Why nothing is attributed any more; empty while it is."""

    @property
    def pid(self) -> int | None:
        """The process; None before it is started."""
        return None if self._child is None else self._child.pid

    def run(self) -> None:
        """Start the process and pass on frames until the queue ends. A failure costs the attribution only."""
        try:
            mine, its = socket.socketpair()
            with mine:
                with its:
                    # Started by this thread: the process is killed when the thread that started it ends.
                    self._child = subprocess.Popen(
                        [sys.executable, RUN_MODULE, "flowrt.runtime.parent_death", MODULE],
                        stdin=its.fileno(),
                        stdout=subprocess.DEVNULL,
                    )
                with mine.makefile("rb") as answers:
                    while (data := blocking(self._queue.get, OPEN, "a frame", CONTROLLER)) is not None:
                        self._exchange(mine, answers, data)
        except (OSError, ValueError) as error:
            self.fail(self._exit_text() or str(error))
            while blocking(self._queue.get, OPEN, "the end of the queue", CONTROLLER) is not None:
                pass
        if self._child is not None and not self.failed:
            self._wait()

    def _exchange(self, mine: socket.socket, answers: IO[bytes], data: bytes) -> None:
        """Pass on a frame and take the answer. Raises OSError if the process has ended."""
        blocking(partial(mine.sendall, HEADER.pack(len(data)) + data), OPEN, "the frame to be taken", CONTROLLER)
        answer = blocking(partial(receive, answers), OPEN, "the answer to a frame", CONTROLLER)
        if answer is None:
            raise ConnectionResetError("the accounting process has ended")
        latest, self.shares, self.malformed, resources = decode_answer(answer)
        if latest is not None:
            self.latest = latest
        if resources is not None:
            self.resources = resources
        self.answered_bytes += len(data)

    def fail(self, reason: str) -> None:
        """Record why nothing is attributed any more."""
        self.failed = self.failed or reason

    def give_up(self) -> None:
        """End a process that does not answer."""
        if not self.failed:
            self.fail("the accounting process does not answer any more")
            self.kill()

    def kill(self) -> None:
        """Kill the process, if it runs."""
        if self._child is not None:
            self._child.kill()

    def _wait(self) -> int | None:
        """The exit code of the process; None if it does not end."""
        child = self._child
        if child is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return blocking(partial(child.wait, END_S), END_S, "the end of the accounting process", CONTROLLER)
        child.kill()
        return None

    def _exit_text(self) -> str:
        code = self._wait()
        return "" if code is None else f"the accounting process has ended with code {code}"


def receive(source: IO[bytes]) -> bytes | None:
    """The next frame or answer; None at the end of the stream. Raises OSError."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = source.read(size)
    return data if len(data) == size else None
