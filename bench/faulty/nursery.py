"""Processes that need no time to begin: forked from one that has imported everything, with arguments of their own.

Importing torch and transformers costs seconds; a fork costs milliseconds. The nursery is a process of one thread,
without sockets but the one to the launcher, so what it forks is as good as new.
"""

import asyncio
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowrt.launch.processes import Child, Children

from flowrt.lifeline import die_with_parent

MOST_BYTES = 1 << 16
PIDS = "pids.txt"
"""In the folder of the logs: everybody who was ever forked."""


class Nursled:
    """A process that the nursery forked: as much of `asyncio.subprocess.Process` as a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery(Children):
    """Everything that a run has started, as `Children`, but forked. Make it before there is a loop or a thread."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir, {})
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _nurse(theirs)
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._born: asyncio.Queue[int] = asyncio.Queue()
        self._processes: dict[int, Nursled] = {}
        self._listens = False
        self._turn = asyncio.Lock()
        self.rewrite: Callable[[str, list[str]], list[str]] = lambda _, words: words

    def adopt(self, others: Children) -> None:
        """Start what these would have started."""
        self._environment = others._environment

    async def start(self, name: str, words: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        """Fork what ``WORDS`` would start (``python -m MODULE …``) with its output in ``logs/NAME.log``."""
        if not self._listens:
            asyncio.get_running_loop().add_reader(self._socket, self._hear)
            self._listens = True
        path = self._log_dir / f"{name}.log"
        order = {"words": self.rewrite(name, list(words)), "environment": self._environment, "fds": list(pass_fds)}
        async with self._turn:
            with path.open("ab") as log:
                socket.send_fds(self._socket, [json.dumps(order).encode()], [log.fileno(), *pass_fds])
            process = Nursled(await self._born.get())
        self._processes[process.pid] = process
        with (self._log_dir / PIDS).open("a") as pids:
            pids.write(f"{process.pid}\n")
        child = Child(name, process, path)  # type: ignore[arg-type]  # all of it that is used
        self._all.append(child)
        return child

    def _hear(self) -> None:
        message = json.loads(self._socket.recv(MOST_BYTES) or b"{}")
        if not message:
            raise RuntimeError("the nursery has died")
        if "born" in message:
            self._born.put_nowait(message["born"])
        else:
            asyncio.get_running_loop().call_soon(lambda: self._processes[message["pid"]].end(message["code"]))


def _nurse(orders: socket.socket) -> NoReturn:
    """Fork what is ordered and tell what became of it, until the launcher is gone."""
    die_with_parent()
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is orders:
                data, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, 16)
                if not data:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    orders.close()
                    selector.close()
                    _become(json.loads(data), fds)
                for fd in fds:
                    os.close(fd)
                orders.send(json.dumps({"born": pid}).encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            else:
                _, status = os.waitpid(key.data, 0)
                selector.unregister(key.fileobj)
                os.close(key.fd)
                orders.send(json.dumps({"pid": key.data, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(order: dict[str, Any], fds: list[int]) -> NoReturn:
    """The process that was ordered: its output, its environment, its arguments."""
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    die_with_parent()
    log, *passed = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for fd, wanted in zip(passed, order["fds"], strict=True):
        os.dup2(fd, wanted)
    for fd in {log, nothing, *passed} - {0, 1, 2, *order["fds"]}:
        os.close(fd)
    _, _, module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except (Exception, KeyboardInterrupt):  # noqa: BLE001 (whatever it is, this process ends with it)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
