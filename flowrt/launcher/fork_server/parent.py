"""Launcher's side of the fork server: starts it, orders forks, and receives exit codes of forked processes."""

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
from typing import Any, Literal

from flowrt.errors import WaitExpired
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import die_with_parent
from flowrt.runtime.waits import locked, wait_until

log = logging.getLogger(__name__)

READY_S = 120.0
FORK_S = 10.0
EXIT_S = 2.0
REPORT_S = 2.0
"""How long after the end of a process the fork server may take to report it."""
MAX_MESSAGE_BYTES = 1 << 16
PADDING = "." * 768
"""Last argument of the fork server: forked processes write their command lines over its own."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's BLAS starts its threads at import."""
FORK_SERVER = "the fork server"
PROGRAM = (sys.executable, RUN_MODULE, "flowrt.launcher.fork_server.child")
MODULES = ("flowrt.roles.", "flowrt.ranks.", "flowrt.launcher.build_model", "flowrt.launcher.start_models")
"""Prefixes of the names of modules that the fork server can run."""


class ForkedProcess:
    """A forked process: the part of `asyncio.subprocess.Process` that a launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._exit_code.result() if self._exit_code.done() else None

    def set_exit_code(self, code: int) -> None:
        """Record the end of the process; only the first call counts."""
        if not self._exit_code.done():
            self._exit_code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit_code)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes for the launcher; a fork server that died is started again at the next fork.

    If the fork server reports that forking is unsafe, or dies before it is ready, it is not started again: `can_fork`
    is False from then on.
    """

    def __init__(
        self,
        log_path: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = PROGRAM,
        modules: tuple[str, ...] = MODULES,
    ) -> None:
        self._log_path = log_path
        self._environment = {**environment, **ONE_THREAD}
        self._program = program
        self._modules = modules
        self._state: Literal["starting", "ready", "dead", "unusable"] = "dead"
        self._lock = asyncio.Lock()
        self._orders: socket.socket | None = None
        self._replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._forked: dict[int, ForkedProcess] = {}
        self.process: Process | None = None

    async def start(self) -> None:
        """Start the fork server; its imports take seconds, for which `fork` waits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log_path.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *(*self._program, str(theirs.fileno()), PADDING),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
                pass_fds=(theirs.fileno(),),
            )
        self.attach(ours)

    def attach(self, orders: socket.socket) -> None:
        """Use the fork server at the other end of this socket."""
        orders.setblocking(False)
        self._orders = orders
        self._replies = asyncio.Queue()
        self._state = "starting"

    def can_fork(self, words: Sequence[str]) -> bool:
        """Whether the fork server can run this command."""
        is_module = list(words[:2]) == [sys.executable, RUN_MODULE] and words[2].startswith(self._modules)
        return is_module and self._state != "unusable" and len(" ".join(words)) <= len(PADDING)

    async def fork(
        self, words: Sequence[str], environment: Mapping[str, str], output: int, pass_fds: Sequence[int] = ()
    ) -> ForkedProcess | None:
        """Fork a process for the command ``words``, which `can_fork`.

        Args:
            words: the command.
            environment: the complete environment of the process.
            output: file descriptor for stdout and stderr.
            pass_fds: file descriptors that stay open in the process, with the same numbers.

        Returns:
            The process; None if it cannot be forked.
        """
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        order = json.dumps({"words": list(words), "environment": changed, "fds": list(pass_fds)}).encode()
        try:
            async with locked(self._lock, READY_S + FORK_S, "earlier forks", FORK_SERVER):
                if self._state == "dead":
                    await self.start()
                orders = await self._ready()
                if orders is None:
                    return None
                socket.send_fds(orders, [order], [output, *pass_fds])
                reply = await wait_until(self._replies.get(), FORK_S, "a process to be forked", FORK_SERVER)
        except (WaitExpired, OSError) as error:
            log.warning("the fork server is given up, %s is started with python: %s", words[2], error)
            self._end()
            return None
        if "failed" in reply:
            log.warning("%s cannot be forked and is started with python: %s", words[2], reply["failed"])
        return reply.get("process")

    async def close(self) -> None:
        """End the fork server and every process that it forked."""
        self._end()
        if self.process is not None:
            await wait_until(self.process.wait(), EXIT_S, "the fork server to end", FORK_SERVER)

    async def _ready(self) -> socket.socket | None:
        if self._state == "starting":
            assert self._orders is not None
            asyncio.get_running_loop().add_reader(self._orders, self._receive, self._orders)
            reply = await wait_until(self._replies.get(), READY_S, "the imports of all workers", FORK_SERVER)
            self._state = "ready" if reply.get("unsafe") == "" else "unusable"
        return self._orders if self._state == "ready" else None

    def _receive(self, orders: socket.socket) -> None:
        try:
            data = orders.recv(MAX_MESSAGE_BYTES)
        except OSError:  # the fork server died before it read an order
            data = b""
        reply = json.loads(data or b"{}")
        if not reply:
            self._end()
        elif "code" in reply:
            self._forked.pop(reply["pid"]).set_exit_code(reply["code"])
        else:
            if "forked" in reply:
                process = ForkedProcess(reply["forked"])
                self._forked[process.pid] = process
                self._watch(process)
                reply["process"] = process
            self._replies.put_nowait(reply)

    def _watch(self, process: ForkedProcess) -> None:
        """Watch the end of the process with a pidfd, because a stopped fork server reports no exit codes."""
        loop = asyncio.get_running_loop()
        try:
            pid_fd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # the process has ended; the fork server has to report its exit code
            loop.call_later(REPORT_S, self._check_reported, process)
            return
        except OSError as error:
            log.warning("the end of process %d is reported by %s only: %s", process.pid, FORK_SERVER, error.strerror)
            return

        def ended() -> None:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
            loop.call_later(REPORT_S, self._check_reported, process)

        loop.add_reader(pid_fd, ended)

    def _check_reported(self, process: ForkedProcess) -> None:
        if process.returncode is None:
            log.warning("process %d ended %.0f s ago, not reported by %s", process.pid, REPORT_S, FORK_SERVER)
            self._end()

    def _end(self) -> None:
        """Kill the fork server, if it is alive; the processes that it forked are killed with it."""
        self._state = "dead" if self._state == "ready" else "unusable"
        if self._orders is not None:
            asyncio.get_running_loop().remove_reader(self._orders)
            self._orders.close()
            self._orders = None
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
        for process in self._forked.values():
            process.set_exit_code(-signal.SIGKILL)
        self._forked.clear()
        self._replies.put_nowait({})
