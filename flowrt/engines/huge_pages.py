"""Memory in pages of 2 MiB, where the system has them: of small ones, each begins with a miss of its own.

The keys and values of what runs are read from end to end for each token, a few kilobytes a row, and lie farther apart
than a processor's list of pages reaches. The system gives huge pages to memory that asks for them and begins at a
multiple of their size; neither malloc nor torch asks.
"""

import math
import mmap
from collections.abc import Sequence

import torch

PAGE_BYTES = 2 << 20
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux alone


def zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros of this shape, of the type of ``like`` and on its device; in huge pages if they fill one in host memory."""
    size = math.prod(shape) * like.element_size()
    if ADVICE is None or not like.is_cpu or size < PAGE_BYTES:
        return like.new_zeros(tuple(shape))
    try:
        memory = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(ADVICE)
    except OSError:  # no such pages here, or no memory, which torch says better
        return like.new_zeros(tuple(shape))
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory, all zeros, while somebody looks at it
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + size].view(like.dtype).view(tuple(shape))
