"""The limit of open files of this process, which limits its connections."""

import contextlib
import resource
import socket

from flowrt.errors import ConfigError

MIN_DESCRIPTORS = 64
"""What a controller, or a worker with few peers, needs."""
UNLIMITED = 1 << 20
"""What counts as the limit where there is none."""


def descriptor_limit() -> int:
    """The number of files and connections that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


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
