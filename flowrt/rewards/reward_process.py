"""A child process that calls reward functions, as its pool sees it.

`flowrt.rewards.reaper` is the process of a child; `flowrt.rewards.child` documents the messages.
"""

import asyncio
import contextlib
import functools
import json
import socket
import subprocess
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgpack

from flowrt.errors import WaitExpired
from flowrt.rewards.child import UNPACKING, packed
from flowrt.runtime.waits import Deadline, blocking, wait_until

GRACE_S = 5.0
"""Seconds that a reaper may take to end the processes of its child."""
RECV_BYTES = 1 << 16
BLOCKED_ON = "the user's reward function"
WROTE = "it wrote to the file descriptors of its process"


@dataclass(slots=True, eq=False)
class RewardProcess:
    """A child with its reaper."""

    reaper: subprocess.Popen[bytes]
    data: socket.socket
    control: socket.socket
    unpacker: Any = field(default_factory=functools.partial(msgpack.Unpacker, **UNPACKING))
    calls: int = 0
    fault: str = ""
    """What the user's function did to the connection, after which nothing more is received; empty if nothing."""

    async def send(self, message: bytes, deadline_s: float) -> bool:
        """Send calls; returns False if the child has ended, which `receive` reports, or does not read them."""
        with contextlib.suppress(OSError, WaitExpired):
            sending = asyncio.get_running_loop().sock_sendall(self.data, message)
            await wait_until(sending, deadline_s, "calls to be read", BLOCKED_ON)
            return True
        return False

    async def begin_async(self) -> None:
        """Have the child make the calls that follow side by side; they are of async functions."""
        await self.send(packed([]), GRACE_S)

    async def receive(self, deadline_s: Deadline, what: str) -> list[list[Any]]:
        """The next messages, one or more; none if the child has closed its connection, or `fault` is set.

        Raises WaitExpired at the deadline.
        """
        while True:
            if (messages := self._unpacked()) or self.fault:
                return messages
            begin_s = monotonic()
            loop = asyncio.get_running_loop()
            try:
                data = await wait_until(loop.sock_recv(self.data, RECV_BYTES), deadline_s, what, BLOCKED_ON)
            except OSError:
                data = b""
            if not data:
                return []
            if isinstance(deadline_s, float):
                deadline_s = max(deadline_s - (monotonic() - begin_s), 1e-3)
            self.unpacker.feed(data)

    def _unpacked(self) -> list[list[Any]]:
        """The messages that have been received, up to the first one that no child sends, which sets `fault`."""
        messages: list[list[Any]] = []
        while not self.fault:
            try:
                message = self.unpacker.unpack()
            except msgpack.OutOfData:
                break
            except Exception:  # noqa: BLE001 (bytes of the user's function: msgpack raises errors of many types)
                message = None
            match message:
                case ["began", int()] | ["done", int(), list(), bool()]:
                    messages.append(message)
                case ["ready", int(), list()] | ["unusable", int(), str(), int()]:
                    messages.append(message)
                case _:
                    self.fault = WROTE
        return messages

    async def end(self, *, hung: bool = False) -> dict[str, Any]:
        """End the child and all processes that it has started.

        Returns the report of `flowrt.rewards.reaper`; without one, its own exit code as ``reaper``. ``hung``: the child
        writes its stack first.
        """
        loop = asyncio.get_running_loop()
        report = b""
        with contextlib.suppress(OSError, WaitExpired):
            if hung:
                await wait_until(loop.sock_sendall(self.control, b"k"), GRACE_S, "a message", "the reaper")
            else:
                self.control.shutdown(socket.SHUT_WR)
            while not report.endswith(b"\n"):
                receiving = loop.sock_recv(self.control, RECV_BYTES)
                data = await wait_until(receiving, GRACE_S, "the end of a reward process", "its reaper")
                if not data:
                    break
                report += data
        self.data.close()
        self.control.close()
        wait = functools.partial(self.reaper.wait, GRACE_S)
        try:
            await asyncio.to_thread(blocking, wait, GRACE_S, "the end of a reaper", "it")
        except subprocess.TimeoutExpired:
            self.reaper.kill()
        content: dict[str, Any] = json.loads(report) if report.endswith(b"\n") else {"reaper": self.reaper.returncode}
        return content
