"""Snapshot of a model's weights as flat buckets of bytes in host memory, and its checksum.

- Values are converted only by `Snapshot.restore`, for an engine that computes in another dtype than was published.
- The checksum is the CRC-32 of all bytes, equal to ``zlib.crc32``.
- Weights of a device are copied through pinned memory, which the device reads and writes by DMA, on a separate stream.
  This uses torch's interface for CUDA, whose names torch_npu has for NPUs too; IT HAS NOT RUN ON A GPU OR AN NPU YET:
  its tests run on hosts that have one.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from flowrt.errors import TransferError
from flowrt.transport.buffers import PinnedPool, copy_bytes
from flowrt.transport.devices import SideStream

log = logging.getLogger(__name__)
BUCKET_BYTES = 64 * 1024 * 1024
HALF_PRECISION_BYTES = 2
CPU = torch.device("cpu")
Bytes = NDArray[np.uint8]


class Crc32:
    """The CRC-32 of all bytes given to `update` so far."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Bytes) -> None:
        self._value = zlib_ng.crc32(data, self._value)

    def value(self) -> int:
        return self._value


class Snapshot:
    """One version in host memory: 1-D uint8 buckets of at most BUCKET_BYTES; a larger tensor has its own bucket."""

    def __init__(self, version: int, buckets: Sequence[torch.Tensor], item_bytes: int = 2) -> None:
        self.version = version
        self.buckets = list(buckets)
        self.item_bytes = item_bytes  # element size of most of the bytes: 2 or 4; the width of deltas

    @classmethod
    def empty(cls, version: int, sizes: Iterable[int]) -> "Snapshot":
        """Uninitialised buckets of these sizes in bytes."""
        return cls(version, [host_buffer(size) for size in sizes])

    @classmethod
    def take(cls, version: int, tensors: Mapping[str, torch.Tensor]) -> "Snapshot":
        """Copy the tensors (on any device) into new host buckets, in the order of the mapping."""
        device = device_of(tensors.values())
        groups = _grouped(tensors)
        snapshot = cls(version, [host_buffer(sum(t.nbytes for t in group), device) for group in groups])
        half = sum(t.nbytes for t in tensors.values() if t.element_size() <= HALF_PRECISION_BYTES)
        snapshot.item_bytes = 2 if 2 * half >= sum(snapshot.bucket_bytes()) else 4
        with SideStream(device).work():
            for bucket, group in zip(snapshot.buckets, groups, strict=True):
                offset = 0
                for tensor in group:
                    flat = tensor.detach().reshape(-1).view(torch.uint8)
                    copy_bytes(bucket[offset : offset + flat.numel()], flat, non_blocking=True)
                    offset += flat.numel()
        return snapshot

    def restore(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """Copy the buckets into the tensors. Raises TransferError, with nothing changed, if sizes differ.

        ``dtype`` is the dtype of the version's values, if the tensors have another dtype; values are converted then.
        """
        groups = _grouped(tensors, dtype)
        sizes = [sum(_nbytes(t, dtype) for t in group) for group in groups]
        if sizes != self.bucket_bytes():
            raise TransferError(
                f"version {self.version} has buckets of {self.bucket_bytes()} bytes, this model needs {sizes}; "
                "do trainer and rollout load the same checkpoint?"
            )
        device = device_of(tensors.values())
        with torch.no_grad(), SideStream(device).work():
            # All sources live until the device has read them.
            sources = [for_device(bucket, device) for bucket in self.buckets]
            for source, group in zip(sources, groups, strict=True):
                offset = 0
                for tensor in group:
                    size = _nbytes(tensor, dtype)
                    _fill(tensor.detach(), source[offset : offset + size], dtype)
                    offset += size

    def pinned_for(self, device: torch.device) -> "Snapshot":
        """The same version in memory pinned for a device, so that `restore` only copies."""
        return Snapshot(self.version, [for_device(bucket, device) for bucket in self.buckets], self.item_bytes)

    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in bytes."""
        return [bucket.numel() for bucket in self.buckets]

    def checksum(self) -> int:
        """CRC-32 over all buckets."""
        crc = Crc32()
        for bucket in self.buckets:
            crc.update(bucket.numpy())
        return crc.value()


class RunningChecksum:
    """The checksum of a snapshot that arrives in chunks, computed on another thread during the transfer."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._crc = Crc32()

    def add(self, chunk: torch.Tensor) -> None:
        """Add the next chunk, in order; returns at once."""
        self._thread.submit(self._crc.update, chunk.numpy())

    async def total(self) -> int:
        """The checksum of all chunks added so far."""
        return await asyncio.wrap_future(self._thread.submit(self._crc.value))


def _fill(tensor: torch.Tensor, row_major: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Fill a tensor of any memory layout with the bytes of its elements in row-major order, in ``dtype``."""
    if dtype is not None and dtype != tensor.dtype:
        aligned = row_major if row_major.storage_offset() % dtype.itemsize == 0 else row_major.clone()
        tensor.copy_(aligned.view(dtype).view(tensor.shape), non_blocking=True)
    elif tensor.is_contiguous():
        # As bytes: their offset may not be aligned for a wider type.
        copy_bytes(tensor.reshape(-1).view(torch.uint8), row_major, non_blocking=True)
    else:
        tensor.copy_(row_major.clone().view(tensor.dtype).view(tensor.shape), non_blocking=True)


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor's elements in ``dtype`` (None: its own dtype)."""
    return tensor.nbytes if dtype is None else tensor.numel() * dtype.itemsize


def _grouped(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> list[list[torch.Tensor]]:
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors.values():
        size = _nbytes(tensor, dtype)
        if not groups or size > room:
            groups.append([])
            room = BUCKET_BYTES
        groups[-1].append(tensor)
        room -= size
    return groups


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device of the first of these tensors on a CUDA device or NPU; the CPU if there is none."""
    return next((tensor.device for tensor in tensors if tensor.device.type in ("cuda", "npu")), CPU)


def host_buffer(size: int, device: torch.device = CPU) -> torch.Tensor:
    """Host memory of ``size`` bytes, 1-D uint8, for copies from ``device``: pinned unless the device is the CPU."""
    if device.type == "cpu":
        # numpy requests huge pages, torch does not: first writes take half the time.
        return torch.from_numpy(np.empty(size, dtype=np.uint8))
    if device.type == "cuda":
        try:
            return PINNED.take(size)
        except OSError as error:
            log.warning("memory is pinned by torch, in powers of two: %s", error)
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _register(address: int, size: int) -> None:
    """Register host memory with the CUDA driver. Raises OSError if it refuses."""
    if code := int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
        raise OSError(f"CUDA does not register {size} bytes of host memory (error {code})")


PINNED = PinnedPool(_register)
"""The pinned memory of this process."""


def for_device(bucket: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bucket, or a copy in pinned memory, which has to live until the device has read it."""
    if device.type == "cpu" or bucket.is_pinned():
        return bucket
    pinned = host_buffer(bucket.numel(), device)
    copy_bytes(pinned, bucket)
    return pinned
