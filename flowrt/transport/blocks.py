"""How one block of a bucket changed: which elements, and by how much. Plain numpy, bit-exact for any bits.

Elements are compared and subtracted as integers of their width, so NaN, infinities and -0.0 are bits like any others.
A small step of a bf16 weight adds or takes one unit in the last place: such a change costs two bits beyond its
position. What a block writes, in this order (sizes in its record):

===========  ==============================================================================================
positions    GAPS: one byte per change, the unchanged elements before it; 255 means 255 of them and goes on.
             BITMAP: one bit per element. WHOLE: nothing, and then only the differences of all elements
down         one bit per change: the difference is -1, else +1, unless
far          one bit per change: the difference is neither and stands in what follows
far bytes    one signed byte per far change; zero, which no change is, means that it needs a word
words        the other differences, at the elements' width
===========  ==============================================================================================

Deflating all this would save another 7 to 20 %, but takes longer than sending it above some 100 Mbit/s.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowrt.errors import TransferError
from flowrt.transport.checksums import Bytes

BLOCK_BYTES = 1024 * 1024
_LONG_GAP = 255
# Above one change in this many elements a bitmap is smaller than gaps of a byte each.
_BITMAP_DENSITY = 8

Elements = NDArray[np.unsignedinteger[Any]]
Positions = NDArray[np.intp]

RECORD = np.dtype([("form", "u1"), ("changed", "<u4"), ("gap_bytes", "<u4"), ("far", "<u4"), ("words", "<u4")])


class Form(IntEnum):
    """How a block's positions are written."""

    SAME = 0
    GAPS = 1
    BITMAP = 2
    WHOLE = 3


class Record(NamedTuple):
    """What stands before the blocks of a bucket, one for each: enough to know where each part of a block is."""

    form: int
    changed: int = 0
    gap_bytes: int = 0
    far: int = 0
    words: int = 0

    def body_bytes(self, elements: int, width: int) -> int:
        """The bytes the block takes. Raises TransferError on a record that no block of so many elements has."""
        counts_fit = self.words <= self.far <= self.changed <= elements and self.gap_bytes <= elements
        if self.form not in set(Form) or not counts_fit or (self.form != Form.GAPS and self.gap_bytes):
            raise TransferError(f"{self} describes no block of {elements} elements; take the full version instead")
        if self.form == Form.SAME:
            return 0
        if self.form == Form.WHOLE:
            return elements * width
        positions = self.gap_bytes if self.form == Form.GAPS else _plane_bytes(elements)
        return positions + 2 * _plane_bytes(self.changed) + self.far + self.words * width


def encode_block(base: Elements, new: Elements, scratch: Elements) -> tuple[Record, list[Bytes]]:
    """The record and the parts that turn base into new. ``scratch``, with room for as many elements, is overwritten."""
    # The difference of all elements once, in the cache, costs less than fetching the changed ones of both again.
    whole = np.subtract(new, base, out=scratch[: base.size])
    mask = whole != 0
    changed = int(np.count_nonzero(mask))
    if not changed:
        return Record(Form.SAME), []
    if changed * _BITMAP_DENSITY > base.size:
        form, where, positions = Form.BITMAP, np.packbits(mask), np.flatnonzero(mask)
    else:
        positions = _sparse_positions(mask)
        form, where = Form.GAPS, _gaps_of(positions)
    differences = whole.take(positions)
    down = differences + differences.dtype.type(1) == 0
    far = ~(down | (differences == 1))
    signed = differences[far].view(f"i{base.itemsize}")
    fits = (signed >= -128) & (signed <= 127)
    far_bytes = np.where(fits, signed, 0).astype(np.int8)
    words = signed[~fits]
    gap_bytes = where.size if form == Form.GAPS else 0
    record = Record(form, changed, gap_bytes, signed.size, words.size)
    if record.body_bytes(base.size, base.itemsize) >= base.nbytes:
        return Record(Form.WHOLE), [whole.copy().view(np.uint8)]
    return record, [where, np.packbits(down), np.packbits(far), far_bytes.view(np.uint8), words.view(np.uint8)]


def apply_block(record: Record, body: Bytes, elements: Elements) -> None:
    """Change a copy of the base's elements, in place, into the new ones. ``body`` has the record's ``body_bytes``.

    Any bytes are safe: TransferError is raised before a position outside the block is used.
    """
    if record.form == Form.SAME:
        return
    type_ = elements.dtype
    if record.form == Form.WHOLE:
        np.add(elements, body.view(type_), out=elements)
        return
    where_bytes = record.gap_bytes if record.form == Form.GAPS else _plane_bytes(elements.size)
    down_end = where_bytes + _plane_bytes(record.changed)
    far_end = down_end + _plane_bytes(record.changed)
    words_start = far_end + record.far
    where, down, far = body[:where_bytes], body[where_bytes:down_end], body[down_end:far_end]
    far_bytes, words = body[far_end:words_start], body[words_start:]
    positions = _from_gaps(where) if record.form == Form.GAPS else _from_bitmap(where, elements.size)
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
    """As np.flatnonzero, in half the time where few are set: first groups of eight, then inside those that have one.

    Where more than a tenth is set numpy takes a path without branches, so without mispredicted ones; enough ones
    behind the groups make it take that path.
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
    """Rising positions; at most 255 times as far as there are bytes, so no sum can overflow."""
    ends = gaps != _LONG_GAP
    after = np.cumsum(gaps.astype(np.intp) + ends)
    positions: Positions = after[ends] - 1
    return positions


def _from_bitmap(bitmap: Bytes, bits: int) -> Positions:
    return np.flatnonzero(np.unpackbits(bitmap, count=bits).view(np.bool_))
