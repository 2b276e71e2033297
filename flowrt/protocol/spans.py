"""Spans of work in a `Report`, packed: the controller passes them on to its accounting process without a look at them.

A record is a MessagePack array of at most `SPANS_IN_RECORD` spans, each an array in the order of the fields of `Span`.
"""

from collections.abc import Iterable
from functools import partial
from itertools import islice

import msgspec

from flowrt.runtime.timeline import Span

SPANS_IN_RECORD = 1000
MAX_KIND_CHARS = 100
"""Maximum length of the kind of a span, and of its root."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Span]).decode
_ARRAY_16 = 0xDC
_SMALL_ARRAY = 0x0F


def pack_spans(spans: Iterable[Span], offset_s: float = 0.0) -> tuple[bytes, ...]:
    """Pack spans into records; ``offset_s`` is added to their times."""
    shifted = (
        span._replace(
            kind=span.kind[:MAX_KIND_CHARS],
            start_s=span.start_s + offset_s,
            end_s=span.end_s + offset_s,
            root=span.root[:MAX_KIND_CHARS],
        )
        for span in spans
    )
    return tuple(map(_encode, iter(partial(_take, shifted), [])))


def _take(spans: Iterable[Span]) -> list[Span]:
    return list(islice(spans, SPANS_IN_RECORD))


def unpack_spans(record: bytes) -> list[Span]:
    """The spans of a record. Raises ValueError for bytes that are none."""
    return _decode(record)


def count_spans(record: bytes) -> int:
    """The number of spans that a record announces; 0 for bytes that are no record."""
    if record[:1] == bytes([_ARRAY_16]):
        return int.from_bytes(record[1:3])
    return record[0] & _SMALL_ARRAY if record and record[0] >> 4 == 0x9 else 0
