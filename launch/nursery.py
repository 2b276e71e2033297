"""The launcher's end of `flowrt.workers.nursery`: workers of this host that begin at once, at first and whenever one is
started anew."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrt.errors import WaitExpired
from flowrt.lifeline import die_with_parent
from flowrt.waiting import held, until

log = logging.getLogger(__name__)

READY_S = 120.0
BIRTH_S = 10.0
LEAVE_S = 2.0
LATE_S = 2.0
MOST_BYTES = 1 << 16
ROOM = "." * 768
"""For the command lines of workers, in place of which they have the nursery's."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's BLAS begins its threads when it is imported."""
WHO = "the nursery of workers"


class Nursling:
    """A process that the nursery forked: as much of `asyncio.subprocess.Process` as a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """As that of any process: negative for a signal, None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def end(self, code: int) -> None:
        """It has ended, with this code as far as we know."""
        if not self._ended.done():
            self._ended.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Forks what it suits. What it has forked dies with it; from then on python is started each time."""

    def __init__(self, orders: socket.socket, has: Mapping[str, str], kinds: str) -> None:
        """``has`` is its environment; ``kinds`` is how the names of modules begin that it can run."""
        orders.setblocking(False)
        self._orders = orders
        self._has = dict(has)
        self._kinds = kinds
        self._turn = asyncio.Lock()
        self._news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._forked: dict[int, Nursling] = {}
        self._listens = False
        self._is_fit: bool | None = None
        self.process: Process | None = None

    @classmethod
    async def begin(cls, log: Path, environment: dict[str, str]) -> "Nursery":
        """Start one. It needs some seconds until it can fork, in which others may start."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nursery = cls(ours, environment | ONE_THREAD, "flowrt.workers.")
        with theirs, log.open("ab") as output:
            words = [sys.executable, "-m", "flowrt.workers.nursery", "--orders", str(theirs.fileno()), ROOM]
            nursery.process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment | ONE_THREAD,
                start_new_session=True,
                preexec_fn=die_with_parent,
                pass_fds=(theirs.fileno(),),
            )
        return nursery

    def suits(self, words: Sequence[str]) -> bool:
        """Whether it could fork what this command starts."""
        is_ours = list(words[:2]) == [sys.executable, "-m"] and words[2].startswith(self._kinds)
        return is_ours and self._is_fit is not False and len(" ".join(words)) <= len(ROOM)

    async def fork(
        self, words: Sequence[str], environment: Mapping[str, str], output: int, pass_fds: Sequence[int] = ()
    ) -> Nursling | None:
        """A process with this output, and these descriptors under their own numbers; None where it can fork no more."""
        own = {name: value for name, value in environment.items() if self._has.get(name) != value}
        order = json.dumps({"words": list(words), "environment": own, "fds": list(pass_fds)}).encode()
        try:
            async with held(self._turn, READY_S + BIRTH_S, "a turn at the nursery of workers", WHO):
                if not await self._can():
                    return None
                socket.send_fds(self._orders, [order], [output, *pass_fds])
                born = await until(self._news.get(), BIRTH_S, "a process to be forked", WHO)
        except (WaitExpired, OSError) as error:
            log.warning("workers are started by themselves from now on: %s", error)
            self._lose()
            return None
        if "failed" in born:
            log.warning("%s cannot be forked: %s; it is started by itself", " ".join(words[2:3]), born["failed"])
        return born.get("nursling")

    async def close(self) -> None:
        """End it, and whatever it has forked that is still there."""
        self._lose()
        if self.process is not None:
            await until(self.process.wait(), LEAVE_S, "the nursery to end", WHO)

    async def _can(self) -> bool:
        if not self._listens:
            asyncio.get_running_loop().add_reader(self._orders, self._hear)
            self._listens = True
        if self._is_fit is None:
            told = await until(self._news.get(), READY_S, "all that workers import to be imported", WHO)
            self._is_fit = told.get("unfit") == ""
        return self._is_fit

    def _hear(self) -> None:
        try:
            data = self._orders.recv(MOST_BYTES)
        except OSError:  # it died with an order unread
            data = b""
        told = json.loads(data or b"{}")
        if not told:
            self._lose()
        elif "code" in told:
            self._forked.pop(told["pid"]).end(told["code"])
        else:
            if "born" in told:
                told["nursling"] = self._forked[told["born"]] = Nursling(told["born"])
                self._look_after(told["nursling"])
            self._news.put_nowait(told)

    def _look_after(self, nursling: Nursling) -> None:
        """A nursery that is stopped cannot hide an end: the kernel tells it here too, but not how."""
        loop = asyncio.get_running_loop()
        try:
            end = os.pidfd_open(nursling.pid)
        except ProcessLookupError:  # it has ended by now, and the nursery is about to say how
            loop.call_later(LATE_S, self._miss, nursling)
            return
        except OSError as error:
            log.warning("only %s will tell of the end of process %d: %s", WHO, nursling.pid, error.strerror)
            return

        def ended() -> None:
            loop.remove_reader(end)
            os.close(end)
            loop.call_later(LATE_S, self._miss, nursling)

        loop.add_reader(end, ended)

    def _miss(self, nursling: Nursling) -> None:
        if nursling.returncode is None:
            log.warning("process %d has ended %.0f s ago, and %s does not say so", nursling.pid, LATE_S, WHO)
            self._lose()

    def _lose(self) -> None:
        """It has died, or is to: those that it has forked die with it."""
        self._is_fit = False
        if self._orders.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._orders)
            self._orders.close()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        for nursling in self._forked.values():
            nursling.end(-signal.SIGKILL)
        self._forked.clear()
        self._news.put_nowait({})  # to whoever waits for a birth
