"""One at a time in a run directory: whoever writes there holds its lock, which ends with the process at the latest."""

import fcntl
import os
from pathlib import Path

from flowrt.errors import ConfigError


class RunLock:
    """Held from the moment it is made until `release`, or until the process ends in whatever way."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError when somebody else holds it."""
        path = run_dir / ".lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the lock {path} cannot be opened: {error.strerror}; is this a run directory?"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(f"the run in {run_dir} is still going on; wait for its end, or stop it first") from None

    def release(self) -> None:
        os.close(self._fd)
