"""Files on disk: atomic replacement, durability, access rights, and the lock of a run directory.

- A file or directory is written under a temporary name in the same directory, then renamed. A reader or a restarted
  process never finds a part of one. It finds the old or the new file; between the two renames that replace a
  directory it finds no directory.
- A rename is durable after `fsync` of the directory that contains the name.
- Files that `atomic_write` and directories that `private_directory` creates are accessible to their owner only.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from flowrt.errors import ConfigError


def partial_path(path: Path) -> Path:
    """The temporary name under which ``path`` is written, in the same directory."""
    return path.with_name(f".{path.name}.part")


def atomic_write(path: Path, text: str) -> None:
    """Replace a file, with mode 0600, and sync its contents to disk before the rename."""
    partial = partial_path(path)
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # otherwise the file may be empty after a power failure
    partial.rename(path)


def check_target(path: Path) -> None:
    """Raise ConfigError if no file can be written as ``path``; nothing is left there."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a file")
    check_parent(path)


def check_parent(path: Path) -> None:
    """Raise ConfigError if the directory of ``path`` does not exist or takes no file; nothing is left there."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {parent}")
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: no file can be created in {parent} ({error.strerror}); name another"
        ) from error


def os_error_text(error: OSError) -> str:
    """The error as a sentence: its file, and what is wrong."""
    if error.filename is None and error.errno == errno.ENOENT:  # of os.getcwd
        return "the working directory has been deleted; change to another"
    what = error.strerror or str(error)
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def replace_directory(partial: Path, path: Path) -> None:
    """Rename ``partial`` to ``path``, and delete the directory that was there.

    The old directory is renamed first, so for a moment, or after a crash at that moment, there is none at ``path``.
    """
    old = _old_path(path)
    shutil.rmtree(old, ignore_errors=True)  # left by a killed process
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def delete_directory(path: Path) -> None:
    """Delete a directory after renaming it, so that no reader finds it half deleted under its name."""
    old = _old_path(path)
    path.rename(old)
    shutil.rmtree(old)


def _old_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def fsync(path: Path) -> None:
    """Sync a file's contents, or a directory's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(directory: Path) -> None:
    """Sync every file and directory below ``directory`` to disk."""
    for path in directory.rglob("*"):
        fsync(path)
    fsync(directory)


def private_directory(path: Path) -> None:
    """Create a directory with mode 0700 and its parents; an existing one keeps its mode.

    Raises FileExistsError if ``path`` is something other than a directory.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise


class RunLock:
    """Exclusive lock of a run directory for the process that writes to it.

    Held from construction until `release` or the end of the process, however it ends.
    """

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError if another process holds the lock, or its file cannot be opened."""
        path = run_dir / ".lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"run directory {run_dir} cannot be locked: {os_error_text(error)}; it must be a directory that this "
                "user may write to"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(
                f"the run in {run_dir} is still in progress; wait until it has ended, or stop it first"
            ) from None

    def release(self) -> None:
        os.close(self._fd)
