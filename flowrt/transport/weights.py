"""A model's weights as flat buckets: snapshot, checksum, restore. Bytes are moved, never converted."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor

import torch

from flowrt.errors import TransferError
from flowrt.transport.checksums import Crc32, crc32
from flowrt.transport.memory import copy_bytes
from flowrt.transport.pinned import CPU, copying, device_of, for_device, host_buffer

BUCKET_BYTES = 64 * 1024 * 1024
NARROW_BYTES = 2


class Snapshot:
    """One version in host memory: buckets of at most BUCKET_BYTES (a larger tensor has one to itself)."""

    def __init__(self, version: int, buckets: Sequence[torch.Tensor], item_bytes: int = 2) -> None:
        self.version = version
        self.buckets = list(buckets)
        self.item_bytes = item_bytes  # of most elements; what has changed is found in units of it
        self.device = CPU  # that it was restored to

    @classmethod
    def empty(cls, version: int, sizes: Iterable[int]) -> "Snapshot":
        return cls(version, [host_buffer(size) for size in sizes])

    @classmethod
    def take(cls, version: int, tensors: Mapping[str, torch.Tensor]) -> "Snapshot":
        """Copy the tensors (any device) into fresh host buckets, in the mapping's order."""
        device, groups = device_of(tensors.values()), _grouped(tensors)
        snapshot = cls(version, [host_buffer(sum(t.nbytes for t in group), device) for group in groups])
        narrow = sum(t.nbytes for t in tensors.values() if t.element_size() <= NARROW_BYTES)
        snapshot.item_bytes = 2 if 2 * narrow >= sum(snapshot.bucket_bytes()) else 4
        with copying(device):
            for bucket, group in zip(snapshot.buckets, groups, strict=True):
                offset = 0
                for tensor in group:
                    flat = tensor.detach().reshape(-1).view(torch.uint8)
                    copy_bytes(bucket[offset : offset + flat.numel()], flat, non_blocking=True)
                    offset += flat.numel()
        return snapshot

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the buckets into the tensors. Raises TransferError, with nothing changed, if they don't fit."""
        groups = _grouped(tensors)
        sizes = [sum(t.nbytes for t in group) for group in groups]
        if sizes != self.bucket_bytes():
            raise TransferError(
                f"version {self.version} has buckets of {self.bucket_bytes()} bytes, this model needs {sizes}; "
                "do trainer and rollout load the same checkpoint?"
            )
        self.device = device = device_of(tensors.values())
        with torch.no_grad(), copying(device):
            for bucket, group in zip(self.buckets, groups, strict=True):
                source, offset = for_device(bucket, device), 0
                for tensor in group:
                    _fill(tensor.detach(), source[offset : offset + tensor.nbytes])
                    offset += tensor.nbytes

    def within_reach_of(self, device: torch.device) -> "Snapshot":
        """The same version where a device reads it by itself, so that `restore` has nothing to do but to copy."""
        return Snapshot(self.version, [for_device(bucket, device) for bucket in self.buckets], self.item_bytes)

    def bucket_bytes(self) -> list[int]:
        return [bucket.numel() for bucket in self.buckets]

    def checksum(self) -> int:
        """CRC-32 over all buckets."""
        return crc32(bucket.numpy() for bucket in self.buckets)


class RunningChecksum:
    """The checksum of a snapshot whose pieces come one by one, computed on a thread of its own while the next come."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._crc = Crc32()

    def add(self, piece: torch.Tensor) -> None:
        """The next piece, in order; returns at once."""
        self._thread.submit(self._crc.update, piece.numpy())

    async def total(self) -> int:
        """Of all pieces that were added."""
        return await asyncio.wrap_future(self._thread.submit(self._crc.value))


def _fill(tensor: torch.Tensor, row_major: torch.Tensor) -> None:
    """Fill a tensor, however it lies in memory, with these bytes."""
    if tensor.is_contiguous():
        # As bytes: they may start where a wider type may not.
        copy_bytes(tensor.reshape(-1).view(torch.uint8), row_major, non_blocking=True)
    else:
        tensor.copy_(row_major.clone().view(tensor.dtype).view(tensor.shape), non_blocking=True)


def _grouped(tensors: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors.values():
        if not groups or tensor.nbytes > room:
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups
