"""Pools of buffers in host memory, and fast copies of bytes.

Buffers are reused because the first write to a fresh page costs more than the copy into it, and registering memory
with a device more than that.
"""

import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock

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


def _view(memory: mmap.mmap, size: int, released: deque[mmap.mmap]) -> torch.Tensor:
    """The first bytes of this memory, which is appended to ``released`` when no tensor views it any more."""
    view = memoryview(memory)[:size]
    weakref.finalize(view, released.append, memory).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class PinnedPool:
    """Hands out tensors that a device copies from and to by DMA: memory that is registered once, and used again.

    A version takes its own size and less than a page a bucket. `torch.empty(pin_memory=True)` rounds every allocation
    up to a power of two: 1.89 times the size of a version of Qwen2.5-7B. Memory returns to the pool when no tensor
    views it any more, and stays registered. A tensor has to live until the device has finished with it.

    Args:
        register: registers the bytes at an address (address, size) with the device. Raises OSError if that fails.
    """

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._idle: dict[int, list[mmap.mmap]] = {}
        # Filled by the thread that drops the last view of a buffer.
        self._released: deque[mmap.mmap] = deque()
        self._lock = Lock()
        self.registered_bytes = 0

    def take(self, size: int) -> torch.Tensor:
        """An uninitialised uint8 tensor of ``size`` bytes. Raises OSError if its memory cannot be registered."""
        if (buffer := self.take_idle(size)) is not None:
            return buffer
        return _view(self._map(_whole_pages(size)), size, self._released)

    def take_idle(self, size: int) -> torch.Tensor | None:
        """As `take`, at once: from memory that is registered already; None if there is none of this size."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            while self._released:
                memory = self._released.popleft()
                self._idle.setdefault(len(memory), []).append(memory)
            idle = self._idle.get(_whole_pages(size))
            return _view(idle.pop(), size, self._released) if idle else None

    def _map(self, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._register(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), size)
        with self._lock:
            self.registered_bytes += size
        return memory


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
        return _view(memory, size, self._released)

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
