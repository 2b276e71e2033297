"""The processes of a trial, the controller among them: forked from one that has imported everything already."""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrt.launch.nursery import Nursery
from flowrt.launch.processes import Child, Children
from flowrt.workers.nursery import nurse

from flowrt.lifeline import die_with_parent

PIDS = "pids.txt"
"""In the folder of the logs: everybody who was ever started."""


class Forked(Children):
    """As those of a run, and noted. Make it before there is a loop or a thread."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir, {})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            die_with_parent()
            nurse(theirs)
        theirs.close()
        self._nursery = Nursery(ours, os.environ, "flowrt.")
        self.rewrite: Callable[[str, list[str]], list[str]] = lambda _, words: words

    def adopt(self, others: Children) -> None:
        """Start what these would have started."""
        self._environment = others._environment

    async def begin_nursery(self) -> None:
        """There is one."""

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        child = await super().start(name, self.rewrite(name, list(words)), pass_fds)
        with (self._log_dir / PIDS).open("a") as pids:
            pids.write(f"{child.process.pid}\n")
        return child
