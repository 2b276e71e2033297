"""Pool of receive buffers in host memory, and fast copies of bytes.

Buffers are reused because the first write to a fresh page costs more than the copy into it.
"""

import ctypes
import mmap
import weakref
from collections import deque

import torch


def copy_bytes(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Copy ``source`` to ``target``: uint8 tensors of the same shape, on any devices; ``non_blocking`` as in torch.

    memmove needs a fifth less time than one thread of torch. numpy is not used: torch never resizes memory that numpy
    has a view of, and FSDP frees its weights by resizing them.
    """
    if torch.get_num_threads() == 1 and all(tensor.is_cpu and tensor.is_contiguous() for tensor in (target, source)):
        if target.shape != source.shape:
            raise ValueError(f"{tuple(source.shape)} bytes do not fill {tuple(target.shape)}")
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source, non_blocking=non_blocking)


MAX_IDLE_BYTES = 1 << 30
"""Most idle memory that a pool keeps."""
MAX_OVERSIZE_FACTOR = 4
"""An idle buffer is reused if it is at most this many times larger than a new one would be."""
MIN_BUFFER_BYTES = 64 * 1024
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


def capacity(size: int) -> int:
    """Bytes to map for a buffer of ``size`` bytes; pages that are never written take no memory."""
    return max(MIN_BUFFER_BYTES, 1 << (size - 1).bit_length())


class BufferPool:
    """Hands out tensors. Their memory returns to the pool when no tensor views it any more."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        # Filled by the thread that drops the last view of a buffer.
        self._released: deque[mmap.mmap] = deque()

    def take(self, size: int) -> torch.Tensor:
        """An uninitialised uint8 tensor of ``size`` bytes."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        self._collect()
        fitting = [mapping for mapping in self._idle if size <= len(mapping) <= MAX_OVERSIZE_FACTOR * capacity(size)]
        if fitting:
            memory = min(fitting, key=len)
            self._idle = [mapping for mapping in self._idle if mapping is not memory]
        else:
            memory = mmap.mmap(-1, capacity(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            huge_bytes = size // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
            if huge_bytes:
                # Fewer page faults; no huge page for the remainder, which would be mostly empty.
                memory.madvise(mmap.MADV_HUGEPAGE, 0, huge_bytes)
        view = memoryview(memory)[:size]
        weakref.finalize(view, self._released.append, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def release_idle(self) -> None:
        """Unmap all idle buffers."""
        self._collect()
        self._idle.clear()

    def _collect(self) -> None:
        while self._released:
            self._idle.append(self._released.popleft())
        kept = sum(map(len, self._idle))
        while kept > MAX_IDLE_BYTES:
            kept -= len(self._idle.pop(0))
