"""Lossless delta between two versions of the weights, small if few elements changed; implemented in numpy.

A step of RL moves a bf16 weight by far less than the spacing of bf16 numbers: at a learning rate of 1e-6 about one
element in a hundred changes, and only these are sent.

- A delta is a list of byte buffers: a head (versions, checksums, sizes of the buckets) and one piece per bucket, its
  blocks. Each buffer starts with the CRC-32 of its contents, which is verified before decoding.
- The result is verified against the checksum of the full version. This also verifies the base: the differences do not
  depend on it, so a base that differs somewhere gives a result that differs in the same elements.
- The base is only read, and stays usable if the delta fails.
- Elements are compared and subtracted as unsigned integers of their width, so NaN, infinities and -0.0 need no special
  case. A small step of a bf16 weight changes it by one unit in the last place: two bits beyond its position.

The encoding of a block, in this order (sizes are in its record):

===========  ==============================================================================================
positions    GAPS: one byte per change, the number of unchanged elements before it; 255 means 255 of them,
             continued in the next byte. BITMAP: one bit per element. WHOLE: no positions; the block has the
             differences of all elements, and nothing else. SAME: the block is empty
down         one bit per change: 1 for a difference of -1, 0 for +1; no meaning for a far change
far          one bit per change: 1 for any other difference
far bytes    one signed byte per far change: its difference; zero means that the difference is among the words
words        the differences that fit no byte, at the elements' width
===========  ==============================================================================================

Compression with deflate would save another 7 to 20 %, but takes longer than the transfer above about 100 Mbit/s.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from flowrt.errors import TransferError
from flowrt.transport.weights.snapshot import Bytes, Crc32, Snapshot

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
    """The record and the parts that turn ``base`` into ``new``. Overwrites ``scratch``, which is at least as large."""
    # Computing all differences in the cache is faster than reading the changed elements of both versions again.
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
        body: the parts of the block, `Record.body_bytes` bytes.
        elements: the copy.

    Raises:
        TransferError: if the body does not fit the record. No bytes of a body lead to a position outside the block.
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
    indices = np.flatnonzero(groups.take(set_groups).view(np.bool_))
    positions = set_groups.take(indices >> 3)
    positions <<= 3
    indices &= 7
    positions += indices
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


WIDTHS = (2, 4)
# At a quarter of the full bytes, making, sending and applying a delta takes about as long as sending the full version
# on a 1 Gbit/s wire to one receiver. On a faster wire the break-even is lower; with several receivers, which share the
# cost of making it, higher.
MAX_FRACTION = 0.25
_MAGIC = b"fdelta1\n"
_HEAD = struct.Struct("<8sBqqIII")
_CRC_BYTES = 4


@dataclass(frozen=True, eq=False)
class Delta:
    """The changes that turn version ``base_version`` into ``version``.

    Attributes:
        base_version: version that the delta starts from.
        version: version that it makes.
        base_checksum: CRC-32 of the full base version.
        checksum: CRC-32 of the full new version.
        width: bytes of an element.
        sizes: bytes of each bucket.
        pieces: for each bucket, a 1-D uint8 tensor with a CRC-32, the records and the blocks.
    """

    base_version: int
    version: int
    base_checksum: int
    checksum: int
    width: int
    sizes: tuple[int, ...]
    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def between(
        cls,
        base: Snapshot,
        new: Snapshot,
        *,
        width: int = 2,
        max_fraction: float = MAX_FRACTION,
        base_checksum: int | None = None,
        checksum: int | None = None,
    ) -> "Delta | None":
        """The delta from base to new; None if it would be larger than ``max_fraction`` of the full version.

        Args:
            base: the old version.
            new: the new version, of the same model.
            width: bytes of an element: 2 for bf16 and fp16, 4 for fp32. Any width is lossless on any bytes.
            max_fraction: largest size of the delta relative to the full version.
            base_checksum: `Snapshot.checksum` of ``base``, if the caller has computed it already.
            checksum: `Snapshot.checksum` of ``new``, likewise.

        Raises:
            TransferError: if the versions have different buckets, or ``width`` is neither 2 nor 4.
        """
        sizes = new.bucket_bytes()
        if base.bucket_bytes() != sizes or width not in WIDTHS:
            raise TransferError(
                f"no delta of {width}-byte elements from version {base.version} with buckets of {base.bucket_bytes()} "
                f"bytes to version {new.version} with {sizes}; take both from the same model, with 2 or 4 bytes"
            )
        budget_bytes = max_fraction * sum(sizes) - _overhead_bytes(len(sizes))
        base_crc, new_crc = (Crc32() if known is None else None for known in (base_checksum, checksum))
        pieces: list[torch.Tensor] = []
        scratch = _elements(np.empty(BLOCK_BYTES, dtype=np.uint8), width)
        for old_bucket, new_bucket in zip(base.buckets, new.buckets, strict=True):
            records: list[Record] = []
            parts: list[Bytes] = []
            for old, fresh in zip(_blocks(old_bucket), _blocks(new_bucket), strict=True):
                for crc, block in ((base_crc, old), (new_crc, fresh)):
                    if crc is not None:
                        crc.update(block)
                record, written = encode_block(_elements(old, width), _elements(fresh, width), scratch)
                tail = old.size - old.size % width
                records.append(record)
                parts += [*written, fresh[tail:] - old[tail:]]
                budget_bytes -= RECORD.itemsize + sum(part.size for part in parts[-len(written) - 1 :])
                if budget_bytes < 0:
                    return None
            pieces.append(_sealed([np.array(records, dtype=RECORD).view(np.uint8), *parts]))
        return cls(
            base_version=base.version,
            version=new.version,
            base_checksum=base_crc.value() if base_crc is not None else base_checksum or 0,
            checksum=new_crc.value() if new_crc is not None else checksum or 0,
            width=width,
            sizes=tuple(sizes),
            pieces=tuple(pieces),
        )

    @classmethod
    def from_buffers(cls, buffers: Sequence[torch.Tensor]) -> "Delta":
        """Decode the output of `buffers`. Raises TransferError if the bytes are damaged, truncated or not a delta."""
        if not buffers:
            raise TransferError("a delta of 0 buffers has no head; send it again")
        head = _opened(buffers[0], "head")
        if head.size < _HEAD.size or bytes(head[: len(_MAGIC)]) != _MAGIC:
            raise TransferError(
                "these buffers are not a delta that this version of flowrt can read; send the full version"
            )
        _, width, base_version, version, base_checksum, checksum, count = _HEAD.unpack_from(head.data)
        if width not in WIDTHS or head.size != _HEAD.size + 8 * count or len(buffers) != 1 + count:
            raise TransferError(
                f"a delta of {count} buckets with elements of {width} bytes came in {len(buffers)} buffers with a head "
                f"of {head.size} bytes; send it again"
            )
        sizes = tuple(np.frombuffer(head, dtype="<u8", offset=_HEAD.size).tolist())
        delta = cls(base_version, version, base_checksum, checksum, width, sizes, tuple(buffers[1:]))
        for index, (piece, size) in enumerate(zip(delta.pieces, sizes, strict=True)):
            for _ in _split_blocks(_opened(piece, f"piece {index}"), size, width):
                pass
        return delta

    def buffers(self) -> list[torch.Tensor]:
        """The encoded delta: uint8 tensors, none of them empty."""
        fields = (self.width, self.base_version, self.version, self.base_checksum, self.checksum, len(self.sizes))
        head = _HEAD.pack(_MAGIC, *fields) + np.array(self.sizes, dtype="<u8").tobytes()
        return [_sealed([np.frombuffer(head, dtype=np.uint8)]), *self.pieces]

    @property
    def nbytes(self) -> int:
        """Size of the encoded delta in bytes, with its head and checksums."""
        return sum(piece.numel() - _CRC_BYTES for piece in self.pieces) + _overhead_bytes(len(self.sizes))

    @property
    def fraction(self) -> float:
        """Size of the delta relative to the full version."""
        return self.nbytes / max(1, sum(self.sizes))

    def apply(self, base: Snapshot, spare: Snapshot | None = None) -> Snapshot:
        """The new version, in its own buckets; the base is only read.

        Args:
            base: the version that the delta was made from.
            spare: a snapshot that is not needed any more, whose memory is reused: faster than new memory. It may be
                overwritten even if this call fails.

        Raises:
            TransferError: if ``base`` is not the version that the delta was made from, ``spare`` has buckets of other
                sizes or shares memory with the base, or the result does not have the announced checksum.
        """
        self._check_base(base)
        result = self._target(base, spare)
        crc = Crc32()
        for index, (source, target) in enumerate(zip(base.buckets, result.buckets, strict=True)):
            encoded = _split_blocks(self.pieces[index].numpy()[_CRC_BYTES:], self.sizes[index], self.width)
            for old, block, (record, body) in zip(_blocks(source), _blocks(target), encoded, strict=True):
                np.copyto(block, old)
                tail = block.size - block.size % self.width
                cut = body.size - (block.size - tail)
                apply_block(record, body[:cut], _elements(block, self.width))
                block[tail:] += body[cut:]
                crc.update(block)
        if crc.value() != self.checksum:
            self._raise_mismatch(base, crc.value())
        return result

    def _check_base(self, base: Snapshot) -> None:
        if base.version != self.base_version or tuple(base.bucket_bytes()) != self.sizes:
            raise TransferError(
                f"the delta to version {self.version} starts from version {self.base_version} with buckets of "
                f"{list(self.sizes)} bytes, this is version {base.version} with {base.bucket_bytes()}; "
                "take the full version instead"
            )

    def _target(self, base: Snapshot, spare: Snapshot | None) -> Snapshot:
        if spare is None:
            return Snapshot.empty(self.version, self.sizes)
        in_use = {bucket.untyped_storage().data_ptr() for bucket in base.buckets if bucket.numel()}
        shared = any(bucket.untyped_storage().data_ptr() in in_use for bucket in spare.buckets)
        if shared or tuple(spare.bucket_bytes()) != self.sizes:
            raise TransferError(
                f"version {spare.version} cannot make room for version {self.version}: its buckets are the base's own "
                f"or have {spare.bucket_bytes()} bytes, not {list(self.sizes)}; pass a snapshot of the same model or "
                "none"
            )
        return Snapshot(self.version, spare.buckets)

    def _raise_mismatch(self, base: Snapshot, checksum: int) -> None:
        if base.checksum() != self.base_checksum:
            raise TransferError(
                f"this version {base.version} is not the one that the delta to version {self.version} starts from: its "
                f"checksum is {base.checksum():08x}, not {self.base_checksum:08x}; take the full version instead"
            )
        raise TransferError(
            f"the delta gives version {self.version} the checksum {checksum:08x}, not {self.checksum:08x} as "
            "announced; take the full version instead"
        )


def _overhead_bytes(buckets: int) -> int:
    """Size of the head for ``buckets`` buckets, and of the checksums of all buffers."""
    return _HEAD.size + 8 * buckets + _CRC_BYTES * (1 + buckets)


def _blocks(bucket: torch.Tensor) -> list[Bytes]:
    data: Bytes = bucket.numpy()
    return [data[start : start + BLOCK_BYTES] for start in range(0, data.size, BLOCK_BYTES)]


def _elements(block: Bytes, width: int) -> Elements:
    elements: np.ndarray[Any, Any] = block[: block.size - block.size % width].view(f"<u{width}")
    return elements


def _sealed(parts: Sequence[Bytes]) -> torch.Tensor:
    """The parts in one buffer, after their CRC-32."""
    data = np.concatenate([np.zeros(_CRC_BYTES, dtype=np.uint8), *parts])
    data[:_CRC_BYTES] = np.frombuffer(struct.pack("<I", zlib_ng.crc32(data[_CRC_BYTES:])), dtype=np.uint8)
    return torch.from_numpy(data)


def _opened(buffer: torch.Tensor, name: str) -> Bytes:
    """The contents of a buffer made by `_sealed`. Raises TransferError if its CRC-32 does not match."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < _CRC_BYTES:
        raise TransferError(f"a delta's {name} is {buffer.numel()} elements of {buffer.dtype}; send it again")
    data: Bytes = buffer.numpy()
    body = data[_CRC_BYTES:]
    if zlib_ng.crc32(body) != int(data[:_CRC_BYTES].view("<u4")[0]):
        raise TransferError(f"a delta's {name} of {data.size} bytes was damaged in transfer; send it again")
    return body


def _split_blocks(piece: Bytes, size: int, width: int) -> Iterator[tuple[Record, Bytes]]:
    """Record and bytes of each block. Raises TransferError unless the blocks fill the piece exactly."""
    count = -(-size // BLOCK_BYTES)
    start = count * RECORD.itemsize
    if start > piece.size:
        raise TransferError(f"a piece of {piece.size} bytes cannot hold {count} blocks; take the full version instead")
    for index, fields in enumerate(piece[:start].view(RECORD).tolist()):
        block_bytes = min(BLOCK_BYTES, size - index * BLOCK_BYTES)
        record = Record(*fields)
        body_bytes = record.body_bytes(block_bytes // width, width) + block_bytes % width
        yield record, piece[start : start + body_bytes]
        start += body_bytes
    if start != piece.size:
        raise TransferError(
            f"the blocks of a piece end at {start}, it has {piece.size} bytes; take the full version instead"
        )
