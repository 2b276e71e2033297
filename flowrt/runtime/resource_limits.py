"""What a process may use: memory of this host, of its control group (containers, SLURM) or device, and open files."""

import contextlib
import ctypes
import os
import resource
import socket
import sys
from pathlib import Path

from flowrt.errors import ConfigError

MIN_ADDRESS_SPACE = 2 << 30
"""Bytes; torch alone maps about half of them."""
MEMINFO = Path("/proc/meminfo")
GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Larger limits of a control group mean none."""
MIN_DESCRIPTORS = 64
"""What a controller, or a worker with few peers, needs."""
UNLIMITED_FILES = 1 << 20
"""What counts as the limit where there is none."""
MEMORY_SHARE = "FLOWRT_MEMORY_SHARE"
"""Variable of a worker that shares accelerators: the share of the memory of each of them that it may use."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def check_address_space() -> None:
    """Raise ConfigError if the address space of a process is limited to less than any process with torch needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
        raise ConfigError(
            f"the address space of a process on host {socket.gethostname()!r} is limited to {limit >> 20} MB, and a "
            f"process of a run needs {MIN_ADDRESS_SPACE >> 20} MB; raise it (ulimit -v, LimitAS of systemd)"
        )


def total_bytes() -> int:
    """The most memory that the processes of this host may use together; 0 if it is not known."""
    limits = [limit for limit, _ in _group_limits()]
    return min([*limits, _meminfo("MemTotal:")])


def available_bytes() -> int:
    """Memory that is available without swapping; 0 if it is not known."""
    left = [max(limit - used, 0) for limit, used in _group_limits()]
    return min([*left, _meminfo("MemAvailable:")])


def _meminfo(name: str) -> int:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def _group_limits() -> list[tuple[int, int]]:
    """Limit and use of the memory of each control group that contains this process, in bytes."""
    try:
        groups = [line.split(":", 2) for line in GROUPS.read_text().splitlines()]
    except OSError:
        return []
    limits = []
    for _, controllers, path in groups:
        if controllers in ("", "memory"):  # version 2, version 1
            version_2 = not controllers
            root = MOUNT if version_2 else MOUNT / "memory"
            names = (
                ("memory.max", "memory.current") if version_2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            own = root / path.lstrip("/")
            for folder in {root, own, *(parent for parent in own.parents if parent.is_relative_to(root))}:
                limit, used = (_number(folder / name) for name in names)
                if limit is not None and limit < UNLIMITED_BYTES:
                    limits.append((limit, used or 0))
    return limits


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def memory_share() -> float:
    """The share of the memory of each of its accelerators that this process may use; 1: all of it."""
    return float(os.environ.get(MEMORY_SHARE, "1"))


def descriptor_limit() -> int:
    """The number of files and connections that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft


def check_descriptor_limit() -> int:
    """This limit. Raises ConfigError if it is too low for any process of a run."""
    if (limit := descriptor_limit()) < MIN_DESCRIPTORS:
        raise ConfigError(
            f"the limit of open files on host {socket.gethostname()!r} is {limit}, and each process of a run needs "
            f"{MIN_DESCRIPTORS}; raise it (ulimit -n, LimitNOFILE of systemd, PropagateResourceLimits of SLURM)"
        )
    return limit


def raise_descriptor_limit() -> int:
    """Raise this limit to the largest that the system permits; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def trim_heap() -> None:
    """Return free memory to the system, which glibc does not do while memory above it is in use."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
