"""Limits on the memory that unpacking a message may take, checked before it is unpacked.

In MessagePack a few bytes can announce a long array, arrays nest, and an item of two bytes becomes an object of fifty.
A message of up to 1 MB can take at most about 80 MiB. The items of a larger one are counted first.
"""

import msgpack

from flowrt.errors import RemoteProtocolError

MAX_ITEMS = 1_000_000
MAX_DEPTH = 16
SMALL_BYTES = 1024
_COUNT_FROM_BYTES = 1024 * 1024
# By first byte, from 0xc0 on: the width of the length field that follows, and of the value itself.
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_VALUE_BYTES = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_ARRAY_BYTES = {0xDC: 2, 0xDD: 4}
_PLAIN = (0xC0, 0xC2, 0xC3)


def check_bounds(data: bytes) -> None:
    """Check a message before it is unpacked. Raises RemoteProtocolError when it exceeds the limits or is cut short."""
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
    """Scan the items without creating them."""
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
