"""MessagePack encoding of messages: arrays ``[tag, field, field, ...]``, validated field by field.

- Sizes are limited before anything is allocated: in MessagePack a few bytes can announce a long array, arrays nest, and
  an item of two bytes becomes an object of fifty bytes. A message of up to 1 MiB can take at most about 80 MiB; the
  items of a larger message are counted first.
- Bytes that do not fit the declared types of a message raise RemoteProtocolError with the path of the field. Nothing is
  unpickled.
- Encoder and decoder of each record type are compiled from its field types on first use.
- A long integer column that occurs more than once in a message, as the same object, is packed once; later occurrences
  are back-references (its index among the columns so far), and decode to the same object.
- `to_blob` and `from_blob` encode records for storage, without a tag.
"""

import dataclasses
import struct
from collections.abc import Callable, Hashable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from flowrt.errors import FlowError, LocalProtocolError, RemoteProtocolError
from flowrt.protocol.messages import MAX_RECORD_BYTES, MAX_SIGNAL_BYTES, MESSAGES, Ints, Message, SameLength

References = list[Ints]
"""Columns of the present message that a back-reference may name, in field order; a repeated column is listed again."""
# Shorter columns cost as much to look up as to pack. The upper limits bound what a few bytes can expand to: 64 columns
# of 16k numbers are a million numbers in one message.
MIN_REFERENCE_ITEMS = 16
MAX_REFERENCE_ITEMS = 16 * 1024
MAX_REFERENCES = 64


def encode_reference(values: Ints, references: References) -> tuple[int] | None:
    """Add a column to the references. Returns a back-reference to an earlier occurrence; None: it must be packed."""
    if not MIN_REFERENCE_ITEMS <= len(values) <= MAX_REFERENCE_ITEMS or len(references) >= MAX_REFERENCES:
        return None
    index = next((index for index, earlier in enumerate(references) if earlier is values), None)
    references.append(values)
    return None if index is None else (index,)


def remember(values: Ints, references: References) -> Ints:
    """Add a decoded column to the references, if its length allows back-references, and return the column."""
    if MIN_REFERENCE_ITEMS <= len(values) <= MAX_REFERENCE_ITEMS and len(references) < MAX_REFERENCES:
        references.append(values)
    return values


def resolve_reference(raw: object, references: References) -> Ints | None:
    """The column that a back-reference names; None if ``raw`` is not a valid back-reference."""
    if type(raw) is not tuple or len(raw) != 1 or len(references) >= MAX_REFERENCES:
        return None
    index = raw[0]
    if type(index) is not int or not 0 <= index < len(references):
        return None
    references.append(references[index])
    return references[index]


class DecodeError(Exception):
    """Received data does not fit the declared type. The path of the field is completed while the error propagates."""

    def __init__(self, expected: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.path = ""

    def within(self, step: str) -> "DecodeError":
        """Prepend ``step`` to the path of the field, and return this error."""
        self.path = step + self.path
        return self


Encoder = Callable[[Any, References], Any]
Decoder = Callable[[Any, References], Any]
TAGS: dict[type, int] = {kind: tag for tag, kind in enumerate(MESSAGES)}
_ITEM_BYTES = 8
_INT64_MIN = -(2**63)
_INT64_MAX = 2**63 - 1
_SCALARS = (int, float, str, bytes, bool)
# Conditions, besides the type, under which a scalar is refused. A bytes field is a rendezvous key, and an item of a
# tuple of bytes a record of a sample: no message can carry a tensor.
_REFUSED_IF = {
    int: f" or not {_INT64_MIN} <= {{item}} <= {_INT64_MAX}",
    bytes: f" or len({{item}}) > {MAX_SIGNAL_BYTES}",
}
_ONLY_TEXT = {str}
_NO_BYTES = b""
_NO_VALUES = ()

_SCOPE: dict[str, Any] = {
    "no_values": _NO_VALUES,
    "no_bytes": _NO_BYTES,
    "int64_min": _INT64_MIN,
    "int64_max": _INT64_MAX,
}
for _code in "qd":
    _one = struct.Struct(f"<{_code}")
    _SCOPE |= {f"pack_{_code}": _one.pack, f"unpack_{_code}": _one.unpack}


# ---- records: compiled to one function each


@cache
def record_encoder(kind: type) -> Encoder:
    """A function from a record to the tuple that is packed for it; of a message, the tag comes first."""
    lines = [
        "def compiled(value, references):",
        "    if type(value) is not kind:",
        "        raise_type_error(value, kind)",
    ]
    scope: dict[str, Any] = {
        **_SCOPE,
        "kind": kind,
        "raise_type_error": _raise_type_error,
        "scalar": _scalar,
        "tag": TAGS.get(kind),
    }
    items = ["tag"] if kind in TAGS else []
    for number, (name, hint) in enumerate(_fields(kind)):
        if hint in _SCALARS:
            scope[f"type{number}"] = hint
            lines += [
                f"    item{number} = value.{name}",
                f"    if type(item{number}) is not type{number}:",
                f"        item{number} = scalar(item{number}, type{number})",
            ]
        else:
            scope[f"encode{number}"] = _encoder(hint)
            shortcuts = _encoder_shortcuts(hint, number, scope) + _constant_to_scalar(hint)
            lines += [
                f"    item = value.{name}",
                f"    item{number} = {shortcuts}encode{number}(item, references)",
            ]
        items.append(f"item{number}")
    lines += [f"    return ({''.join(f'{item}, ' for item in items)})"]
    return _compiled(lines, scope)


@cache
def record_decoder(kind: type) -> Decoder:
    """A function from an unpacked tuple (of a message, with its tag) to the record. Raises DecodeError."""
    fields = _fields(kind)
    names = [name for name, _ in fields]
    items = (["tag"] if kind in TAGS else []) + [f"item{number}" for number in range(len(fields))]
    lines = [
        "def compiled(raw, references):",
        f"    if type(raw) is not tuple or len(raw) != {len(items)}:",
        f"        raise DecodeError('an array of {len(fields)} fields')",
        f"    {''.join(f'{item}, ' for item in items)} = raw" if items else "    pass",
    ]
    scope: dict[str, Any] = {**_SCOPE, "kind": kind, "DecodeError": DecodeError, "scalar_error": _scalar_error}
    for number, (name, hint) in enumerate(fields):
        if hint in _SCALARS:
            scope[f"type{number}"] = hint
            refused = _REFUSED_IF.get(hint, "").format(item=f"item{number}")
            lines += [
                f"    if type(item{number}) is not type{number}{refused}:",
                f"        raise scalar_error(item{number}, type{number}).within('.{name}')",
            ]
        else:
            scope[f"decode{number}"] = _decoder(hint)
            shortcuts = _decoder_shortcuts(hint) + _scalar_to_constant(hint, names)
            lines += [
                f"    item = item{number}",
                "    try:",
                f"        item{number} = {shortcuts}decode{number}(item, references)",
                "    except DecodeError as error:",
                f"        raise error.within('.{name}')",
            ]
    lines += [f"    return kind({', '.join(f'item{number}' for number in range(len(fields)))})"]
    return _compiled(lines, scope)


def _encoder_shortcuts(hint: Any, number: int, scope: dict[str, Any]) -> str:
    """Conditional expressions for the most frequent values: an empty tuple, one number, one text or one record."""
    if get_origin(hint) is Annotated:
        single = f"pack_{hint.__metadata__[0]}(item[0]) if type(item) is tuple and len(item) == 1 else "
        return f"no_bytes if item is no_values else {single}"
    if get_args(hint)[-1:] != (Ellipsis,):
        return ""
    inner = get_args(hint)[0]
    empty = "item if item is no_values else "
    if inner is str:
        return f"{empty}item if type(item) is tuple and len(item) == 1 and type(item[0]) is str else "
    if dataclasses.is_dataclass(inner):
        scope[f"record{number}"] = record_encoder(inner)  # type: ignore[arg-type]
        return f"{empty}(record{number}(item[0], references),) if type(item) is tuple and len(item) == 1 else "
    return empty


def _decoder_shortcuts(hint: Any) -> str:
    """The counterparts of `_encoder_shortcuts` for encoded values."""
    if get_origin(hint) is Annotated:
        single = f"unpack_{hint.__metadata__[0]}(item) if type(item) is bytes and len(item) == {_ITEM_BYTES} else "
        return f"no_values if item is no_bytes else {single}"
    if get_args(hint)[-1:] != (Ellipsis,):
        return ""
    empty = "item if item is no_values else "
    if get_args(hint)[0] is str:
        return f"{empty}item if type(item) is tuple and len(item) == 1 and type(item[0]) is str else "
    return empty


def _constant_to_scalar(hint: Any) -> str:
    """A column of equal numbers is encoded as that number, if another field of the record determines its length."""
    other = _same_length_field(hint)
    if other is None:
        return ""
    maybe = f"type(item) is tuple and len(item) > 1 and item[0] == item[-1] and len(item) == len(value.{other})"
    equal = "item.count(item[0]) == len(item) and type(item[0]) is int and int64_min <= item[0] <= int64_max"
    return f"item[0] if {maybe} and {equal} else "


def _scalar_to_constant(hint: Any, names: list[str]) -> str:
    other = _same_length_field(hint)
    if other is None:
        return ""
    length = f"len(item{names.index(other)})"  # length of an earlier field, which is decoded already
    return f"(item,) * {length} if type(item) is int and int64_min <= item <= int64_max else "


def _same_length_field(hint: Any) -> str | None:
    return next(
        (annotation.field for annotation in getattr(hint, "__metadata__", ()) if isinstance(annotation, SameLength)),
        None,
    )


def _fields(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _compiled(lines: list[str], scope: dict[str, Any]) -> Callable[[Any, References], Any]:
    exec("\n".join(lines), scope)  # noqa: S102 (names come from our own declarations, never from a peer)
    function: Callable[[Any, References], Any] = scope["compiled"]
    return function


# ---- other types: composed of functions


def _raise_type_error(value: Any, hint: type) -> None:
    raise TypeError(f"expected {hint.__name__}, got {type(value).__name__} {value!r:.80}")


def _scalar(value: Any, hint: type) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _raise_type_error(value, hint)


def _sequence(values: Any) -> Any:
    if not isinstance(values, tuple | list):
        raise TypeError(f"expected tuple, got {type(values).__name__} {values!r:.80}")
    return values


def _encoder(hint: Any) -> Encoder:
    if get_origin(hint) is Annotated:
        return _packed_encoder(hint.__metadata__[0])
    if dataclasses.is_dataclass(hint):
        return record_encoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _tuple_encoder(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        inner = _encoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda value, references: None if value is None else inner(value, references)
    return lambda value, references: _scalar(value, hint)  # noqa: ARG005


def _packed_encoder(code: str) -> Encoder:
    is_integer = code == "q"

    def encode_packed(values: Any, references: References) -> Any:
        if is_integer and (reference := encode_reference(_sequence(values), references)) is not None:
            return reference
        return struct.pack(f"<{len(_sequence(values))}{code}", *values) if values != () else _NO_BYTES

    return encode_packed


def _tuple_encoder(arguments: tuple[Any, ...]) -> Encoder:
    if arguments[-1] is not Ellipsis:
        encoders = [_encoder(argument) for argument in arguments]
        return lambda values, references: [
            encoder(value, references) for encoder, value in zip(encoders, _sequence(values), strict=True)
        ]
    inner = _encoder(arguments[0])
    if arguments[0] is str:
        # Checks the types of all items at once, and one by one only to name the wrong item.
        return lambda values, references: (
            values if {*map(type, _sequence(values))} <= _ONLY_TEXT else [inner(value, references) for value in values]
        )
    if get_origin(arguments[0]) is Annotated:
        return lambda values, references: [
            _NO_BYTES if value is _NO_VALUES else inner(value, references) for value in _sequence(values)
        ]
    return lambda values, references: [inner(value, references) for value in _sequence(values)]


def _scalar_error(raw: Any, hint: type) -> DecodeError:
    if hint is bytes and isinstance(raw, bytes):
        return DecodeError(f"at most {MAX_SIGNAL_BYTES} bytes, not {len(raw)}")
    bits = " of 64 bits" if hint is int else ""
    return DecodeError(f"{hint.__name__}{bits}, not {type(raw).__name__}")


def _decoder(hint: Any) -> Decoder:
    if get_origin(hint) is Annotated:
        return _packed_decoder(hint.__metadata__[0])
    if dataclasses.is_dataclass(hint):
        return record_decoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        arguments = get_args(hint)
        return _many_decoder(arguments[0]) if arguments[-1] is Ellipsis else _fixed_decoder(arguments)
    if get_origin(hint) in (Union, UnionType):
        inner = _decoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda raw, references: None if raw is None else inner(raw, references)

    def decode_scalar(raw: Any, references: References) -> Any:  # noqa: ARG001
        if type(raw) is not hint or (hint is int and not _INT64_MIN <= raw <= _INT64_MAX):
            raise _scalar_error(raw, hint)
        if type(raw) is bytes and len(raw) > MAX_RECORD_BYTES:
            raise DecodeError(f"at most {MAX_RECORD_BYTES} bytes, not {len(raw)}")
        return raw

    return decode_scalar


def _packed_decoder(code: str) -> Decoder:
    is_integer = code == "q"

    def decode_packed(raw: Any, references: References) -> Any:
        if is_integer and (column := resolve_reference(raw, references)) is not None:
            return column
        if type(raw) is not bytes or len(raw) % _ITEM_BYTES:
            raise DecodeError("packed 8-byte items")
        values = struct.unpack(f"<{len(raw) // _ITEM_BYTES}{code}", raw) if raw else _NO_VALUES
        return remember(values, references) if is_integer else values

    return decode_packed


def _many_decoder(item: Any) -> Decoder:
    inner = _decoder(item)
    is_text = item is str
    is_packed = get_origin(item) is Annotated

    def decode_many(raw: Any, references: References) -> Any:
        if type(raw) is not tuple:
            raise DecodeError("an array")
        if not raw or (is_text and {*map(type, raw)} == _ONLY_TEXT):
            return raw
        before = len(references)
        try:
            if is_packed:
                return tuple([_NO_VALUES if encoded is _NO_BYTES else inner(encoded, references) for encoded in raw])
            return tuple([inner(encoded, references) for encoded in raw])
        except DecodeError:
            del references[before:]
            return _one_by_one([inner] * len(raw), raw, references)

    return decode_many


def _fixed_decoder(arguments: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(argument) for argument in arguments]

    def decode_fixed(raw: Any, references: References) -> Any:
        if type(raw) is not tuple or len(raw) != len(decoders):
            raise DecodeError(f"an array of {len(decoders)}")
        return _one_by_one(decoders, raw, references)

    return decode_fixed


def _one_by_one(decoders: list[Decoder], raw: tuple[Any, ...], references: References) -> tuple[Any, ...]:
    """Decode the items in a loop, so that an error names the index of its item."""
    items = []
    for index, (decoder, encoded) in enumerate(zip(decoders, raw, strict=True)):
        try:
            items.append(decoder(encoded, references))
        except DecodeError as error:
            raise error.within(f"[{index}]") from None
    return tuple(items)


# ---- messages and blobs

Record = TypeVar("Record")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_KEEP_BUFFER_BYTES = 1024 * 1024
_pack = msgpack.Packer(use_bin_type=True).pack
_encoders: dict[type, Encoder] = {}
_decoders: dict[int, Decoder] = {}


def encode(message: Message) -> bytes:
    """Encode a message.

    Raises LocalProtocolError if a value does not have the declared type of its field, if this is no message, or if it
    has more than MAX_MESSAGE_BYTES.
    """
    global _pack
    kind: type = type(message)
    encoder = _encoders.get(kind)
    if encoder is None:
        if kind not in TAGS:
            raise LocalProtocolError(f"{kind.__name__} is not a message; see protocol/messages.py for those that are")
        encoder = _encoders[kind] = record_encoder(kind)
    try:
        data: bytes = _pack(encoder(message, []))
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise LocalProtocolError(f"{kind.__name__} cannot be encoded: {error}") from error
    if len(data) > _KEEP_BUFFER_BYTES:
        # A packer keeps a buffer as large as its largest message: a single large message would occupy memory for good.
        _pack = msgpack.Packer(use_bin_type=True).pack
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"{kind.__name__} has {len(data)} bytes, over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Decode and validate a message. Raises RemoteProtocolError when the bytes are not a valid message."""
    size = len(data)
    if size > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if size > SMALL_BYTES:
        check_bounds(data)
    try:
        raw = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_array_len=size if size < MAX_ITEMS else MAX_ITEMS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"{size} bytes are not a MessagePack message: {error}") from error
    if type(raw) is not tuple or not raw or type(tag := raw[0]) is not int or not 0 <= tag < len(MESSAGES):
        raise RemoteProtocolError("a message must be an array that begins with a known tag")
    decoder = _decoders.get(tag)
    if decoder is None:
        kind: type = MESSAGES[tag]
        decoder = _decoders[tag] = record_decoder(kind)
    try:
        return decoder(raw, [])  # type: ignore[no-any-return]
    except DecodeError as error:
        raise RemoteProtocolError(f"{MESSAGES[tag].__name__}{error.path} must be {error.expected}") from None


def to_blob(record: Any) -> bytes:
    """Encode a record for storage. Raises TypeError if a scalar does not have the declared type of its field."""
    data: bytes = _pack(record_encoder(cast(Hashable, type(record)))(record, []))
    return data


def from_blob(kind: type[Record], data: bytes) -> Record:
    """Decode a record from storage. Raises FlowError when the bytes are not a record of this kind."""
    try:
        record: Record = record_decoder(cast(Hashable, kind))(msgpack.unpackb(data, use_list=False), [])
    except (DecodeError, ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise FlowError(f"{len(data)} bytes are not a {kind.__name__}: {error}") from error
    return record


# ---- limits of a message before it is unpacked

MAX_ITEMS = 1_000_000
MAX_DEPTH = 16
SMALL_BYTES = 1024
_COUNT_FROM_BYTES = 1024 * 1024
# By first byte, from 0xc0 on: bytes of the length field that follows, or of the value that follows.
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_VALUE_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_ARRAY_BYTES = {0xDC: 2, 0xDD: 4}
_PLAIN = (0xC0, 0xC2, 0xC3)


def check_bounds(data: bytes) -> None:
    """Check a message of more than SMALL_BYTES before it is unpacked.

    Raises RemoteProtocolError if the message is cut short, or has more than 1 MiB and exceeds MAX_ITEMS or MAX_DEPTH.
    """
    if len(data) > _COUNT_FROM_BYTES:
        _check_items(data)
    elif len(data) > SMALL_BYTES:
        # Skipping allocates nothing, and fails when an array is longer than the data.
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data)
        try:
            unpacker.skip()
        except (ValueError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"{len(data)} bytes are not a MessagePack message: {error}") from error


def _check_items(data: bytes) -> None:
    """Scan the items without creating them. Raises RemoteProtocolError beyond MAX_ITEMS or MAX_DEPTH."""
    size = len(data)
    at = 0
    items = 0
    left = 1  # items left of the innermost open array
    open_arrays: list[int] = []
    while left or open_arrays:
        if not left:
            left = open_arrays.pop()
            continue
        items += 1
        left -= 1
        if at >= size or items > MAX_ITEMS:
            raise RemoteProtocolError(
                f"{size} bytes are not a message: they end early or have more than {MAX_ITEMS} items"
            )
        first = data[at]
        at += 1
        if first <= 0x7F or first >= 0xE0 or first in _PLAIN:
            continue
        if first in _LENGTH_BYTES:
            width = _LENGTH_BYTES[first]
            at += width + int.from_bytes(data[at : at + width], "big")
        elif 0xA0 <= first <= 0xBF:
            at += first & 0x1F
        elif first in _VALUE_BYTES:
            at += _VALUE_BYTES[first]
        elif 0x90 <= first <= 0x9F or first in _ARRAY_BYTES:
            width = _ARRAY_BYTES.get(first, 0)
            open_arrays.append(left)
            left = int.from_bytes(data[at : at + width], "big") if width else first & 0x0F
            at += width
            if len(open_arrays) > MAX_DEPTH:
                raise RemoteProtocolError(
                    f"{size} bytes are not a message: arrays are nested more than {MAX_DEPTH} deep"
                )
        else:
            raise RemoteProtocolError(
                f"{size} bytes are not a message: byte {at - 1} has a type that messages do not use"
            )
