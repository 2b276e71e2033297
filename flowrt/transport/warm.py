"""Host memory that is received into, kept warm: the first touch of a page costs more than the bytes that land in it."""

import ctypes
import mmap
import sys
import weakref
from collections import deque

import torch

KEEP_BYTES = 1 << 30
"""Idle memory that is kept."""
ROOMY = 4
"""Memory at most so many times as large as needed may be used."""
SMALLEST_BYTES = 64 * 1024
_HUGE_BYTES = 2 * 1024 * 1024


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_heap() -> None:
    """Give back what has been freed in the middle of the heap; a C library that cannot do that is left alone."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def capacity(size: int) -> int:
    """Bytes to reserve for so many; pages that nobody touches cost nothing."""
    return max(SMALLEST_BYTES, 1 << (size - 1).bit_length())


class WarmMemory:
    """Gives out tensors; their memory comes back when nothing looks at it any more, and is given out again."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        # Filled by whichever thread drops the last tensor that looks at a piece of memory.
        self._released: deque[mmap.mmap] = deque()

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, whatever is in them."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        self._collect()
        fitting = [one for one in self._idle if size <= len(one) <= ROOMY * capacity(size)]
        if fitting:
            memory = min(fitting, key=len)
            self._idle = [one for one in self._idle if one is not memory]
        else:
            memory = mmap.mmap(-1, capacity(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = size // _HUGE_BYTES * _HUGE_BYTES
            if whole:
                # Fewer, dearer first touches; but no huge page for the rest, which would be mostly empty.
                memory.madvise(mmap.MADV_HUGEPAGE, 0, whole)
        view = memoryview(memory)[:size]
        weakref.finalize(view, self._released.append, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def rest(self) -> None:
        """Give back what is idle."""
        self._collect()
        self._idle.clear()

    def _collect(self) -> None:
        while self._released:
            self._idle.append(self._released.popleft())
        kept = sum(map(len, self._idle))
        while kept > KEEP_BYTES:
            kept -= len(self._idle.pop(0))
