"""Records of samples that are stored: which samples, what workers send of them, and how texts are packed.

- Whole groups are chosen by a hash of (seed, epoch, prompt), so workers choose the same groups without communication.
- A record is an item of `SampleRecords`, validated where it is stored: a malformed record is dropped and counted, and
  its sender stays in the run.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from math import isfinite

from msgspec.structs import replace

from flowrt.errors import FlowError
from flowrt.protocol.codec import from_blob, to_blob
from flowrt.protocol.messages import LARGEST_PROMPT, MAX_RECORD_BYTES, Int, Ints, ProtocolRecord, SampleRecords

MAX_MESSAGE_RECORD_BYTES = 256 * 1024
"""Limit of the records of one message, unless it has a single longer one."""
MAX_TEXT_CHARS = 1_000_000
"""A longer text is cut in the middle."""
SHORT_TEXT_CHARS = 20_000
"""If a record would be too long, its texts are cut to this length."""
MAX_REASON_CHARS = 500
MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARS + 4096
"""Bound on a text when it is decompressed: no character takes more than four bytes."""
MAX_TOKENS = 16_777_216
COMPRESS_FROM_BYTES = 512
"""Shorter texts are not compressed: compression saves too little space for its time."""
TRAIN, EVAL = "train", "eval"
FINISHES = ("stop", "length", "stop_string", "aborted")
_PLAIN, _COMPRESSED = b"t", b"z"


class ScoredSample(ProtocolRecord):
    """Record of a reward worker: a sample with its reward."""

    flow: str  # TRAIN or EVAL
    eval_name: str  # data set of the evaluation; empty for training
    epoch: Int
    prompt: Int
    member: Int
    attempt: Int
    reward: float
    parts: tuple[tuple[str, float], ...]
    finish: str  # one of FINISHES
    reason: str  # how the reward failed, "RESULT: a sentence"; empty if it did not
    is_single: bool  # chosen alone, not with its group
    spans: Ints  # version, tokens, version, tokens, ...
    reward_s: float  # duration of the reward's computation
    data: tuple[bytes, bytes, bytes]  # prompt and completion, see `pack_text`; token ids, int32


class GeneratedSample(ProtocolRecord):
    """Record of a rollout worker: a sample of a chosen group."""

    epoch: Int
    prompt: Int
    member: Int
    attempt: Int
    generate_s: float


class TrainedSample(ProtocolRecord):
    """Record of a trainer: a sample of a chosen group."""

    step: Int
    epoch: Int
    prompt: Int
    member: Int
    attempt: Int
    advantage: float
    data: tuple[bytes, bytes]  # log-probabilities of the rollout worker and of the trainer, float16; empty if unknown


SampleRecord = ScoredSample | GeneratedSample | TrainedSample
_HEADER = struct.Struct("<?qq")
"""Follows the first byte of a record: whether it is stored with its group, and the epoch and prompt of that."""
_KINDS: dict[type, bytes] = {ScoredSample: b"s", GeneratedSample: b"g", TrainedSample: b"t"}
"""The first byte of a record."""


class GroupChoice:
    """Decides by (epoch, prompt) whether a group is stored."""

    def __init__(self, *, seed: int, share: float) -> None:
        """``share``: the fraction of groups to store, in [0, 1]; ``seed``: that of the hash."""
        self._seed = seed
        self._below = round(min(max(share, 0.0), 1.0) * 2**64)

    def __call__(self, epoch: int, prompt: int) -> bool:
        key = struct.pack("<3q", self._seed, epoch, prompt)
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") < self._below


# ---- texts


def pack_text(text: str) -> bytes:
    """Encode a text for a record, cut to MAX_TEXT_CHARS.

    It is compressed if that is smaller, and if the text is not valid Unicode or has a NUL.
    """
    text = _cut(text, MAX_TEXT_CHARS)
    if not _is_plain(text):  # joins pairs of surrogates into one character, as JSON does
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    data = text.encode(errors="surrogatepass")
    if len(data) < COMPRESS_FROM_BYTES and _is_plain(text):
        return _PLAIN + data
    packed = zlib.compress(data, 1)
    return _COMPRESSED + packed if len(packed) < len(data) or not _is_plain(text) else _PLAIN + data


def _cut(text: str, most: int) -> str:
    """The text, or ``most`` / 2 characters each of its start and its end."""
    half = most // 2
    if len(text) <= most:
        return text
    return f"{text[:half]} [... {len(text) - 2 * half} characters are left out ...] {text[-half:]}"


def _is_plain(text: str) -> bool:
    """Whether SQLite stores the text unchanged: valid Unicode without NUL, at which SQLite's functions end a text."""
    if text.isascii():
        return "\0" not in text
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def stored_text(packed: bytes) -> bytes | str:
    """What the store keeps of an output of `pack_text`: text or compressed bytes. Raises FlowError if it is invalid."""
    kind, data = packed[:1], packed[1:]
    if kind == _PLAIN:
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise FlowError(f"{len(packed)} bytes are not a text of a sample: {error}") from error
        if _is_plain(text):
            return text
    elif kind == _COMPRESSED:
        unpack_text(data)
        return data
    raise FlowError(f"{len(packed)} bytes are not a text of a sample")


def unpack_text(kept: bytes | str) -> str:
    """The text of an output of `stored_text`. Raises FlowError if its bytes are damaged."""
    if isinstance(kept, str):
        return kept
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(kept, MAX_TEXT_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError(f"it is not complete, or longer than {MAX_TEXT_BYTES} bytes")
        return data.decode(errors="surrogatepass")
    except (zlib.error, ValueError) as error:
        raise FlowError(f"a text of a sample is damaged: {error}") from error


# ---- records


def encode_record(record: SampleRecord) -> bytes | None:
    """The bytes of a record; None if they exceed MAX_RECORD_BYTES even after the record is shortened.

    A scored sample that is too long loses its token ids, then the middle of its texts; a trained sample its
    log-probabilities.
    """
    with_group = not isinstance(record, ScoredSample) or (record.flow == TRAIN and not record.is_single)
    kind = _KINDS[type(record)] + _HEADER.pack(with_group, record.epoch, record.prompt)
    data = kind + to_blob(record)
    if len(data) > MAX_RECORD_BYTES and isinstance(record, ScoredSample):
        prompt, completion, _ = record.data
        data = kind + to_blob(replace(record, data=(prompt, completion, b"")))
        if len(data) > MAX_RECORD_BYTES:
            short = [
                pack_text(_cut(unpack_text(stored_text(packed)), SHORT_TEXT_CHARS)) for packed in (prompt, completion)
            ]
            data = kind + to_blob(replace(record, data=(*short, b"")))
    elif len(data) > MAX_RECORD_BYTES and isinstance(record, TrainedSample):
        data = kind + to_blob(replace(record, data=(b"", b"")))
    return data if len(data) <= MAX_RECORD_BYTES else None


def group_of(data: bytes) -> tuple[int, int] | None:
    """Epoch and prompt of the group that a record is stored with; None if it is stored alone.

    Raises FlowError if these bytes are too short for a record.
    """
    if len(data) < 1 + _HEADER.size:
        raise FlowError(f"{len(data)} bytes are not a record of a sample")
    with_group, epoch, prompt = _HEADER.unpack_from(data, 1)
    return (epoch, prompt) if with_group else None


def decode_record(data: bytes) -> SampleRecord:
    """The record of these bytes. Raises FlowError if they are not a valid record."""
    blob = data[1 + _HEADER.size :]
    match data[:1]:
        case b"s":
            scored = from_blob(ScoredSample, blob)
            _check_scored(scored)
            return scored
        case b"g":
            generated = from_blob(GeneratedSample, blob)
            _check_key(generated)
            if not 0 <= generated.generate_s < float("inf"):
                raise FlowError("a record of a generated sample has an impossible time")
            return generated
        case b"t":
            trained = from_blob(TrainedSample, blob)
            _check_key(trained)
            if trained.step < 0 or not isfinite(trained.advantage) or any(len(column) % 2 for column in trained.data):
                raise FlowError("a record of a trained sample has an impossible step, advantage or log-probability")
            return trained
    raise FlowError(f"{len(data)} bytes are not a record of a sample")


def _check_key(record: SampleRecord) -> None:
    for number in (record.epoch, record.prompt, record.member, record.attempt):
        if not 0 <= number <= LARGEST_PROMPT:
            raise FlowError(f"a record of a sample has the number {number}")


def _check_scored(record: ScoredSample) -> None:
    _check_key(record)
    numbers = (record.reward, record.reward_s, *(value for _, value in record.parts))
    if not all(map(isfinite, numbers)):
        raise FlowError("a record of a sample has a number that is not finite")
    if record.flow not in (TRAIN, EVAL) or record.finish not in FINISHES or len(record.reason) > MAX_REASON_CHARS:
        raise FlowError("a record of a sample has an unknown flow or finish, or a long reason")
    if len(record.spans) % 2 or not record.spans or min(record.spans) < 0 or len(record.data[2]) % 4:
        raise FlowError("a record of a sample has impossible spans or token ids")
    if sum(record.spans[1::2]) > MAX_TOKENS:
        raise FlowError(f"a record of a sample has {sum(record.spans[1::2])} tokens")


def messages(records: Iterable[bytes]) -> Iterator[SampleRecords]:
    """The records in messages of at most MAX_MESSAGE_RECORD_BYTES of records each; a longer record has its own."""
    batch: list[bytes] = []
    size = 0
    for record in records:
        if batch and size + len(record) > MAX_MESSAGE_RECORD_BYTES:
            yield SampleRecords(tuple(batch))
            batch, size = [], 0
        batch.append(record)
        size += len(record)
    if batch:
        yield SampleRecords(tuple(batch))
