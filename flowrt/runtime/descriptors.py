"""The limit of open files of this process, which limits its connections."""

import contextlib
import resource

UNLIMITED = 1 << 20
"""What counts as the limit where there is none."""


def descriptor_limit() -> int:
    """The number of files and connections that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> int:
    """Raise this limit to the largest that the system permits; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()
