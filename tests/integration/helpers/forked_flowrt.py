"""``flowrt`` in a process that is forked from one with all imports, by the product's own fork server.

A new ``flowrt run`` of two steps takes 8 s of processor time, of which 6 s are imports: its own, those of its fork
server, and those of its controller. Here they are done once for all commands of a test process. In a `ForkedFlowrt` the
fork server of the workers is a process that was forked before the command began, and the controller is forked, too.
"""

import asyncio
import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from flowrt.launcher.fork_server import child
from flowrt.launcher.fork_server.parent import MAX_MESSAGE_BYTES, ForkedProcess, ForkServer
from flowrt.observability.page import single_file
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.parent_death import die_with_parent
from tests.integration.helpers.forked import CONTEXT, serve_forks, start_fork_server

FLOWRT = Path(sys.executable).with_name("flowrt")
ENVIRONMENT = "ENVIRONMENT_OF_FLOWRT"
READY_TIMEOUT_S = 300.0


class Forks:
    """The fork server of a test process: commands are forked one by one, and their exit codes arrive here."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        start_fork_server()
        with theirs:
            self._server = CONTEXT.Process(target=serve_forks, args=(theirs,))
            self._server.start()
        assert self._receive(READY_TIMEOUT_S) == {"unsafe": ""}
        atexit.register(self._close)

    def start(self, words: Sequence[str], environment: Mapping[str, str], output: int) -> int:
        """Fork a process for ``python -m MODULE ARGUMENTS``; returns its id."""
        order = {"words": list(words), "environment": dict(environment), "fds": []}
        socket.send_fds(self._orders, [json.dumps(order).encode()], [output])
        while True:
            reply = self._receive(READY_TIMEOUT_S)
            assert "failed" not in reply, reply
            if "forked" in reply:
                return int(reply["forked"])

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a process; None if it still runs after the timeout."""
        end_s = time.monotonic() + timeout_s
        while pid not in self._codes and self._receive(max(end_s - time.monotonic(), 0.0)):
            pass
        return self._codes.get(pid)

    def _close(self) -> None:
        """End the server, and with it what it has forked."""
        self._orders.close()
        self._server.join(READY_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> dict[str, int | str]:
        """The next message of the server; empty if there is none within the timeout."""
        if not select.select([self._orders], [], [], timeout_s)[0]:
            return {}
        reply: dict[str, int | str] = json.loads(self._orders.recv(MAX_MESSAGE_BYTES))
        if "code" in reply:
            self._codes[int(reply["pid"])] = int(reply["code"])
        return reply


forks = cache(Forks)


def run_module(module: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENTS`` in a forked process; its output is on stdout. Raises TimeoutExpired."""
    words = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile() as output:
        pid = forks().start(words, dict(os.environ), output.fileno())
        code = forks().exit_code(pid, timeout_s)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout_s)
        output.seek(0)
        return subprocess.CompletedProcess(words, code, output.read().decode())


class ForkedFlowrt:
    """A ``flowrt`` command: the part of `subprocess.Popen` that tests use.

    With the path of a script in place of the first argument: a program that starts a run.
    """

    def __init__(self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], output: int) -> None:
        words = [sys.executable, "-m", __name__, str(directory), *arguments]
        self.pid = forks().start(words, {ENVIRONMENT: json.dumps(dict(environment))}, output)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the command runs."""
        self.returncode = forks().exit_code(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self.returncode = forks().exit_code(self.pid, timeout_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(["flowrt"], timeout_s)
        return self.returncode


def run_flowrt(*arguments: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Run ``flowrt ARGUMENTS`` in a forked process; its output is on stdout. Raises TimeoutExpired."""
    with tempfile.TemporaryFile() as output:
        code = ForkedFlowrt(arguments, Path.cwd(), os.environ, output.fileno()).wait(timeout_s)
        output.seek(0)
        return subprocess.CompletedProcess(["flowrt", *arguments], code, output.read().decode())


class EarlyForkServer(ForkServer):
    """A fork server that has been forked before the event loop began; another one is started with python."""

    waiting: tuple[socket.socket, int] | None = None

    def __init__(self, log_path: Path, environment: Mapping[str, str]) -> None:
        super().__init__(log_path, environment, modules=("flowrt.",))

    async def start(self) -> None:
        if EarlyForkServer.waiting is None:
            return await super().start()
        (orders, pid), EarlyForkServer.waiting = EarlyForkServer.waiting, None
        with self._log_path.open("ab") as log:
            socket.send_fds(orders, [json.dumps(self._environment).encode()], [log.fileno()])
        process = ForkedProcess(pid)
        self.process = process  # type: ignore[assignment]
        loop, pid_fd = asyncio.get_running_loop(), os.pidfd_open(pid)

        def ended() -> None:
            loop.remove_reader(pid_fd)
            os.close(pid_fd)
            process.set_exit_code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        loop.add_reader(pid_fd, ended)
        self.attach(orders)
        return None


def fork_early() -> tuple[socket.socket, int]:
    """Fork a process that becomes a fork server once it receives its environment and log; returns socket and id."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        become_fork_server(theirs)
    theirs.close()
    return ours, pid


def fork_workers_early() -> None:
    """Let the launcher of this process use a fork server that is forked now."""
    from flowrt.launcher import processes

    EarlyForkServer.waiting = fork_early()
    vars(processes)["ForkServer"] = EarlyForkServer


def become_fork_server(orders: socket.socket) -> NoReturn:
    os.setsid()
    die_with_parent()
    data, fds, _, _ = socket.recv_fds(orders, MAX_MESSAGE_BYTES, 1)
    if not data:
        os._exit(0)
    set_environment(json.loads(data))
    for number in (1, 2):
        os.dup2(fds[0], number)
    os.close(fds[0])
    child._set_title(f"{sys.executable} {RUN_MODULE} flowrt.launcher.fork_server.child")
    child.serve(orders)


async def write_page(run_dir: Path) -> str:
    """Write run.html, in this process."""
    await asyncio.to_thread(single_file.write, run_dir)
    return f"page {run_dir / 'run.html'}"


def set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is that of the process from which this one was forked


def main() -> None:
    """``DIRECTORY ARGUMENTS``: run ``flowrt ARGUMENTS`` there, or ``python ARGUMENTS`` if the first is a script."""
    from flowrt import cli
    from flowrt.launcher import local_run

    _, directory, *arguments = sys.argv
    os.chdir(directory)
    set_environment(json.loads(os.environ[ENVIRONMENT]))
    fork_workers_early()
    vars(local_run)["write_page"] = write_page
    is_script = arguments[0].endswith(".py")
    sys.argv = arguments if is_script else [str(FLOWRT), *arguments]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        if is_script:
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            sys.exit(cli.main())
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
