"""Messages to bytes and back: MessagePack arrays ``[tag, field, field, …]``, checked field by field.

Bytes from a peer are never trusted: sizes are limited before anything is allocated, and whatever does not fit a
message's declared types raises RemoteProtocolError with the path of the field. Nothing is ever unpickled.
What a record becomes is in `fields`.
"""

import struct

import msgpack

from flowrt.errors import LocalProtocolError, RemoteProtocolError
from flowrt.wire.bounds import MAX_ITEMS, SMALL_BYTES, check_bounds
from flowrt.wire.fields import TAGS, Decoder, Encoder, record_decoder, record_encoder
from flowrt.wire.messages import MESSAGES, Message
from flowrt.wire.misfit import Misfit

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_KEEP_BYTES = 1024 * 1024
_pack = msgpack.Packer(use_bin_type=True).pack
_encoders: dict[type, Encoder] = {}
_decoders: dict[int, Decoder] = {}


def encode(message: Message) -> bytes:
    """Pack a message. Raises LocalProtocolError when a field holds what its type does not allow."""
    global _pack
    kind: type = type(message)
    encoder = _encoders.get(kind)
    if encoder is None:
        if kind not in TAGS:
            raise LocalProtocolError(f"{kind.__name__} is not a message; see wire/messages.py for those that are")
        encoder = _encoders[kind] = record_encoder(kind)
    try:
        data: bytes = _pack(encoder(message, []))
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise LocalProtocolError(f"{kind.__name__} cannot be encoded: {error}") from error
    if len(data) > _KEEP_BYTES:
        # A packer keeps a buffer as large as its largest message; an exception must not stay in memory for good.
        _pack = msgpack.Packer(use_bin_type=True).pack
    if len(data) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"{kind.__name__} has {len(data)} bytes, over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Unpack and validate one message. Raises RemoteProtocolError on anything else."""
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
    except Misfit as misfit:
        raise RemoteProtocolError(f"{MESSAGES[tag].__name__}{misfit.path} must be {misfit.expected}") from None
