"""Anonymous shared memory: segments that have no name, are sealed against truncation and vanish with their last user.

A segment is a memfd. Its descriptor is closed as soon as both ends have mapped it, so neither a kill -9 nor a crash can
leave anything behind, and segments do not count against the limit of open files.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref

import torch

from flowrt.errors import TransferError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """A mapping of a segment in this process; unmapped when nothing looks at it any more."""

    def __init__(self, number: int, fd: int, size: int) -> None:
        self.number = number
        self.size = size
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise TransferError(f"cannot map {size} bytes of shared memory: {os.strerror(ctypes.get_errno())}")
        self._memory = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(self._memory, _libc.munmap, address, size).atexit = False

    def view(self, size: int) -> memoryview:
        """The first ``size`` bytes; whoever holds this, or memory made of it, keeps the mapping."""
        return memoryview(self._memory).cast("B")[:size]


def make_segment(number: int, size: int) -> tuple[Segment, int]:
    """A fresh segment and its descriptor, which the caller must close."""
    fd = os.memfd_create("flowrt-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.ExitStack() as unless_made:
        unless_made.callback(os.close, fd)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        segment = Segment(number, fd, size)
        unless_made.pop_all()
    return segment, fd


def map_segment(number: int, fd: int, size: int) -> Segment:
    """Map a segment of the other end, which must not be able to shrink it under our hands."""
    seals, found = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
    if found != size or seals & fcntl.F_SEAL_SHRINK == 0:
        raise TransferError(f"the other end sent a segment of {found} bytes in place of {size}, or an unsealed one")
    return Segment(number, fd, size)


def as_tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)
