"""The heap of the C library."""

import ctypes
import sys

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def trim_heap() -> None:
    """Return free memory to the system, which glibc does not do while memory above it is in use."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
