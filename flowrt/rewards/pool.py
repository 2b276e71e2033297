"""Child processes that call reward functions.

- A call that exceeds its deadline, or in which the child dies, affects its own outcome only. The child is replaced, and
  its other calls are made by another child.
- The child processes, and all processes that they start, end with the pool and with the process of the pool.

`flowrt.rewards.guard` is the process of a child; `flowrt.rewards.child` documents the messages.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.rewards.async_calls import AsyncCalls
from flowrt.rewards.child import packed
from flowrt.rewards.functions import RewardFunction, TaskReward
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.processes import BLOCKED_ON, GRACE_S, RewardCall, RewardProcess, Scoring
from flowrt.rewards.samples import CallForm, Rate, RewardSample
from flowrt.runtime.interpreter import RUN_MODULE
from flowrt.runtime.waits import BoundedElsewhere, cancel_and_wait, wait_all, wait_until

log = logging.getLogger(__name__)
CALLS_PER_MESSAGE = 32
MAX_SENT_BYTES = 1 << 24
"""Bytes of rows after which a message takes no further call."""
MAX_CALLS = 10_000
"""Number of calls after which a child is replaced."""
MAX_SPARES = 2
"""Maximum number of spare children once one has been lost: starting a child takes as long as many calls."""
MAX_STARTS = 3
"""Number of consecutive children that may end outside of a call before the pool fails."""
PROGRESS_AFTER_S = 3.0
"""Seconds after which a wait for loading is reported as progress."""
FIX = "correct it, and start or resume the run"
LOADING = "while the file was loaded"
SPLIT = (Result.ERROR, Result.MEMORY, Result.TIMEOUT)
"""How a call with several samples fails as a whole, by one of them: it is made again with half of the samples."""
QUEUE = BoundedElsewhere("the next call, or the end of the pool")


class RewardPool:
    """Calls reward functions in child processes, on an event loop. Children are started when there are calls."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        options: RewardOptions,
        output: int | None = None,
        task: TaskReward | None = None,
        model: str = "",
        rate: Rate | None = None,
    ) -> None:
        """Set up the pool; no process is started yet.

        Args:
            functions: the functions, none of which is a request.
            options: number of children, deadlines and limits.
            output: file descriptor for the output of the functions; None: that of this process.
            task: the reward of a task, for a function of kind "task".
            model: directory of the run's model, for functions that take its tokenizer.
            rate: limit on the rate of calls of async functions; None: that of the options.
        """
        self._task = task
        self._model = model
        self._functions = tuple(functions)
        self._options = options
        self._output = output
        self._forms: list[CallForm] = []
        """How each function is called; empty until a child has loaded them."""
        self._loading: asyncio.Task[None] | None = None
        self._async_calls = AsyncCalls(self, options, Rate(options.rate_per_s) if rate is None else rate)
        self._waiting: deque[RewardCall] = deque()
        self._has_calls = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._sync_workers = 0
        self._spares: deque[asyncio.Task[RewardProcess]] = deque()
        self._processes: set[RewardProcess] = set()
        self._failure: FlowError | None = None
        self._endings: set[asyncio.Task[object]] = set()
        """Tasks that end children."""
        self._starts = 0
        self._has_lost = False
        self._is_closed = False

    def call(self, function: int, samples: Sequence[RewardSample]) -> "asyncio.Future[list[RewardOutcome]]":
        """Score samples with a function: one, or, for a group function, a group; returns the future of the outcomes.

        The samples of several calls of a batch function may be scored together. The future raises ConfigError if the
        functions cannot be loaded any more, FlowError if the pool is closed. `load` has been called.

        Args:
            function: index of the function in the pool.
            samples: the samples.
        """
        scoring = Scoring(samples, asyncio.get_running_loop().create_future())
        one = RewardCall(function, [scoring])
        if self._failure is not None or self._is_closed:
            one.fail(self._failure or FlowError("the reward functions' processes are closed"))
        elif self.form(function).is_async:
            self._async_calls.add(one)
            if not self._async_calls.is_started:
                self._async_calls.is_started = True
                self._start_worker(self._work_async())
        else:
            self._waiting.append(one)
            self._start_workers()
        return scoring.outcomes

    def call_one_by_one(self, calls: Sequence[RewardCall]) -> None:
        """Make calls of async functions one after the other, as those of other functions."""
        for one in calls:
            one.is_part = True
        self._waiting.extend(calls)
        self._start_workers()

    def _start_workers(self) -> None:
        """Start workers for the calls that wait, up to their number."""
        self._has_calls.set()
        while self._sync_workers < min(self._options.workers, len(self._waiting)):
            self._sync_workers += 1
            self._start_worker(self._work())

    @property
    def is_loaded(self) -> bool:
        """Whether a child has loaded the functions."""
        return bool(self._forms)

    def form(self, function: int) -> CallForm:
        """How a function is called. `load` has been called."""
        return self._forms[function]

    def _start_worker(self, work: Coroutine[Any, Any, None]) -> None:
        worker = asyncio.create_task(work)
        worker.add_done_callback(self._on_end)
        self._workers.append(worker)

    async def load(self, progress: Callable[[str], None] = log.info) -> None:
        """Start a child, and wait until it has loaded the functions, unless one has been started before.

        Raises ConfigError if a function cannot be loaded. ``progress`` receives notes on long waits.
        """
        if self._is_closed or self._failure is not None:
            raise self._failure or FlowError("the reward functions' processes are closed")
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(progress))
            self._loading.add_done_callback(_retrieve_error)
        limit_s = self._options.load_timeout_s + 3 * GRACE_S
        await wait_until(asyncio.shield(self._loading), limit_s, "a child", BLOCKED_ON)

    async def _load(self, progress: Callable[[str], None]) -> None:
        self._spares.append(asyncio.create_task(self._start(progress)))
        deadline_s = self._options.load_timeout_s + 2 * GRACE_S
        await wait_until(asyncio.shield(self._spares[-1]), deadline_s, "a child", BLOCKED_ON)

    async def close(self) -> None:
        """End the child processes and all processes that they have started; open calls raise FlowError."""
        self._fail(FlowError("the reward functions' processes were closed during a call"))
        self._is_closed = True
        loading = [] if self._loading is None else [self._loading]
        await cancel_and_wait([*self._workers, *self._spares, *loading], GRACE_S)
        with contextlib.suppress(WaitExpired):
            await wait_all(list(self._endings), 4 * GRACE_S, "the end of reward processes", "their guards")
        for process in list(self._processes):
            await self.end(process)

    async def _work(self) -> None:
        """Make calls, one message after the other, with one child at a time."""
        process: RewardProcess | None = None
        calls: list[RewardCall] = []
        try:
            while True:
                while not self._waiting:
                    self._has_calls.clear()
                    await wait_until(self._has_calls.wait(), QUEUE, "calls of reward functions", "the reward role")
                if process is None:
                    process = await self.next_process()
                calls = self._take()
                if not await self._make(process, calls):
                    process = None
                elif process.calls >= MAX_CALLS:
                    self.replace(process)
                    process = None
                calls = []
        except FlowError as error:
            self._fail(error)
        finally:  # also when the pool is closed
            for one in calls:
                one.fail(self._failure or FlowError("the processes of reward functions failed"))

    async def _work_async(self) -> None:
        """Make calls of async functions."""
        try:
            await self._async_calls.run()
        except FlowError as error:
            self._fail(error)

    def _take(self) -> list[RewardCall]:
        """Calls for one message; the fewer calls wait, the fewer, so that no child has all of them."""
        most = max(1, min(CALLS_PER_MESSAGE, len(self._waiting) // (2 * self._options.workers)))
        taken: list[RewardCall] = []
        left = MAX_SENT_BYTES
        while self._waiting and len(taken) < most and left > 0:
            one = self.joined(self._waiting.popleft(), self._waiting)
            if not one.is_done:  # cancelled
                taken.append(one)
                left -= sum(len(sample.row) for scoring in one.scorings for sample in scoring.samples)
        return taken

    def joined(self, one: RewardCall, waiting: deque[RewardCall]) -> RewardCall:
        """A call with the samples of others of its batch function, which are taken out of those that wait."""
        if self._forms[one.function].form != "batch" or one.attempts or one.is_part:
            return one
        others = [of for of in waiting if of.function == one.function and not (of.attempts or of.is_part)]
        for other in others[: self._options.batch_size - 1]:
            waiting.remove(other)
            one.scorings += other.scorings
        return one

    def _on_end(self, worker: asyncio.Task[None]) -> None:
        """Fail the pool if a worker has ended with an internal error."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._fail(FlowError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: FlowError) -> None:
        self._failure = self._failure or error
        while self._waiting:
            self._waiting.popleft().fail(error)
        self._async_calls.fail(error)

    async def _make(self, process: RewardProcess, calls: list[RewardCall]) -> bool:
        """Send calls to a child and set their outcomes; returns False if the child is lost or is being replaced."""
        left = dict(enumerate(calls))
        if not left:
            return True
        message = packed([one.message(index, self._forms[one.function].facts) for index, one in left.items()])
        began, began_s, is_hung, has_begun = 0, monotonic(), False, False
        await process.send(message, self._options.timeout_s + GRACE_S)
        is_worn = False
        limit_s = self._options.timeout_s
        if any(self._forms[one.function].is_async for one in calls):
            limit_s += GRACE_S  # the child ends calls of async functions itself
        while left:
            deadline_s = began_s + limit_s - monotonic()
            try:
                messages = await process.receive(max(deadline_s, 1e-3), "a reward")
            except WaitExpired:
                messages, is_hung = [], True
            for word, index, *rest in messages:
                if word == "began":
                    began, began_s, has_begun = index, monotonic(), True
                elif word == "done":
                    process.calls += 1
                    is_worn |= self.done(left.pop(index), rest, monotonic() - began_s, self._waiting)
                    began_s, has_begun = monotonic(), False
            if not messages:
                culprit = began if has_begun else next(iter(left)) if is_hung else None
                call = left.pop(culprit) if culprit is not None else None
                self._waiting.extendleft(reversed(left.values()))
                self.in_background(self.lost(process, call, began_s, hung=is_hung))
                return False
        if is_worn:
            self.replace(process)
        return not is_worn

    def done(self, call: RewardCall, rest: list[Any], seconds: float, waiting: deque[RewardCall]) -> bool:
        """Set the outcomes that a child has sent; returns whether the child should be replaced.

        A call with several samples that failed as a whole is made again with half of them, in ``waiting``.
        """
        self._starts = 0
        rows, worn = rest
        each_s = seconds / max(len(rows), 1)
        outcomes = [
            RewardOutcome(result=Result(result), value=value, parts=parts, detail=detail, line=line, seconds=each_s)
            for result, value, parts, detail, line in rows
        ]
        if all(one.result in SPLIT for one in outcomes) and (halves := call.halves()):
            waiting.extendleft(reversed(halves))
        else:
            call.finish(outcomes)
        return bool(worn)

    async def lost(self, process: RewardProcess, call: RewardCall | None, began_s: float, *, hung: bool) -> None:
        """End a child that is hung or has ended; make the call in progress again, or set its outcome."""
        ended = await self.end(process, hung=hung)
        seconds = monotonic() - began_s
        if call is None:
            self._starts += 1
            if self._starts >= MAX_STARTS:
                function = self._functions[0]
                what = f"{_ended(ended)}, outside of a call, {MAX_STARTS} times"
                self._fail(ConfigError(f"{function.described}: {what}; {FIX}"))
        elif halves := call.halves():
            self._waiting.extendleft(reversed(halves))
        elif not hung and call.attempts < self._options.retries:
            call.attempts += 1
            self._waiting.appendleft(call)
        elif not call.is_done:
            detail = f"it did not return in {self._options.timeout_s:g} s" if hung else _ended(ended)
            line = ended.get("lines", {}).get(self._functions[call.function].path, 0)
            result = Result.TIMEOUT if hung else Result.DIED
            call.finish([RewardOutcome(result, detail=detail, line=line, seconds=seconds)])
        if self._failure is not None:
            self._fail(self._failure)
        else:
            self._start_workers()
            self._async_calls.wake()

    def replace(self, process: RewardProcess) -> None:
        """End a child that has no call; the next call starts another child."""
        self.in_background(self.end(process))

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work`` as a task while the next child makes calls."""
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def next_process(self) -> RewardProcess:
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

    async def end(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]:
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
        self._forms = [CallForm(form, is_async, tuple(facts)) for form, is_async, facts in messages[0][1]]
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
            words += ["--timeout-s", str(options.timeout_s), "--model", self._model, "--device", options.model_device]
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


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as retrieved, so that asyncio does not log it."""
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
