"""Lossless delta between two versions of the weights, small if few elements changed.

A step of RL moves a bf16 weight by far less than the spacing of bf16 numbers: at a learning rate of 1e-6 about one
element in a hundred changes, and only these are sent.

- A delta is a list of byte buffers: a head (versions, checksums, sizes of the buckets) and one piece per bucket (its
  blocks, see `delta_blocks`). Each buffer starts with the CRC-32 of its contents, which is verified before decoding.
- The result is verified against the checksum of the full version. This also verifies the base: the differences do not
  depend on it, so a base that differs somewhere gives a result that differs in the same elements.
- The base is only read, and stays usable if the delta fails.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from zlib_ng import zlib_ng

from flowrt.errors import TransferError
from flowrt.transport.weights.delta_blocks import BLOCK_BYTES, RECORD, Elements, Record, apply_block, encode_block
from flowrt.transport.weights.snapshot import Bytes, Crc32, Snapshot

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
    """The changes that turn version ``base_version`` into ``version``."""

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
            checksum: that of ``new``.

        Raises:
            TransferError: if the versions have different buckets.
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
        return sum(piece.numel() - _CRC_BYTES for piece in self.pieces) + _overhead_bytes(len(self.sizes))

    @property
    def fraction(self) -> float:
        """Size of the delta relative to the full version."""
        return self.nbytes / max(1, sum(self.sizes))

    def apply(self, base: Snapshot, spare: Snapshot | None = None) -> Snapshot:
        """The new version, in its own buckets; the base is only read.

        Args:
            base: the version that the delta was made from.
            spare: a snapshot that is not needed any more, whose memory is reused: faster than new memory. It is
                overwritten even if this fails.

        Raises:
            TransferError: if the base is another one, or the result does not have the announced checksum.
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

    def _raise_mismatch(self, base: Snapshot, found: int) -> None:
        if base.checksum() != self.base_checksum:
            raise TransferError(
                f"this version {base.version} is not the one that the delta to version {self.version} starts from: its "
                f"checksum is {base.checksum():08x}, not {self.base_checksum:08x}; take the full version instead"
            )
        raise TransferError(
            f"the delta gives version {self.version} the checksum {found:08x}, not {self.checksum:08x} as announced; "
            "take the full version instead"
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
    """Record and bytes of each block. Raises TransferError unless they fill the piece exactly."""
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
