"""Writer of the recording of a run: every event of the controller's core, in ``RUN/recording`` for `flowrt replay`.

- The event loop only appends to a list; digests, packing, compression and writing happen on a thread.
- A crash of the controller loses the events since the last tick.
- A recording stops when its bound is reached, or the disk fails or is too slow. The part that was written stays
  readable, and the run continues.
"""

import logging
import os
import time
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import flowrt
from flowrt.controller.events import Command, Event, MessageReceived
from flowrt.controller.storage.recording_format import (
    BEGIN,
    BLOCK_EVENTS,
    DIRECTORY,
    END,
    MAGIC,
    BlockPacker,
    CommandDigest,
    CoreInputs,
    EventBlock,
    Header,
    event_data,
    event_kind,
    pack_header,
    sources_digest,
)
from flowrt.errors import PROGRAMMING_ERRORS, FlowError
from flowrt.runtime.files import private_directory
from flowrt.runtime.waits import BoundedElsewhere, blocking, join_thread

log = logging.getLogger(__name__)
BATCH_EVENTS = 100
"""Number of events passed to the thread at once: few, because their objects soon leave the processor's cache."""
SEGMENT_BYTES = 8 << 20
MAX_PENDING_BYTES = 64 << 20
"""Bytes of messages waiting for the writer thread above which the disk is too slow for a recording."""
JOIN_TIMEOUT_S = 10.0
CLOSED = BoundedElsewhere("EventRecording.close")
_END_BYTES = 1024
"""Reserved below the bound for the block that says why the recording was stopped."""


Row = tuple[Event, bytes, float, Sequence[Command], Sequence[bytes]]
"""Event, data, time, commands and encoded messages: see `EventRecording.add`."""


class EventRecording:
    """Writer of the recording of one term: `add` is called once for each event, in order."""

    def __init__(self, run_dir: Path, inputs: CoreInputs, limit_bytes: int) -> None:
        """Nothing is written before `begin`.

        Args:
            run_dir: the run directory.
            inputs: arguments from which the core was built.
            limit_bytes: maximum size of all recordings of the run together.
        """
        self._directory = run_dir / DIRECTORY
        self._inputs = inputs
        self._limit_bytes = limit_bytes
        self._rows: list[Row] = []
        self._queue: SimpleQueue[tuple[list[Row], bool] | None] = SimpleQueue()
        self._queued_bytes = 0
        self._written_bytes = 0  # of the queued ones; set by the thread only
        self._thread: Thread | None = None
        self._writer: _SegmentWriter | None = None
        self._is_reported = False
        self.is_active = True
        """False after the recording was stopped or closed."""

    def begin(self, start_s: float) -> None:
        """Start writing. ``start_s`` is the zero of the run clock, in seconds on the clock of the events."""
        header = Header(
            inputs=self._inputs,
            start_s=start_s,
            unix_s=time.time(),
            version=flowrt.__version__,
            sources=sources_digest(),
        )
        self._writer = _SegmentWriter(self._directory, header, self._limit_bytes)
        thread = Thread(target=self._write, args=(self._writer,), name="recording", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._writer.stop(str(error))
            return
        self._thread = thread

    def add(
        self, event: Event, now: float, commands: Sequence[Command], encoded: Sequence[bytes], data: bytes = b""
    ) -> None:
        """Record an event that the core has handled.

        Args:
            event: the event.
            now: its time, in seconds on the clock of the events.
            commands: the commands that the core returned, in order; empty if it failed.
            encoded: for each command, the encoded message of a Send, or empty bytes.
            data: the bytes of a worker's message as received from the socket; empty for other events, and for a message
                that did not come from a socket.
        """
        self._rows.append((event, data, now, commands, encoded))
        if len(self._rows) >= BATCH_EVENTS:
            self._hand_over(ends_block=False)

    def flush(self) -> None:
        """Pass the recorded events to the thread, which then ends the block and writes it."""
        self._hand_over(ends_block=True)

    def _hand_over(self, *, ends_block: bool) -> None:
        rows = self._rows
        if self._thread is None:
            return
        self._rows = []
        self._queued_bytes += _size_of(rows)
        self._queue.put((rows, ends_block))

    def stopped(self) -> str:
        """Why the recording was stopped, in the first call after that; empty in all other calls."""
        if self._writer is None or self._is_reported:
            return ""
        reason = self._writer.stopped
        if not reason and self._queued_bytes - self._written_bytes > MAX_PENDING_BYTES:
            reason = f"the disk is too slow: {MAX_PENDING_BYTES >> 20} MiB of events wait to be written"
        if reason:
            self._writer.stop(reason)
            self._is_reported = True
            self.is_active = False
            self._queue.put(None)
        return reason

    def close(self) -> None:
        """Write all recorded events, and end the thread, within `JOIN_TIMEOUT_S` seconds."""
        if self._thread is None:
            return
        if self.is_active:
            self.flush()
            self._queue.put(None)
            self.is_active = False
        if not join_thread(self._thread, JOIN_TIMEOUT_S):
            log.warning("the recording has not been written after %.0f s: is the disk stuck?", JOIN_TIMEOUT_S)

    def _write(self, writer: "_SegmentWriter") -> None:
        """Body of the thread: write events until the queue ends. A failure stops the recording, never the run."""
        while (batch := blocking(self._queue.get, CLOSED, "events to write", "the event loop")) is not None:
            rows, ends_block = batch
            writer.write(rows, ends_block=ends_block)
            self._written_bytes += _size_of(rows)
        writer.close()


def _size_of(rows: Sequence[Row]) -> int:
    """Bytes of the messages of these rows, received and sent: both wait in the queue until the thread has read them."""
    return sum([len(data) + sum(map(len, encoded)) for _, data, _, _, encoded in rows])


class _SegmentWriter:
    """Writer of the segments of a term, within a bound. Only ``stopped`` is used outside the thread."""

    def __init__(self, directory: Path, header: Header, limit_bytes: int) -> None:
        self._directory = directory
        self._header = header
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._segment = 0
        self._size = 0
        self._fd = -1
        self._packer = BlockPacker()
        self._block = EventBlock()
        self._numbers: dict[str, int] = {}
        self._digest = CommandDigest()
        self.stopped = ""
        """Why writing has stopped; empty before."""

    def stop(self, reason: str) -> None:
        """Stop writing, for this reason."""
        self.stopped = reason

    def write(self, rows: Sequence[Row], *, ends_block: bool) -> None:
        """Add events to the block, and write the block if it is full or ``ends_block``. A failure sets ``stopped``."""
        if self.stopped:
            return
        try:
            self._add(rows)
            if len(self._block.kinds) >= (1 if ends_block else BLOCK_EVENTS):
                self._write_block()
        except OSError as error:
            self._fail(f"{self._directory} cannot be written: {error.strerror or error}")
        except (*PROGRAMMING_ERRORS, FlowError) as error:  # the log has the reason
            log.exception("the recording has failed")
            self._fail(f"there is a bug in flowrt ({error!r}), see the log")

    def _add(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        events, data, times, commands, encoded = zip(*rows, strict=True)
        numbers, known = self._numbers, len(self._numbers)
        senders = [
            numbers.setdefault(event.worker, len(numbers)) if type(event) is MessageReceived else 0 for event in events
        ]
        self._block.extend(
            EventBlock(
                names=list(islice(numbers, known, None)),
                kinds=list(map(event_kind, events)),
                workers=senders,
                times=list(times),
                data=list(map(event_data, events, data)),
                counts=list(map(len, commands)),
            )
        )
        self._digest.add(chain.from_iterable(commands), chain.from_iterable(encoded))

    def _write_block(self) -> None:
        """Write the block, in a new segment if this one is full."""
        block = self._block
        block.seal(self._digest.value())
        self._block = EventBlock(first=block.first + len(block.kinds))
        if self._size >= SEGMENT_BYTES:  # begun only now: the full segment may have been the last
            self._close()
            self._segment += 1
        if self._fd < 0:
            self._open(block.first)
        if not self._append(self._packer.pack(block.pack()), reserve=_END_BYTES):
            self._packer = BlockPacker()  # a new stream: the block that is not in the file must not be referred to
            self._append(self._packer.pack([END, self.stopped]), reserve=0)
            self._close()

    def close(self) -> None:
        """Write the END block, and close the file."""
        try:
            if self._fd >= 0:
                self._append(self._packer.pack([END, self.stopped]), reserve=0)
            self._close()
        except OSError as error:
            self._fail(f"{self._directory} cannot be written: {error.strerror or error}")

    def _open(self, first_event: int) -> None:
        private_directory(self._directory)
        if not self._segment:
            self._used_bytes = sum(path.stat().st_size for path in self._directory.glob("*.fr"))
        term = self._header.inputs.term
        path = self._directory / f"{term:04}-{self._segment:04}.fr"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._packer = BlockPacker()
        self._size = 0
        header = None if self._segment else pack_header(self._header)
        # The first segment is begun even if the bound leaves no room: its END block gives the reason.
        first = self._packer.pack([BEGIN, term, self._segment, first_event, header])
        self._append(MAGIC + first, reserve=0)

    def _append(self, data: bytes, reserve: int) -> bool:
        """Append all data; returns False and sets ``stopped`` if the bound leaves no room.

        Raises OSError if a write fails; then nothing is appended.
        """
        if reserve and self._used_bytes + len(data) + reserve > self._limit_bytes:
            self.stopped = f"recorder.mb = {self._limit_bytes / 1e6:g} is reached"
            return False
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self._size)  # the file has only whole blocks
            raise
        self._size += len(data)
        self._used_bytes += len(data)
        return True

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fail(self, reason: str) -> None:
        self.stopped = reason
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                log.debug("the recording was closed with an error", exc_info=True)
