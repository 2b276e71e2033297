"""Messages to bytes and back: MessagePack arrays ``[tag, field, field, …]``, checked field by field.

Bytes from a peer are never trusted: sizes are limited before anything is allocated, and whatever does not fit a
message's declared types raises RemoteProtocolError with the path of the field. Nothing is ever unpickled.
"""

import dataclasses
import struct
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack

from flowrt.errors import LocalProtocolError, RemoteProtocolError
from flowrt.wire.messages import MESSAGES, Message

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_ITEMS = 1_000_000

Encoder = Callable[[Any], Any]
Decoder = Callable[[Any, str], Any]
_TAGS: dict[type, int] = {kind: tag for tag, kind in enumerate(MESSAGES)}
_ITEM_BYTES = 8


def encode(message: Message) -> bytes:
    """Pack a message. Raises LocalProtocolError when a field holds what its type does not allow."""
    kind: type = type(message)
    tag = _TAGS.get(kind)
    if tag is None:
        raise LocalProtocolError(f"{kind.__name__} is not a message; see wire/messages.py for those that are")
    try:
        data: bytes = msgpack.packb([tag, *_record_encoder(kind)(message)], use_bin_type=True)
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise LocalProtocolError(f"{kind.__name__} cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"{kind.__name__} has {len(data)} bytes, over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Unpack and validate one message. Raises RemoteProtocolError on anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        raw = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_array_len=min(MAX_ITEMS, len(data)),
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise RemoteProtocolError(f"{len(data)} bytes are not a MessagePack message: {error}") from error
    if not isinstance(raw, tuple) or not raw or type(raw[0]) is not int or not 0 <= raw[0] < len(MESSAGES):
        raise RemoteProtocolError("a message must be an array that begins with a known tag")
    kind: type = MESSAGES[raw[0]]
    message: Message = _record_decoder(kind)(raw[1:], kind.__name__)
    return message


@cache
def _record_encoder(kind: type) -> Callable[[Any], list[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    fields = [(field.name, _encoder(hints[field.name])) for field in dataclasses.fields(kind)]

    def encode_record(value: Any) -> list[Any]:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__} {value!r:.80}")
        return [field_encoder(getattr(value, name)) for name, field_encoder in fields]

    return encode_record


@cache
def _record_decoder(kind: type) -> Decoder:
    hints = get_type_hints(kind, include_extras=True)
    fields = [(f"{field.name}", _decoder(hints[field.name])) for field in dataclasses.fields(kind)]

    def decode_record(raw: Any, path: str) -> Any:
        if type(raw) is not tuple or len(raw) != len(fields):
            raise RemoteProtocolError(f"{path} must be an array of {len(fields)} fields")
        return kind(*[decoder(item, f"{path}.{name}") for (name, decoder), item in zip(fields, raw, strict=True)])

    return decode_record


def _encoder(hint: Any) -> Encoder:
    if get_origin(hint) is Annotated:
        code = hint.__metadata__[0]
        return lambda values: struct.pack(f"<{len(values)}{code}", *_sequence(values))
    if dataclasses.is_dataclass(hint):
        return _record_encoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        arguments = get_args(hint)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            item_encoder = _encoder(arguments[0])
            return lambda values: [item_encoder(value) for value in _sequence(values)]
        encoders = [_encoder(argument) for argument in arguments]
        return lambda values: [one(value) for one, value in zip(encoders, _sequence(values), strict=True)]
    if get_origin(hint) in (Union, UnionType):
        inner = _encoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda value: None if value is None else inner(value)
    return _scalar_encoder(hint)


def _sequence(values: Any) -> Any:
    if not isinstance(values, tuple | list):
        raise TypeError(f"expected tuple, got {type(values).__name__} {values!r:.80}")
    return values


def _scalar_encoder(hint: Any) -> Encoder:
    def check(value: Any) -> Any:
        if type(value) is hint or (hint is float and type(value) is int):
            return float(value) if hint is float else value
        raise TypeError(f"expected {hint.__name__}, got {type(value).__name__} {value!r:.80}")

    return check


def _decoder(hint: Any) -> Decoder:
    if get_origin(hint) is Annotated:
        return _packed_decoder(hint.__metadata__[0])
    if dataclasses.is_dataclass(hint):
        return _record_decoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _tuple_decoder(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        inner = _decoder(next(argument for argument in get_args(hint) if argument is not NoneType))
        return lambda raw, path: None if raw is None else inner(raw, path)

    def decode_scalar(raw: Any, path: str) -> Any:
        if type(raw) is not hint:
            raise RemoteProtocolError(f"{path} must be {hint.__name__}, not {type(raw).__name__}")
        return raw

    return decode_scalar


def _packed_decoder(code: str) -> Decoder:
    def decode_packed(raw: Any, path: str) -> Any:
        if type(raw) is not bytes or len(raw) % _ITEM_BYTES:
            raise RemoteProtocolError(f"{path} must be packed 8-byte items")
        return struct.unpack(f"<{len(raw) // _ITEM_BYTES}{code}", raw)

    return decode_packed


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item_decoder = _decoder(arguments[0])

        def decode_many(raw: Any, path: str) -> Any:
            if type(raw) is not tuple:
                raise RemoteProtocolError(f"{path} must be an array")
            return tuple([item_decoder(item, f"{path}[{index}]") for index, item in enumerate(raw)])

        return decode_many
    decoders = [_decoder(argument) for argument in arguments]

    def decode_fixed(raw: Any, path: str) -> Any:
        if type(raw) is not tuple or len(raw) != len(decoders):
            raise RemoteProtocolError(f"{path} must be an array of {len(decoders)}")
        return tuple(
            [one(item, f"{path}[{index}]") for index, (one, item) in enumerate(zip(decoders, raw, strict=True))]
        )

    return decode_fixed
