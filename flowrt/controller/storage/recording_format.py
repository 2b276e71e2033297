"""The file format of a recording: every event of the controller's core, from which its commands can be computed again.

A recording of a term (one controller of a run) is a sequence of segments ``RUN/recording/TERM-NNNN.fr``::

    segment   MAGIC, then blocks
    block     length and CRC-32 of its data (uint32 each, little endian), then the data
    data      part of one raw zlib stream a segment, at level 1, ended by a sync flush: all blocks before are readable
    content   MessagePack array, the first item is its kind:
              [BEGIN, term, segment, first event, header or None]   the first of each segment; a header in segment 0
              [EVENTS, first event, names, columns..., digest]      see `EventBlock`
              [END, reason]                                         nothing follows: the controller has ended, or with a
                                                                    reason, the recording was stopped

Messages are kept as the bytes that came from the socket, and times as exact float64: rounded to microseconds, a replay
takes another course. The content of a block is stored by columns, which compress better than records and cost less time
to pack.
"""

import hashlib
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgpack

import flowrt
from flowrt.controller.events import (
    AppendLedger,
    AppendReplay,
    Command,
    Event,
    KernelAlive,
    MessageReceived,
    PreemptRun,
    Send,
    Shutdown,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
)
from flowrt.controller.state.replay import (
    GroupsClosed,
    GroupsOpened,
    RecoveredState,
    StageCommitted,
    StageUndone,
)
from flowrt.controller.state.reward_history import Outcome
from flowrt.errors import FlowError
from flowrt.ids import WorkerId
from flowrt.protocol.codec import decode, encode, from_blob, to_blob
from flowrt.protocol.messages import Position

DIRECTORY = "recording"
"""The directory of the recordings, in the run directory."""
MAGIC = b"flowrt recording 1\n"
BEGIN, EVENTS, END = range(3)
BLOCK_EVENTS = 1000
"""Events after which a block is written at the latest, with a digest of all commands so far."""
DIGEST_BYTES = 16
_HEAD = struct.Struct("<II")
MAX_BLOCK_BYTES = 1 << 30
"""A longer block is damage: its length would be read as memory to allocate."""
_MESSAGE = 0
_KINDS: tuple[type[Any], ...] = (
    MessageReceived,
    WorkerConnected,
    WorkerDisconnected,
    Tick,
    KernelAlive,
    PreemptRun,
    Shutdown,
)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}
GroupEntry = GroupsOpened | StageCommitted | StageUndone | GroupsClosed
_ENTRIES: tuple[type[GroupEntry], ...] = (GroupsOpened, StageCommitted, StageUndone, GroupsClosed)
_NUMBER_BYTES, _WORD_BYTES = 4, 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class CoreInputs:
    """What the core of a term is built from, besides the recipe: a replay builds it again in another process."""

    config: str
    """The configuration of the run as TOML."""
    term: int
    position: Position
    recovered: RecoveredState | None = None
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a recording."""

    inputs: CoreInputs
    start_s: float
    """Zero of the run clock on the clock of the events."""
    unix_s: float
    """Time of the day at the beginning of the recording."""
    version: str
    """Of flowrt."""
    sources: str
    """`sources_digest` of the controller that was recorded."""


@dataclass(slots=True)
class EventBlock:
    """Consecutive events by columns, and what the core answered."""

    first: int = 0
    """Number of the first event, from 0 in each term."""
    names: list[str] = field(default_factory=list)
    """Workers that occur for the first time; workers are numbered in this order."""
    kinds: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    """Number of the sender of each event; 0 for the other kinds."""
    times: list[float] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of commands that the core returned to each event; a failed event has none."""
    digest: bytes = b""
    """Of all commands since the beginning of the term."""

    def begin_at(self, event: int) -> None:
        """Number the events from this one on."""
        self.first = event

    def pack(self) -> list[Any]:
        """The content of a block."""
        return [
            EVENTS,
            self.first,
            self.names,
            bytes(self.kinds),
            _pack_numbers(self.workers),
            _pack_times(self.times),
            _pack_numbers([len(data) for data in self.data]),
            b"".join(self.data),
            _pack_numbers(self.counts),
            self.digest,
        ]

    @classmethod
    def unpack(cls, content: Sequence[Any]) -> "EventBlock":
        """Raises ValueError or TypeError for content that is not one."""
        _, first, names, kinds, workers, times, lengths, joined, counts, digest = content
        data, at = [], 0
        for size in _unpack_numbers(lengths):
            data.append(joined[at : at + size])
            at += size
        numbers, answers = _unpack_numbers(workers), _unpack_numbers(counts)
        block = cls(first, list(names), list(kinds), numbers, _unpack_times(times), data, answers, digest)
        columns = (block.workers, block.times, block.data, block.counts)
        if any(len(column) != len(block.kinds) for column in columns) or at != len(joined):
            raise ValueError("the columns of a block have different lengths")
        return block


def _by_weight(raw: bytes, size: int) -> bytes:
    """Words of ``size`` bytes, by bytes of equal weight: of small numbers most are zero, next to each other."""
    return b"".join(raw[weight::size] for weight in range(size))


def _by_word(planes: bytes, size: int) -> bytes:
    """The inverse of `_by_weight`."""
    count, rest = divmod(len(planes), size)
    if rest:
        raise ValueError(f"a column is not a whole number of words of {size} bytes")
    raw = bytearray(len(planes))
    for weight in range(size):
        raw[weight::size] = planes[weight * count : (weight + 1) * count]
    return bytes(raw)


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    return _by_weight(array("I", numbers).tobytes(), _NUMBER_BYTES)


def _unpack_numbers(packed: bytes) -> list[int]:
    numbers = array("I")
    numbers.frombytes(_by_word(packed, _NUMBER_BYTES))
    return list(numbers)


def _pack_times(times: Sequence[float]) -> bytes:
    """Differences of successive times as 64-bit words: exact, and small."""
    words = array("Q")
    words.frombytes(array("d", times).tobytes())
    steps = [after - before & _MASK for before, after in zip([0, *words], words, strict=False)]
    return _by_weight(array("Q", steps).tobytes(), _WORD_BYTES)


def _unpack_times(packed: bytes) -> list[float]:
    steps = array("Q")
    steps.frombytes(_by_word(packed, _WORD_BYTES))
    words, word = array("Q"), 0
    for step in steps:
        word = word + step & _MASK
        words.append(word)
    times = array("d")
    times.frombytes(words.tobytes())
    return list(times)


# ---- events and commands


def event_kind(event: Event) -> int:
    """The number of the event's kind in a block."""
    return _NUMBER_OF[type(event)]


def event_data(event: Event) -> bytes:
    """An event as bytes; of a message, that message encoded."""
    if isinstance(event, MessageReceived):
        return encode(event.message)
    data: bytes = msgpack.packb(astuple(event), unicode_errors="surrogatepass")
    return data


def read_event(kind: int, worker: str, data: bytes) -> Event:
    """The event. Raises ValueError, TypeError, IndexError or FlowError for bytes that are none."""
    if kind == _MESSAGE:
        return MessageReceived(WorkerId(worker), decode(data))
    event: Event = _KINDS[kind](*msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass"))
    return event


class CommandDigest:
    """Digest of all commands of a core, in order: contents, and receivers of messages."""

    def __init__(self) -> None:
        self._contents = hashlib.sha256()
        self._receivers = hashlib.sha256()

    def add(self, receivers: Iterable[str], contents: Iterable[bytes | Command]) -> None:
        """Add commands.

        Args:
            receivers: the receiver of each message among them.
            contents: of each message its bytes, each other command as it is.
        """
        self._receivers.update("\n".join([*receivers, ""]).encode(errors="surrogatepass"))
        self._contents.update(b"".join([one if type(one) is bytes else _command_bytes(one) for one in contents]))

    def value(self) -> bytes:
        """The digest of everything added so far."""
        return hashlib.sha256(self._receivers.digest() + self._contents.digest()).digest()[:DIGEST_BYTES]


def digest_of(digest: CommandDigest, commands: Iterable[Command]) -> None:
    """Add commands that were not encoded yet."""
    known = list(commands)
    digest.add(
        [one.worker for one in known if type(one) is Send],
        [encode(one.message) if type(one) is Send else one for one in known],
    )


_IDENTITY: dict[type, Callable[[Any], object]] = {
    AppendLedger: attrgetter("prompt", "epoch", "state", "step", "reason", "reward"),
    GroupsOpened: attrgetter("group", "slot", "flow", "prompts", "epoch", "members"),
    StageCommitted: attrgetter("worker", "stage", "slots"),
    StageUndone: attrgetter("slot", "stage", "attempt"),
    GroupsClosed: attrgetter("groups", "slots"),
}
"""What is digested of the frequent commands and log entries: what else is in an entry is copied from the event."""


def _command_bytes(command: Any) -> bytes:
    record = command.entry if type(command) is AppendReplay else command
    identity = _IDENTITY.get(type(record))
    return repr(record if identity is None else (type(record).__name__, identity(record))).encode(
        errors="surrogatepass"
    )


# ---- headers


@cache
def sources_digest() -> str:
    """SHA-256 over the sources that decide: the packages flowrt.controller and flowrt.protocol."""
    root = Path(flowrt.__file__).parent
    digest = hashlib.sha256()
    for package in ("controller", "protocol"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def pack_header(header: Header) -> list[Any]:
    """The header as an item of a MessagePack array."""
    inputs, recovered = header.inputs, header.inputs.recovered
    kept = None
    if recovered is not None:
        entries = [(_ENTRIES.index(type(entry)), to_blob(entry)) for entry in recovered.entries]
        kept = [list(recovered.numbers.items()), list(recovered.members.items()), entries, [*recovered.dropped.items()]]
    return [
        header.version,
        header.sources,
        header.start_s,
        header.unix_s,
        inputs.config,
        inputs.term,
        to_blob(inputs.position),
        kept,
        [tuple(outcome) for outcome in inputs.outcomes],
    ]


def unpack_header(content: Sequence[Any]) -> Header:
    """Raises ValueError, TypeError, IndexError or FlowError for content that is not one."""
    version, sources, start_s, unix_s, config, term, position, kept, outcomes = content
    recovered = None
    if kept is not None:
        numbers, members, entries, dropped = kept
        known: list[GroupEntry] = [from_blob(_ENTRIES[kind], blob) for kind, blob in entries]
        recovered = RecoveredState(dict(numbers), dict(members), known, dict(dropped))
    inputs = CoreInputs(
        config=config,
        term=term,
        position=from_blob(Position, position),
        recovered=recovered,
        outcomes=tuple(Outcome(*outcome) for outcome in outcomes),
    )
    return Header(inputs=inputs, start_s=start_s, unix_s=unix_s, version=version, sources=sources)


# ---- blocks


class BlockPacker:
    """The compressed stream of one segment."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)

    def pack(self, content: Sequence[Any]) -> bytes:
        """The bytes of the next block."""
        raw = msgpack.packb(content, unicode_errors="surrogatepass")
        data = self._stream.compress(raw) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return _HEAD.pack(len(data), zlib.crc32(data)) + data


class BlockReader:
    """The blocks of one segment. What cannot be read raises FlowError that says how."""

    def __init__(self, path: Path) -> None:
        """Raises FlowError for a file that is no segment, OSError for one that cannot be read."""
        self._path = path
        self._file = path.open("rb")
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        if self._file.read(len(MAGIC)) != MAGIC:
            self._file.close()
            raise FlowError(f"{path} is not a segment of a recording, or its beginning is damaged")

    def read(self) -> list[Any] | None:
        """The content of the next block; None at the end of the segment."""
        at = self._file.tell()
        head = self._file.read(_HEAD.size)
        if not head:
            return None
        size, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (MAX_BLOCK_BYTES + 1, 0)
        data = self._file.read(size) if size <= MAX_BLOCK_BYTES else b""
        if len(data) != size:
            raise FlowError(f"{self._path} ends within a block, at byte {at}")
        if zlib.crc32(data) != checksum:
            raise FlowError(f"{self._path} is damaged: the checksum of the block at byte {at} is wrong")
        try:
            content = msgpack.unpackb(self._stream.decompress(data), use_list=False, unicode_errors="surrogatepass")
        except (zlib.error, ValueError, msgpack.UnpackException) as error:
            raise FlowError(f"{self._path} is damaged: the block at byte {at} cannot be read: {error}") from error
        return list(content)

    def close(self) -> None:
        self._file.close()
