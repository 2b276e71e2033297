"""Child processes that call reward functions.

- A call that exceeds its deadline, or in which the child dies, affects its own outcome only. The child is replaced, and
  its other calls are made by another child.
- The child processes, and all processes that they start, end with the pool and with the process of the pool.

`flowrt.rewards.guard` is the process of a child; `flowrt.rewards.child` documents the messages.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgpack

from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.rewards.child import UNPACKING, packed
from flowrt.rewards.functions import RewardFunction, TaskReward
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import BoundedElsewhere, blocking, cancel_and_wait, wait_all, wait_until

log = logging.getLogger(__name__)
CALLS_PER_MESSAGE = 32
MAX_CALLS = 10_000
"""Number of calls after which a child is replaced."""
MAX_SPARES = 2
"""Maximum number of spare children once one has been lost: starting a child takes as long as many calls."""
MAX_STARTS = 3
"""Number of consecutive children that may end outside of a call before the pool fails."""
GRACE_S = 5.0
"""Seconds that a guard may take to end the processes of its child."""
PROGRESS_AFTER_S = 3.0
"""Seconds after which a wait for loading is reported as progress."""
RECV_BYTES = 1 << 16
FIX = "correct it, and start or resume the run"
LOADING = "while the file was loaded"
BLOCKED_ON = "the user's reward function"
QUEUE = BoundedElsewhere("the next call, or the end of the pool")


@dataclass(slots=True, eq=False)
class RewardCall:
    """A call of one function; ``outcome`` receives its outcome."""

    function: int
    """Index of the function among those of the pool."""
    response: str
    row: bytes
    """JSON of the row's columns, with the answer."""
    outcome: "asyncio.Future[RewardOutcome]"
    attempts: int = 0
    """Number of times that a child died during the call."""


@dataclass(slots=True, eq=False)
class RewardProcess:
    """A child with its guard."""

    guard: subprocess.Popen[bytes]
    data: socket.socket
    control: socket.socket
    unpacker: Any = field(default_factory=functools.partial(msgpack.Unpacker, **UNPACKING))
    calls: int = 0

    async def receive(self, deadline_s: float, what: str) -> list[list[Any]]:
        """The next messages, one or more; none if the child has closed its connection.

        Raises WaitExpired after ``deadline_s`` seconds.
        """
        while True:
            if messages := list(self.unpacker):
                return messages
            begin_s = monotonic()
            loop = asyncio.get_running_loop()
            try:
                data = await wait_until(loop.sock_recv(self.data, RECV_BYTES), deadline_s, what, BLOCKED_ON)
            except OSError:
                data = b""
            if not data:
                return []
            deadline_s = max(deadline_s - (monotonic() - begin_s), 1e-3)
            self.unpacker.feed(data)

    async def end(self, *, hung: bool = False) -> dict[str, Any]:
        """End the child and all processes that it has started.

        Returns the report of `flowrt.rewards.guard`; without one, its own exit code as ``guard``. ``hung``: the child
        writes its stack first.
        """
        loop = asyncio.get_running_loop()
        report = b""
        with contextlib.suppress(OSError, WaitExpired):
            if hung:
                await wait_until(loop.sock_sendall(self.control, b"k"), GRACE_S, "a message", "the guard")
            else:
                self.control.shutdown(socket.SHUT_WR)
            while not report.endswith(b"\n"):
                receiving = loop.sock_recv(self.control, RECV_BYTES)
                data = await wait_until(receiving, GRACE_S, "the end of a reward process", "its guard")
                if not data:
                    break
                report += data
        self.data.close()
        self.control.close()
        wait = functools.partial(self.guard.wait, GRACE_S)
        try:
            await asyncio.to_thread(blocking, wait, GRACE_S, "the end of a guard", "it")
        except subprocess.TimeoutExpired:
            self.guard.kill()
        found: dict[str, Any] = json.loads(report) if report.endswith(b"\n") else {"guard": self.guard.returncode}
        return found


class RewardPool:
    """Calls reward functions in child processes, on an event loop. Children are started when there are calls."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        options: RewardOptions,
        output: int | None = None,
        task: TaskReward | None = None,
    ) -> None:
        """Set up the pool; no process is started yet.

        Args:
            functions: the functions, none of which is a request.
            options: number of children, deadlines and limits.
            output: file descriptor for the output of the functions; None: that of this process.
            task: the reward of a task, for a function of kind "task".
        """
        self._task = task
        self._functions = tuple(functions)
        self._options = options
        self._output = output
        self._waiting: deque[RewardCall] = deque()
        self._has_calls = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._spares: deque[asyncio.Task[RewardProcess]] = deque()
        self._processes: set[RewardProcess] = set()
        self._failure: FlowError | None = None
        self._endings: set[asyncio.Task[object]] = set()
        """Tasks that end children."""
        self._starts = 0
        self._has_lost = False
        self._is_closed = False

    def call(self, function: int, response: str, row: bytes) -> "asyncio.Future[RewardOutcome]":
        """Make a call; returns the future of its outcome.

        The future raises ConfigError if the functions cannot be loaded any more, FlowError if the pool is closed.

        Args:
            function: index of the function in the pool.
            response: text of the response.
            row: JSON of the row's columns, with the answer.
        """
        one = RewardCall(function, response, row, asyncio.get_running_loop().create_future())
        if self._failure is not None or self._is_closed:
            one.outcome.set_exception(self._failure or FlowError("the reward functions' processes are closed"))
            return one.outcome
        self._waiting.append(one)
        self._has_calls.set()
        if len(self._workers) < min(self._options.workers, len(self._waiting)):
            worker = asyncio.create_task(self._work())
            worker.add_done_callback(self._on_end)
            self._workers.append(worker)
        return one.outcome

    async def load(self, progress: Callable[[str], None] = log.info) -> None:
        """Start a child, and wait until it has loaded the functions; ``progress`` receives notes on long waits.

        Raises ConfigError if a function cannot be loaded.
        """
        self._spares.append(asyncio.create_task(self._start(progress)))
        deadline_s = self._options.load_timeout_s + 2 * GRACE_S
        await wait_until(asyncio.shield(self._spares[-1]), deadline_s, "a child", BLOCKED_ON)

    async def close(self) -> None:
        """End the child processes and all processes that they have started; open calls raise FlowError."""
        self._fail(FlowError("the reward functions' processes were closed during a call"))
        self._is_closed = True
        await cancel_and_wait([*self._workers, *self._spares], GRACE_S)
        with contextlib.suppress(WaitExpired):
            await wait_all(list(self._endings), 4 * GRACE_S, "the end of reward processes", "their guards")
        for process in list(self._processes):
            await self._end(process)

    async def _work(self) -> None:
        """Make calls, one message after the other, with one child at a time."""
        process: RewardProcess | None = None
        calls: list[RewardCall] = []
        try:
            while True:
                while not self._waiting:
                    self._has_calls.clear()
                    await wait_until(self._has_calls.wait(), QUEUE, "calls of reward functions", "the reward role")
                calls = self._take()
                if process is None:
                    process = await self._next_process()
                if not await self._make(process, calls):
                    process = None
                elif process.calls >= MAX_CALLS:
                    self._replace(process)
                    process = None
                calls = []
        except FlowError as error:
            self._fail(error)
        finally:  # also when the pool is closed
            for one in calls:
                if not one.outcome.done():
                    one.outcome.set_exception(self._failure or FlowError("the processes of reward functions failed"))

    def _take(self) -> list[RewardCall]:
        """Calls for one message; the fewer calls wait, the fewer, so that no child has all of them."""
        most = max(1, min(CALLS_PER_MESSAGE, len(self._waiting) // (2 * self._options.workers)))
        taken: list[RewardCall] = []
        while self._waiting and len(taken) < most:
            one = self._waiting.popleft()
            if not one.outcome.done():  # cancelled
                taken.append(one)
        return taken

    def _on_end(self, worker: asyncio.Task[None]) -> None:
        """Fail the pool if a worker has ended with an internal error."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._fail(FlowError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: FlowError) -> None:
        self._failure = self._failure or error
        while self._waiting:
            one = self._waiting.popleft()
            if not one.outcome.done():
                one.outcome.set_exception(error)

    async def _make(self, process: RewardProcess, calls: list[RewardCall]) -> bool:
        """Send calls to a child and set their outcomes; returns False if the child is lost or is being replaced."""
        left = dict(enumerate(calls))
        if not left:
            return True
        message = packed([[index, one.function, one.response, one.row] for index, one in left.items()])
        began, began_s, is_hung, has_begun = 0, monotonic(), False, False
        with contextlib.suppress(OSError, WaitExpired):  # the child has ended, which `receive` reports
            sending = asyncio.get_running_loop().sock_sendall(process.data, message)
            await wait_until(sending, self._options.timeout_s + GRACE_S, "calls to be read", BLOCKED_ON)
        is_worn = False
        while left:
            deadline_s = began_s + self._options.timeout_s - monotonic()
            try:
                messages = await process.receive(max(deadline_s, 1e-3), "a reward")
            except WaitExpired:
                messages, is_hung = [], True
            for word, index, *rest in messages:
                if word == "began":
                    began, began_s, has_begun = index, monotonic(), True
                elif word == "done":
                    self._starts = 0
                    process.calls += 1
                    is_worn |= self._done(left.pop(index), rest, monotonic() - began_s)
                    began_s, has_begun = monotonic(), False
            if not messages:
                culprit = began if has_begun else next(iter(left)) if is_hung else None
                call = left.pop(culprit) if culprit is not None else None
                self._waiting.extendleft(reversed(left.values()))
                self._in_background(self._lost(process, call, began_s, hung=is_hung))
                return False
        if is_worn:
            self._replace(process)
        return not is_worn

    def _done(self, call: RewardCall, rest: list[Any], seconds: float) -> bool:
        """Set the outcome that a child has sent; returns whether the child should be replaced."""
        result, value, parts, detail, line, worn = rest
        outcome = RewardOutcome(
            result=Result(result), value=value, parts=parts, detail=detail, line=line, seconds=seconds
        )
        if not call.outcome.done():
            call.outcome.set_result(outcome)
        return bool(worn)

    async def _lost(self, process: RewardProcess, call: RewardCall | None, began_s: float, *, hung: bool) -> None:
        """End a child that is hung or has ended; make the call in progress again, or set its outcome."""
        ended = await self._end(process, hung=hung)
        seconds = monotonic() - began_s
        if call is None:
            self._starts += 1
            if self._starts >= MAX_STARTS:
                function = self._functions[0]
                what = f"{_ended(ended)}, outside of a call, {MAX_STARTS} times"
                self._fail(ConfigError(f"{function.described}: {what}; {FIX}"))
        elif not hung and call.attempts < self._options.retries:
            call.attempts += 1
            self._waiting.appendleft(call)
        elif not call.outcome.done():
            detail = f"it did not return in {self._options.timeout_s:g} s" if hung else _ended(ended)
            line = ended.get("lines", {}).get(self._functions[call.function].path, 0)
            result = Result.TIMEOUT if hung else Result.DIED
            call.outcome.set_result(RewardOutcome(result, detail=detail, line=line, seconds=seconds))
        if self._failure is not None:
            self._fail(self._failure)
        elif self._waiting:
            self._has_calls.set()

    def _replace(self, process: RewardProcess) -> None:
        """End a child that has no call; the next call starts another child."""
        self._in_background(self._end(process))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work`` as a task while the next child makes calls."""
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _next_process(self) -> RewardProcess:
        """A child that has loaded the functions: a spare one, or a new one."""
        if not self._spares:
            return await self._start(log.info)
        spare = self._spares.popleft()
        self._prepare()
        return await wait_until(spare, self._options.load_timeout_s + 2 * GRACE_S, "a child", BLOCKED_ON)

    def _prepare(self) -> None:
        """Start spare children, if a child has been lost before."""
        most = min(MAX_SPARES, self._options.workers) if self._has_lost and not self._is_closed else 0
        while len(self._spares) < most:
            spare = asyncio.create_task(self._start(log.info))
            spare.add_done_callback(_retrieve_error)
            self._spares.append(spare)

    async def _end(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]:
        """End a child, and start a spare one; returns the report of its guard."""
        self._processes.discard(process)
        self._has_lost = True
        self._prepare()
        return await process.end(hung=hung)

    async def _start(self, progress: Callable[[str], None]) -> RewardProcess:
        """Start a child, and wait until it has loaded the functions. Raises ConfigError if one cannot be loaded."""
        options = self._options
        process = self._spawn()
        self._processes.add(process)
        try:
            messages = await self._loaded(process, progress)
        except WaitExpired:
            messages = []
            ended = await self._drop(process, hung=True)
            what = f"it did not return in {options.load_timeout_s:g} s"
        else:
            ended = {} if messages else await self._drop(process)
            what = _ended(ended)
        if messages and messages[0][0] == "unusable":
            _, index, what, line = messages[0]
            await self._drop(process)
            raise ConfigError(f"{self._functions[index].at(line)}: {what}; {FIX}")
        if not messages:
            lines: dict[str, int] = ended.get("lines", {})
            if code := max(ended.get("guard") or 0, 0):
                raise ConfigError(
                    f"the process that loads {self._functions[0].described} could not be started: Python ended with "
                    f"exit code {code}, and the reason is in its output"
                )
            functions = [one for one in self._functions if lines.get(one.path)] or self._functions[:1]
            at = functions[0].at(lines.get(functions[0].path, 0))
            raise ConfigError(f"{at}: {what}, {LOADING}; {FIX}")
        return process

    def _spawn(self) -> RewardProcess:
        """Start a guard, which forks a child."""
        options = self._options
        data, of_child = socket.socketpair()
        control, of_guard = socket.socketpair()
        with of_child, of_guard:
            fds = (of_child.fileno(), of_guard.fileno())
            words = [sys.executable, RUN_MODULE, "flowrt.rewards.guard"]
            words += ["--data", str(fds[0]), "--control", str(fds[1])]
            words += ["--memory-bytes", str(options.memory_mb << 20), "--sandbox", options.code_sandbox]
            words += ["--timeout-s", str(options.timeout_s)]
            if self._task is not None:
                words += ["--task", json.dumps([self._task.module, self._task.configuration])]
            environment = {name: value for name, value in os.environ.items() if name != options.key_variable}
            guard = subprocess.Popen(
                [*words, json.dumps([[one.name, one.kind, one.argument] for one in self._functions])],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=fds,
                start_new_session=True,
                env=environment,
            )
        for connection in (data, control):
            connection.setblocking(False)
        return RewardProcess(guard, data, control)

    async def _drop(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]:
        """End a child that has not loaded the functions."""
        self._processes.discard(process)
        return await process.end(hung=hung)

    async def _loaded(self, process: RewardProcess, progress: Callable[[str], None]) -> list[list[Any]]:
        limit_s = self._options.load_timeout_s
        first_s = min(PROGRESS_AFTER_S, limit_s)
        try:
            return await process.receive(first_s, "reward functions to be loaded")
        except WaitExpired:
            if first_s == limit_s:
                raise
        where = self._functions[0].described
        progress(f"waiting for {where}, {LOADING}: at most {limit_s:g} s (reward.load_timeout_s)")
        return await process.receive(limit_s - first_s, "reward functions to be loaded")


def _retrieve_error(task: asyncio.Task[RewardProcess]) -> None:
    """Mark the error of a spare child as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _ended(ended: dict[str, Any]) -> str:
    """How a child has ended, as the end of a sentence, from the report of its guard."""
    code = ended.get("ended")
    if code is None:
        return "it closed the file descriptors of its process, or killed it"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"it ended its process with exit code {code}"
