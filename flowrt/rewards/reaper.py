"""The reaper of a child process: ``python -m flowrt.rewards.reaper``, started by `flowrt.rewards.children`.

The process forks before user code is loaded. The fork becomes the child (`flowrt.rewards.child`). The parent is the
reaper, and runs no user code. It forwards the first part of the child's output. It kills all processes that the child
has started as soon as

- the child has ended,
- the pool sends a byte on the control socket, for a child that hangs: it writes its stack first, or
- the pool closes the control socket, which the end of the pool's process does too.

Then it reports how the child ended, as a JSON object: ``{"ended": exit code, "lines": {path: line}}``. The exit code is
null if the reaper killed the child. For each user's file, line is the one at which the child was; 0 if unknown.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from select import POLLIN, poll
from select import poll as Poller  # noqa: N812
from typing import IO, NoReturn

from flowrt.rewards.reward_names import RewardFunction, TaskReward
from flowrt.runtime.parent_death import adopt_orphans, die_with_parent
from flowrt.runtime.waits import BoundedElsewhere, blocking

MAX_STACK_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 1 << 16
"""Bytes of output of a child, and of processes that it started, that are forwarded to the log."""
STACK_MS = 200
"""Milliseconds that a hung child may take to write its stack."""
STACK_POLL_MS = 10
ENDING_MS = 200
"""Milliseconds that a child may take to end after it has closed its connection."""
KILLED = BoundedElsewhere("SIGKILL")
POOL = BoundedElsewhere("the end of the pool, which closes the socket")
STACK_SIGNAL = signal.SIGQUIT
LEFT_OUT = b"\n[further output of this process of the reward functions is left out]\n"


class Output:
    """Forwards the first `MAX_OUTPUT_BYTES` that are written to a pipe, and discards the rest."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._left = MAX_OUTPUT_BYTES
        os.set_blocking(pipe, False)

    def forward(self) -> bool:
        """Forward the available output; returns whether there was any."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        if data and self._left > 0:
            kept = data[: self._left]
            self._left -= len(data)
            with contextlib.suppress(OSError):
                os.write(2, kept + (LEFT_OUT if self._left <= 0 else b""))
        return bool(data)


def reap(control: socket.socket, child: int, paths: Sequence[str], stack: IO[bytes], fds: tuple[int, int]) -> NoReturn:
    """Wait for an end of the child or the pool, or a request; kill the processes of the child; report; exit.

    Args:
        control: socket to the pool.
        child: process id of the child.
        paths: paths of the users' files.
        stack: file to which the child writes its stack.
        fds: a pipe that is readable when a process has ended, and the pipe of the child's output.
    """
    wakeup, pipe = fds
    output = Output(pipe)
    poller = poll()
    for fd in (control.fileno(), wakeup, pipe):
        poller.register(fd, POLLIN)
    status: int | None = None
    is_asked = False
    while status is None and not is_asked:
        ready = {fd for fd, _ in blocking(poller.poll, POOL, "the end of the child", "reward functions")}
        if pipe in ready:
            output.forward()
        if wakeup in ready:
            os.read(wakeup, 1 << 12)
            status = _reaped(child)
        if control.fileno() in ready and status is None:
            is_asked = True
            is_hung = bool(control.recv(1))
            if is_hung:
                _write_stack(child, stack)
            else:  # a child that has just ended may not have been noticed yet
                ending = functools.partial(poller_of(wakeup).poll, ENDING_MS)
                blocking(ending, 1e-3 * ENDING_MS, "the end of the child", "it")
            status = _reaped(child)
    text = _text(stack)
    _kill_all(child)
    while output.forward():
        pass
    ended = None if status is None else os.waitstatus_to_exitcode(status)
    report = {"ended": ended, "lines": {path: _line_in(text, path) for path in paths}}
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(report).encode() + b"\n")
    os._exit(0)


def poller_of(fd: int) -> Poller:
    """A poll object for the event that ``fd`` can be read."""
    poller = poll()
    poller.register(fd, POLLIN)
    return poller


def _write_stack(child: int, stack: IO[bytes]) -> None:
    """Make a hung child write its stack, and wait for it, at most `STACK_MS`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, STACK_SIGNAL)
        waiting, size = functools.partial(poll().poll, STACK_POLL_MS), 0
        for _ in range(STACK_MS // STACK_POLL_MS):
            blocking(waiting, 1e-3 * STACK_POLL_MS, "the stack of a hung child", "it")
            last, size = size, os.fstat(stack.fileno()).st_size
            if size and size == last:
                break


def _text(stack: IO[bytes]) -> str:
    stack.seek(0)
    return stack.read(MAX_STACK_BYTES).decode(errors="replace")


def _line_in(stack: str, path: str) -> int:
    """The innermost line of this file in a stack of faulthandler: of the main or the crashed thread; 0 if unknown."""
    main = stack.find(f"hread 0x{threading.get_ident():016x}")
    pattern = re.compile(rf'File "{re.escape(path)}", line (\d+)')
    match = pattern.search(stack, max(main, 0)) or pattern.search(stack)
    return int(match[1]) if match else 0


def _reaped(child: int) -> int | None:
    """The exit status of the child if it has ended, else None. Reaps adopted processes that have ended, too."""
    exit_status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                exit_status = status
    return exit_status


def _kill_all(child: int) -> None:
    """Kill the process group of the child and, on Linux, all of its descendants (this process adopts orphans)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while mine := list(_children()):
        for pid in mine:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in mine:
            with contextlib.suppress(ChildProcessError):
                blocking(functools.partial(os.waitpid, pid, 0), KILLED, "the end of the killed processes", "the system")


def _children() -> Iterator[int]:
    """Ids of the child processes of this process, from /proc."""
    with contextlib.suppress(OSError):  # not on every kernel
        yield from map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        return
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((directory / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                yield int(directory.name)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="a child process that calls reward functions, and its reaper")
    parser.add_argument("--data", type=int, required=True, help="file descriptor of the socket for calls")
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the socket of the reaper")
    parser.add_argument("--memory-bytes", type=int, required=True, help="that calls may take")
    parser.add_argument("--sandbox", required=True, help="of function code: bwrap or limits")
    parser.add_argument("--timeout-s", type=float, required=True, help="deadline of a call")
    parser.add_argument("--task", default="null", help="JSON: [module, configuration] of the reward of a task")
    parser.add_argument("--model", default="", help="directory of the run's model")
    parser.add_argument("--device", default="cpu", help="of a reward model")
    parser.add_argument("functions", help="JSON: [[name, kind, argument], …]")
    arguments = parser.parse_args()
    functions = [RewardFunction(*words) for words in json.loads(arguments.functions)]
    task = TaskReward(*words) if (words := json.loads(arguments.task)) else None
    paths = sorted({function.path for function in functions if function.path})
    data, control = socket.socket(fileno=arguments.data), socket.socket(fileno=arguments.control)
    for connection in (data, control):
        os.set_inheritable(connection.fileno(), False)  # not inherited by programs that the user's code starts
    stack = tempfile.TemporaryFile()  # noqa: SIM115 (open until the process ends)
    adopt_orphans()
    read, write = os.pipe()
    os.set_blocking(write, False)
    output, standard = os.pipe()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    child = os.fork()
    if child:
        data.close()
        os.close(standard)
        reap(control, child, paths, stack, (read, output))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    control.close()
    for fd in (read, write, output):
        os.close(fd)
    os.dup2(standard, 1)
    os.dup2(standard, 2)
    os.close(standard)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [paths[0] if paths else "reward"]
    faulthandler.enable(stack.fileno(), all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack.fileno(), all_threads=True, chain=False)

    from flowrt.rewards.child import Limits, serve

    sandbox, model, device = arguments.sandbox, arguments.model, arguments.device
    serve(data, functions, Limits(arguments.memory_bytes, sandbox, task, arguments.timeout_s, model, device))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
