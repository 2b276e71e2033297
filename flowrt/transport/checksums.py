"""CRC-32 as zlib computes it, several times as fast on large buffers, in pieces of any size.

Bits in a row are a polynomial, and their CRC its remainder modulo zlib's P. P divides x^91639 + x^41678 + 1 (found by
search; no trinomial of lower degree has it), so also the same trinomial of x^8: a byte may be struck out if it is added
(XOR) to the bytes 49961 and 91639 places further on. That folds a stream of any length into a ring of 90 KB with two
wide XORs a byte, done by numpy; zlib then looks at the ring only. The ring holds the stream times x^(8 x 91639),
which a product with the inverse of that power takes back.
"""

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF
_RING_BYTES = 91639
_NEAR_BYTES = 41678
_FAR_BYTES = _RING_BYTES - _NEAR_BYTES
# Below this zlib alone is quicker than the ring's start and end.
_SMALL_BYTES = 512 * 1024


class Crc32:
    """The CRC-32 of all bytes given to ``update`` so far."""

    def __init__(self) -> None:
        self._ring = np.zeros(_RING_BYTES, dtype=np.uint8)
        self._ring[:4] = 0xFF  # zlib starts from ones, not from zero
        self._at = 0

    def update(self, data: Bytes) -> None:
        ring, at, start = self._ring, self._at, 0
        while start < data.size:
            # A run ends where it, or the place it is added to, meets the ring's end.
            if at < _NEAR_BYTES:
                end, target = _NEAR_BYTES, at + _FAR_BYTES
            else:
                end, target = min(_RING_BYTES, _NEAR_BYTES * (at // _NEAR_BYTES + 1)), at - _NEAR_BYTES
            size = min(end - at, data.size - start)
            run, added = ring[at : at + size], ring[target : target + size]
            np.bitwise_xor(run, data[start : start + size], out=run)
            np.bitwise_xor(added, run, out=added)
            start += size
            at = (at + size) % _RING_BYTES
        self._at = at

    def value(self) -> int:
        late, early = self._ring[: self._at], self._ring[self._at :]
        folded = zlib.crc32(late.data, zlib.crc32(early.data, _ONES)) ^ _ONES
        return _product(folded, _UNSHIFT) ^ _ONES


def crc32(pieces: Iterable[Bytes]) -> int:
    """The CRC-32 of the pieces in a row; equal to ``zlib.crc32``."""
    pieces = list(pieces)
    if sum(piece.size for piece in pieces) < _SMALL_BYTES:
        total = 0
        for piece in pieces:
            total = zlib.crc32(piece.data, total)
        return total
    crc = Crc32()
    for piece in pieces:
        crc.update(piece)
    return crc.value()


def _product(left: int, right: int) -> int:
    """Two remainders multiplied modulo P. zlib writes the coefficient of x^0 in the top bit."""
    total = 0
    while right:
        if right & 0x80000000:
            total ^= left
        right = right << 1 & _ONES
        left = left >> 1 ^ (_POLYNOMIAL if left & 1 else 0)
    return total


def _squares() -> Iterator[int]:
    square = 0x40000000
    while True:
        yield square
        square = _product(square, square)


def _power(exponent: int) -> int:
    """x^exponent modulo P."""
    power = 0x80000000
    for bit, square in zip(range(exponent.bit_length()), _squares(), strict=False):
        if exponent >> bit & 1:
            power = _product(power, square)
    return power


# P is primitive: x has the order 2^32 - 1.
_UNSHIFT = _power(2**32 - 1 - 8 * _RING_BYTES)
