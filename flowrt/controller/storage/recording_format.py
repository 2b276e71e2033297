"""The file format of a recording: every event of the controller's core, from which its commands can be computed again.

A recording of a term (one controller of a run) is a sequence of segments ``RUN/recording/TERM-NNNN.fr``::

    segment   MAGIC, then blocks
    block     length and CRC-32 of its data (uint32 each, little endian), then the data
    data      part of the raw zlib stream of the segment, ended by a sync flush: each block can be read
              after the blocks before it
    content   MessagePack array, the first item is its kind:
              [BEGIN, term, segment, first event, header or None]   the first of each segment; a header in segment 0
              [EVENTS, first event, names, kinds, senders, times, data, counts, digest]       see `EventBlock`
              [END, reason]                                         the last block: the controller has ended, or with a
                                                                    reason, the recording was stopped

Messages are stored as received from the socket, but without the busy spans and resources of reports, on which no
decision depends. Times are exact: with times rounded to microseconds, a replay would compute other commands.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgpack
import msgspec

import flowrt
from flowrt.controller.events import (
    AppendLedger,
    AppendRestartLog,
    Command,
    ControllerStalled,
    Event,
    KernelAlive,
    MessageReceived,
    PreemptRun,
    Send,
    Shutdown,
    StepClosed,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.state.controller_restart import (
    GroupEntry,
    GroupsClosed,
    GroupsOpened,
    Order,
    RecoveredState,
    RunPreempted,
    StageCommitted,
    StageUndone,
    WorkerDrained,
)
from flowrt.controller.state.kept_samples import KeptSample
from flowrt.controller.state.reward_history import Outcome
from flowrt.errors import FlowError
from flowrt.ids import WorkerId
from flowrt.protocol.codec import decode, encode, from_blob, to_blob
from flowrt.protocol.messages import Position, Report

DIRECTORY = "recording"
"""The directory of the recordings, in the run directory."""
_FAMILY = b"flowrt recording "
MAGIC = _FAMILY + b"6\n"
BEGIN, EVENTS, END = range(3)
BLOCK_EVENTS = 1000
"""Events after which a block is written at the latest, with a digest of all commands so far."""
DIGEST_BYTES = 16
_HEAD = struct.Struct("<II")
MAX_BLOCK_BYTES = 1 << 30
"""Maximum size of a block; a larger size counts as damage, so that it is not allocated."""
_MESSAGE = 0
_KINDS: tuple[type[Any], ...] = (
    MessageReceived,
    WorkerConnected,
    WorkerDisconnected,
    Tick,
    KernelAlive,
    PreemptRun,
    Shutdown,
    ControllerStalled,
)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
_ENTRIES: tuple[type[GroupEntry], ...] = (GroupsOpened, StageCommitted, StageUndone, GroupsClosed)
_ORDERS: tuple[type[Order], ...] = (WorkerDrained, RunPreempted)


@dataclass(frozen=True, slots=True)
class CoreInputs:
    """Arguments from which the core of a term is built, besides the recipe; a replay builds the core with them."""

    config: str
    """The configuration of the run as TOML."""
    term: int
    position: Position
    recovered: RecoveredState | None = None
    outcomes: tuple[Outcome, ...] = ()
    journals: str = ""
    """Where rollout workers keep what they generate, in the run directory; empty: nowhere."""
    kept: tuple[KeptSample, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a recording."""

    inputs: CoreInputs
    start_s: float
    """Zero of the run clock on the clock of the events."""
    unix_s: float
    """Beginning of the recording, in seconds since 1970."""
    version: str
    """Version of flowrt."""
    sources: str
    """`sources_digest` of the controller that was recorded."""


@dataclass(slots=True)
class EventBlock:
    """Consecutive events, with the numbers of commands that the core returned, and a digest of these."""

    first: int = 0
    """Number of the first event, from 0 in each term."""
    names: list[str] = field(default_factory=list)
    """Names of workers that occur for the first time in the term; workers are numbered in this order from 0."""
    kinds: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    """Number of the sender of each message; 0 for events that are not messages."""
    times: list[float] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of commands that the core returned to each event; a failed event has none."""
    digest: bytes = b""
    """Digest of all commands since the beginning of the term."""

    def extend(self, other: "EventBlock") -> None:
        """Add the events of another block."""
        self.names += other.names
        self.kinds += other.kinds
        self.workers += other.workers
        self.times += other.times
        self.data += other.data
        self.counts += other.counts

    def seal(self, digest: bytes) -> None:
        """Complete the block with the digest of all commands up to its end."""
        self.digest = digest

    def pack(self) -> list[Any]:
        """The content of a block."""
        return [
            EVENTS,
            self.first,
            self.names,
            self.kinds,
            self.workers,
            self.times,
            self.data,
            self.counts,
            self.digest,
        ]

    @classmethod
    def unpack(cls, content: Sequence[Any]) -> "EventBlock":
        """The block with the content that `pack` returned. Raises ValueError or TypeError for other content."""
        _, first, names, kinds, workers, times, data, counts, digest = content
        if not len(kinds) == len(workers) == len(times) == len(data) == len(counts):
            raise ValueError("the lists of a block have different lengths")
        return cls(first, list(names), list(kinds), list(workers), list(times), list(data), list(counts), digest)


# ---- events and commands


def event_kind(event: Event) -> int:
    """The number of the event's kind in a block."""
    return _NUMBER_OF[type(event)]


def event_data(event: Event, received: bytes = b"") -> bytes:
    """An event as bytes: the encoded message of a `MessageReceived`, or the fields of another event in MessagePack.

    A `Report` is encoded without what the core does not read: busy spans and resources are in other files.

    Args:
        event: the event.
        received: its message as it was received, if it was.
    """
    if isinstance(event, MessageReceived):
        if isinstance(event.message, Report):
            return encode(msgspec.structs.replace(event.message, spans=(), resources=b""))
        return received or encode(event.message)
    data: bytes = msgpack.packb(astuple(event), unicode_errors="surrogatepass")
    return data


def read_event(kind: int, worker: str, data: bytes) -> Event:
    """The event of this kind, with ``worker`` as the sender of a message; the inverse of `event_data`.

    Raises ValueError, TypeError, IndexError or FlowError for data that is not such an event.
    """
    if kind == _MESSAGE:
        return MessageReceived(WorkerId(worker), decode(data))
    event: Event = _KINDS[kind](*msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass"))
    return event


class CommandDigest:
    """Digest of all commands of a core, in order: messages with their receivers, and the identity of other commands."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, commands: Iterable[Command], encoded: Iterable[bytes]) -> None:
        """Add commands.

        Args:
            commands: the commands, in order.
            encoded: for each command, the encoded message of a Send, or empty bytes.
        """
        parts: list[bytes] = []
        for command, message in zip(commands, encoded, strict=True):
            if type(command) is Send:
                parts += (_pack(command.worker), message)
            else:
                record = command.entry if type(command) is AppendRestartLog else command
                parts.append(_pack(_IDENTITY.get(type(record), repr)(record)))
        self._digest.update(b"".join(parts))

    def add_unencoded(self, commands: Sequence[Command]) -> None:
        """Add commands whose messages are not encoded yet."""
        self.add(commands, [encode(command.message) if type(command) is Send else b"" for command in commands])

    def value(self) -> bytes:
        """The digest of all commands added so far, `DIGEST_BYTES` long."""
        return self._digest.digest()[:DIGEST_BYTES]


_IDENTITY: dict[type, Callable[[Any], object]] = {
    AppendLedger: attrgetter("prompt", "epoch", "state", "step", "reason", "reward"),
    GroupsOpened: attrgetter("group", "slot", "flow", "prompts", "epoch", "members"),
    StageCommitted: attrgetter("worker", "stage", "slots"),
    StageUndone: attrgetter("slot", "stage", "attempt"),
    GroupsClosed: attrgetter("groups", "slots"),
    StepClosed: attrgetter("step", "groups", "samples", "tokens", "lags", "counts"),
}
"""Identity of frequent commands and log entries in the digest; their other fields are copied from the event."""
_pack = msgpack.Packer(unicode_errors="surrogatepass").pack


# ---- headers


@cache
def sources_digest() -> str:
    """Hexadecimal SHA-256 over the source files on which commands depend.

    These are the packages flowrt.controller and flowrt.protocol, and the module flowrt.ids.
    """
    root = Path(flowrt.__file__).parent
    digest = hashlib.sha256()
    for pattern in ("controller/**/*.py", "protocol/**/*.py", "ids.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def pack_header(header: Header) -> list[Any]:
    """The header as an item of a MessagePack array."""
    inputs, recovered = header.inputs, header.inputs.recovered
    state = None
    if recovered is not None:
        entries = [(_ENTRIES.index(type(entry)), to_blob(entry)) for entry in recovered.entries]
        orders = [(_ORDERS.index(type(order)), to_blob(order)) for order in recovered.orders]
        state = [
            list(recovered.numbers.items()),
            list(recovered.members.items()),
            entries,
            list(recovered.dropped.items()),
            orders,
        ]
    return [
        header.version,
        header.sources,
        header.start_s,
        header.unix_s,
        inputs.config,
        inputs.term,
        to_blob(inputs.position),
        state,
        [tuple(outcome) for outcome in inputs.outcomes],
        inputs.journals,
        [astuple(sample) for sample in inputs.kept],
    ]


def unpack_header(content: Sequence[Any]) -> Header:
    """The header from the item that `pack_header` returned.

    Raises ValueError, TypeError, IndexError or FlowError for other content.
    """
    version, sources, start_s, unix_s, config, term, position, state, outcomes, journals, kept = content
    recovered = None
    if state is not None:
        numbers, members, entries, dropped, orders = state
        known: list[GroupEntry] = [from_blob(_ENTRIES[kind], blob) for kind, blob in entries]
        ordered: list[Order] = [from_blob(_ORDERS[kind], blob) for kind, blob in orders]
        recovered = RecoveredState(dict(numbers), dict(members), known, dict(dropped), tuple(ordered))
    inputs = CoreInputs(
        config=config,
        term=term,
        position=from_blob(Position, position),
        recovered=recovered,
        outcomes=tuple(Outcome(*outcome) for outcome in outcomes),
        journals=journals,
        kept=tuple(KeptSample(*sample) for sample in kept),
    )
    return Header(inputs=inputs, start_s=start_s, unix_s=unix_s, version=version, sources=sources)


# ---- blocks


class BlockPacker:
    """Writes the blocks of one segment, which share a compressed stream."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)

    def pack(self, content: Sequence[Any]) -> bytes:
        """The bytes of the next block of the stream."""
        raw = msgpack.packb(content, unicode_errors="surrogatepass")
        data = self._stream.compress(raw) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return _HEAD.pack(len(data), zlib.crc32(data)) + data


class UnfinishedBlock(FlowError):
    """The file ends within a block, as after a kill of its writer."""


class BlockReader:
    """Reads the blocks of one segment, in order."""

    def __init__(self, path: Path) -> None:
        """Open a segment.

        Raises UnfinishedBlock for a file that ends within its first bytes, FlowError for another file that is not a
        segment, OSError for one that cannot be read.
        """
        self._path = path
        self._file = path.open("rb")
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        if (magic := self._file.read(len(MAGIC))) != MAGIC:
            self._file.close()
            if MAGIC.startswith(magic):
                raise UnfinishedBlock(f"{path} ends within a block, at byte 0")
            if magic.startswith(_FAMILY):
                raise FlowError(f"{path} is a recording of another version of flowrt: replay it with that version")
            raise FlowError(f"{path} is not a segment of a recording, or its beginning is damaged")

    def read(self) -> list[Any] | None:
        """The content of the next block; None at the end of the segment.

        Raises UnfinishedBlock if the file ends within the block, and FlowError if the block is damaged.
        """
        at = self._file.tell()
        head = self._file.read(_HEAD.size)
        if not head:
            return None
        size, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (MAX_BLOCK_BYTES + 1, 0)
        data = self._file.read(size) if size <= MAX_BLOCK_BYTES else b""
        if len(data) != size:
            is_short = len(head) < _HEAD.size or size <= MAX_BLOCK_BYTES
            raise (UnfinishedBlock if is_short else FlowError)(f"{self._path} ends within a block, at byte {at}")
        if zlib.crc32(data) != checksum:
            raise FlowError(f"{self._path} is damaged: the checksum of the block at byte {at} is wrong")
        try:
            content = msgpack.unpackb(self._stream.decompress(data), use_list=False, unicode_errors="surrogatepass")
            return list(content)
        except (zlib.error, ValueError, TypeError, msgpack.UnpackException) as error:
            raise FlowError(f"{self._path} is damaged: the block at byte {at} cannot be read: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
