"""Codec of the changes in one block of a bucket: positions and differences, lossless for any bits. Plain numpy.

Elements are compared and subtracted as unsigned integers of their width, so NaN, infinities and -0.0 need no special
case. A small step of a bf16 weight changes it by one unit in the last place, which takes two bits beyond its position.
The encoding of a block, in this order (sizes are in its record):

===========  ==============================================================================================
positions    GAPS: one byte per change, the number of unchanged elements before it; 255 means 255 of them,
             continued in the next byte. BITMAP: one bit per element. WHOLE: none; the differences of all
             elements follow, and nothing else
down         one bit per change: 1 for a difference of -1, 0 for +1, unless
far          one bit per change: 1 for any other difference, which follows
far bytes    one signed byte per far change; zero, which no change has, means that it is among the words
words        the remaining differences, at the elements' width
===========  ==============================================================================================

Compression with deflate would save another 7 to 20 %, but takes longer than the transfer above about 100 Mbit/s.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowrt.errors import TransferError
from flowrt.transport.weights.snapshot import Bytes

BLOCK_BYTES = 1024 * 1024
_LONG_GAP = 255
# With more than one change per this many elements, a bitmap is smaller than gaps of one byte each.
_BITMAP_DENSITY = 8

Elements = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.intp]

RECORD = np.dtype([("form", "u1"), ("changed", "<u4"), ("gap_bytes", "<u4"), ("far", "<u4"), ("words", "<u4")])


class BlockEncoding(IntEnum):
    """Encoding of a block's positions."""

    SAME = 0
    GAPS = 1
    BITMAP = 2
    WHOLE = 3


class Record(NamedTuple):
    """Header of a block: the sizes of its parts. The headers of a bucket precede its blocks."""

    form: int
    changed: int = 0
    gap_bytes: int = 0
    far: int = 0
    words: int = 0

    def body_bytes(self, elements: int, width: int) -> int:
        """Size of the block in bytes. Raises TransferError if no block of ``elements`` elements has this record."""
        counts_fit = self.words <= self.far <= self.changed <= elements and self.gap_bytes <= elements
        if (
            self.form not in set(BlockEncoding)
            or not counts_fit
            or (self.form != BlockEncoding.GAPS and self.gap_bytes)
        ):
            raise TransferError(f"{self} describes no block of {elements} elements; take the full version instead")
        if self.form == BlockEncoding.SAME:
            return 0
        if self.form == BlockEncoding.WHOLE:
            return elements * width
        positions = self.gap_bytes if self.form == BlockEncoding.GAPS else _plane_bytes(elements)
        return positions + 2 * _plane_bytes(self.changed) + self.far + self.words * width


def encode_block(base: Elements, new: Elements, scratch: Elements) -> tuple[Record, list[Bytes]]:
    """The record and the parts that turn ``base`` into ``new``. Overwrites ``scratch``, which has the same size."""
    # Computing all differences in the cache is faster than reading the changed elements of both again.
    whole = np.subtract(new, base, out=scratch[: base.size])
    mask = whole != 0
    changed = int(np.count_nonzero(mask))
    if not changed:
        return Record(BlockEncoding.SAME), []
    if changed * _BITMAP_DENSITY > base.size:
        form, where, positions = BlockEncoding.BITMAP, np.packbits(mask), np.flatnonzero(mask)
    else:
        positions = _sparse_positions(mask)
        form, where = BlockEncoding.GAPS, _gaps_of(positions)
    differences = whole.take(positions)
    down = differences + differences.dtype.type(1) == 0
    far = ~(down | (differences == 1))
    signed = differences[far].view(f"i{base.itemsize}")
    fits = (signed >= -128) & (signed <= 127)
    far_bytes = np.where(fits, signed, 0).astype(np.int8)
    words = signed[~fits]
    gap_bytes = where.size if form == BlockEncoding.GAPS else 0
    record = Record(form=form, changed=changed, gap_bytes=gap_bytes, far=signed.size, words=words.size)
    if record.body_bytes(base.size, base.itemsize) >= base.nbytes:
        return Record(BlockEncoding.WHOLE), [whole.copy().view(np.uint8)]
    return record, [where, np.packbits(down), np.packbits(far), far_bytes.view(np.uint8), words.view(np.uint8)]


def apply_block(record: Record, body: Bytes, elements: Elements) -> None:
    """Turn a copy of the base's elements into the new elements, in place.

    Args:
        record: header of the block.
        body: its parts, `Record.body_bytes` bytes.
        elements: the copy.

    Raises:
        TransferError: if the body does not fit the record. Any bytes are safe: no position outside the block is used.
    """
    if record.form == BlockEncoding.SAME:
        return
    type_ = elements.dtype
    if record.form == BlockEncoding.WHOLE:
        np.add(elements, body.view(type_), out=elements)
        return
    where_bytes = record.gap_bytes if record.form == BlockEncoding.GAPS else _plane_bytes(elements.size)
    down_end = where_bytes + _plane_bytes(record.changed)
    far_end = down_end + _plane_bytes(record.changed)
    words_start = far_end + record.far
    where, down, far = body[:where_bytes], body[where_bytes:down_end], body[down_end:far_end]
    far_bytes, words = body[far_end:words_start], body[words_start:]
    positions = _from_gaps(where) if record.form == BlockEncoding.GAPS else _from_bitmap(where, elements.size)
    if positions.size != record.changed or (positions.size and positions[-1] >= elements.size):
        raise TransferError(
            f"a block's positions are {positions.size} in {elements.size} elements, not {record.changed} as announced; "
            "take the full version instead"
        )
    # +1, or -1 where the bit is set, in unsigned arithmetic.
    downs = np.unpackbits(down, count=record.changed).astype(type_)
    differences = np.subtract(type_.type(1), downs + downs, dtype=type_)
    if record.far:
        differences[_far_positions(far, record)] = _far_differences(far_bytes, words, record, type_)
    elements[positions] += differences


def _far_positions(far: Bytes, record: Record) -> Positions:
    positions = _from_bitmap(far, record.changed)
    if positions.size != record.far:
        raise TransferError(
            f"a block marks {positions.size} far changes, not {record.far} as announced; take the full version instead"
        )
    return positions


def _far_differences(far_bytes: Bytes, words: Bytes, record: Record, type_: np.dtype[Any]) -> Elements:
    differences = far_bytes.view(np.int8).astype(f"i{type_.itemsize}").view(type_)
    wide = np.flatnonzero(far_bytes == 0)
    if wide.size != record.words:
        raise TransferError(
            f"a block marks {wide.size} words, not {record.words} as announced; take the full version instead"
        )
    differences[wide] = words.view(type_)
    return differences


def _plane_bytes(bits: int) -> int:
    return (bits + 7) // 8


def _sparse_positions(mask: NDArray[np.bool_]) -> Positions:
    """`np.flatnonzero` in half the time if few bits are set: finds groups of eight first, then bits in these groups.

    If more than a tenth of the flags are set, numpy takes a path without branches, and so without mispredicted ones.
    The flags are followed by enough ones to select that path.
    """
    if mask.size % 8:
        return np.flatnonzero(mask)
    groups = mask.view(np.uint64)
    flags = np.ones(groups.size + groups.size // 8 + 1, dtype=np.bool_)
    np.not_equal(groups, 0, out=flags[: groups.size])
    set_groups = np.flatnonzero(flags)[: groups.size - flags.size]
    found = np.flatnonzero(groups.take(set_groups).view(np.bool_))
    positions = set_groups.take(found >> 3)
    positions <<= 3
    found &= 7
    positions += found
    return positions


def _gaps_of(positions: Positions) -> Bytes:
    gaps = positions.astype(np.int32)
    gaps[1:] -= gaps[:-1] + 1
    longs = gaps // _LONG_GAP
    if not longs.any():
        return gaps.astype(np.uint8)
    gaps -= longs * _LONG_GAP
    longs += 1
    ends = np.cumsum(longs, dtype=np.intp)
    written = np.full(int(ends[-1]), _LONG_GAP, dtype=np.uint8)
    ends -= 1
    written[ends] = gaps
    return written


def _from_gaps(gaps: Bytes) -> Positions:
    """Positions in ascending order. They are at most 255 times the number of bytes, so no sum overflows."""
    ends = gaps != _LONG_GAP
    after = np.cumsum(gaps.astype(np.intp) + ends)
    positions: Positions = after[ends] - 1
    return positions


def _from_bitmap(bitmap: Bytes, bits: int) -> Positions:
    return np.flatnonzero(np.unpackbits(bitmap, count=bits).view(np.bool_))
