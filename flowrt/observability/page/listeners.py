"""The user and the process that listen on a port of this host, for errors about a port in use."""

import contextlib
import os
import pwd
from pathlib import Path

_LISTENING = "0A"


def who_listens(port: int) -> str:
    """The owner of a TCP port, as " by USER (process PID: COMMAND)"; empty, or without the process, if unknown."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                return f" by {_user(int(fields[7]))}{_process(fields[9])}"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _process(inode: str) -> str:
    """The process that has this socket open; empty if there is none whose files may be read."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) == f"socket:[{inode}]" for descriptor in (directory / "fd").iterdir()):
                words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f" (process {directory.name}: {' '.join(words).strip()[:120]})"
    return ""
