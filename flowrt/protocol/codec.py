"""MessagePack encoding of messages: arrays ``[tag, field, field, ...]``, by msgspec, validated field by field.

- Bytes that do not fit the declared types of a message raise RemoteProtocolError with the path of the field. Nothing is
  unpickled.
- An item of two bytes becomes an object of up to 80 bytes: the items of a message that may have more than MAX_ITEMS
  are counted before it is decoded, so that it takes at most about 400 MB. Messages nest no deeper than their types.
- `to_blob` and `from_blob` encode records for storage, without a tag.
"""

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from flowrt.errors import FlowError, LocalProtocolError, RemoteProtocolError
from flowrt.protocol.messages import MESSAGES, Message, ProtocolRecord

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_ITEMS = 4 * 1024 * 1024
"""Limit of the items of a message: each number, text and array is one."""
TAGS: dict[type, int] = {kind: cast(int, kind.__struct_config__.tag) for kind in MESSAGES}
AnyRecord = TypeVar("AnyRecord", bound=ProtocolRecord)


def _number(value: Any) -> int | float:
    """A number of numpy or torch as one of Python. Raises TypeError for other values."""
    try:
        return operator.index(value)
    except TypeError:
        return float(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_number).encode
_decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode


def encode(message: Message) -> bytes:
    """Encode a message, without a check of the types of its fields.

    Raises LocalProtocolError if this is no message, has a value that MessagePack lacks, or more than MAX_MESSAGE_BYTES
    or MAX_ITEMS.
    """
    name = type(message).__name__
    if type(message) not in TAGS:
        raise LocalProtocolError(f"{name} is not a message; see protocol/messages.py for those that are")
    try:
        data = _encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{name} cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"{name} has {len(data)} bytes, over the limit of {MAX_MESSAGE_BYTES}")
    if len(data) > MAX_ITEMS and not _has_few_items(data):
        raise LocalProtocolError(f"{name} has over {MAX_ITEMS} numbers, texts and arrays, which is the limit")
    return data


def encode_checked(message: Message) -> bytes:
    """As `encode`, for values of a user: raises LocalProtocolError too for a message that its receiver would refuse."""
    data = encode(message)
    try:
        decode(data)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
    return data


def decode(data: bytes) -> Message:
    """Decode and validate a message. Raises RemoteProtocolError when the bytes are not a valid message."""
    size = len(data)
    if size > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if size > MAX_ITEMS and not _has_few_items(data):
        raise RemoteProtocolError(f"{size} bytes are not a message of at most {MAX_ITEMS} items")
    try:
        return _decode(data)
    except msgspec.ValidationError as error:
        tag = data[3:4] if data[0] == _ARRAY16 else data[1:2]
        known = tag and tag[0] < len(MESSAGES)
        what = _explain(MESSAGES[tag[0]], error) if known else str(error)
        raise RemoteProtocolError(f"{size} bytes are not a message: {what}") from None
    except ValueError as error:
        raise RemoteProtocolError(f"{size} bytes are not a MessagePack message: {error}") from error


def to_blob(record: ProtocolRecord) -> bytes:
    """Encode a record for storage. Raises TypeError for a value that MessagePack lacks."""
    return _encode(record)


def from_blob(kind: type[AnyRecord], data: bytes) -> AnyRecord:
    """Decode a record from storage. Raises FlowError when the bytes are not a record of this kind."""
    try:
        record: AnyRecord = _decoder(kind).decode(data)
    except ValueError as error:
        raise FlowError(f"{len(data)} bytes are not a {kind.__name__}: {_explain(kind, error)}") from error
    return record


@cache
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _explain(kind: Any, error: Exception) -> str:
    """The text of a msgspec error with the names of fields: ``Commit.parts[1].ids: Expected ...``."""
    text, _, path = str(error).partition(" - at `$")
    name = kind.__name__
    for step in map(int, re.findall(r"\d+", path)):
        if get_origin(kind) is tuple:
            items = get_args(kind)
            kind = items[0] if Ellipsis in items else items[step]
            name += f"[{step}]"
        elif step >= (first := kind in TAGS):
            field = msgspec.structs.fields(kind)[step - first]
            kind = field.type
            name += f".{field.name}"
    return f"{name}: {text}"


# ---- limits of a message before it is decoded

_ARRAY16 = 0xDC
_ARRAY_BYTES = {_ARRAY16: 2, 0xDD: 4}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_VALUE_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_STEPS = [1 + (first & 0x1F if 0xA0 <= first < 0xC0 else _VALUE_BYTES.get(first, 0)) for first in range(256)]
"""Bytes of an item by its first byte, without the items of an array and the content of a text or bytes of variable
length."""


def _has_few_items(data: bytes) -> bool:
    """Whether these are at most MAX_ITEMS items, and those that arrays announce. Counts without creating them."""
    at = items = 0
    announced = 1
    while at < len(data) and items <= MAX_ITEMS:
        first = data[at]
        items += 1
        at += _STEPS[first]
        if 0x90 <= first <= 0x9F:
            announced += first & 0x0F
        elif width := _ARRAY_BYTES.get(first, 0):
            announced += int.from_bytes(data[at : at + width], "big")
            at += width
        elif width := _LENGTH_BYTES.get(first, 0):
            at += width + int.from_bytes(data[at : at + width], "big")
    return at == len(data) and items <= MAX_ITEMS and items == announced
