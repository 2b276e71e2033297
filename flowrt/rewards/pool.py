"""Calls of reward functions in child processes.

- A call that exceeds its deadline, or in which the child dies, affects its own outcome only. The child is replaced, and
  its other calls are made by another child.
- The child processes, and all processes that they start, end with the pool and with the process of the pool.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from flowrt.errors import ConfigError, FlowError, WaitExpired
from flowrt.rewards.async_calls import AsyncCalls
from flowrt.rewards.call_forms import CallForm, Rate, RewardSample
from flowrt.rewards.calls import CallQueue, RewardCall, Scoring, new_number
from flowrt.rewards.child import packed
from flowrt.rewards.children import FIX, RewardChildren, described_end
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.reward_names import RewardFunction, TaskReward
from flowrt.rewards.reward_process import GRACE_S, WROTE, RewardProcess
from flowrt.runtime.waits import BoundedElsewhere, wait_until

log = logging.getLogger(__name__)
CALLS_PER_MESSAGE = 32
MAX_SENT_BYTES = 1 << 24
"""Bytes of rows after which a message takes no further call."""
MAX_IDLE_ENDS = 3
"""Number of consecutive children that may end outside of a call before the pool fails."""
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
        self._functions = tuple(functions)
        self._options = options
        self._children = RewardChildren(functions, options, output, task, model)
        self._async_calls = AsyncCalls(
            self._children,
            options,
            Rate(options.rate_per_s) if rate is None else rate,
            on_loss=self._lost,
            call_one_by_one=self._call_one_by_one,
        )
        self._waiting = CallQueue(self.form, options.batch_size)
        self._has_calls = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._sync_workers = 0
        self._failure: FlowError | None = None
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
        call = RewardCall(function, [scoring])
        if self._failure is not None or self._is_closed:
            call.fail(self._failure or FlowError("the reward functions' processes are closed"))
        elif self.form(function).is_async:
            self._async_calls.add(call)
            if not self._async_calls.is_started:
                self._async_calls.is_started = True
                self._start_worker(self._work_async())
        else:
            self._waiting.add([call])
            self._start_workers()
        return scoring.outcomes

    def _call_one_by_one(self, calls: Sequence[RewardCall]) -> None:
        """Make calls of async functions one after the other, as those of other functions."""
        for call in calls:
            call.is_part = True
        self._waiting.add(calls)
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
        return bool(self._children.forms)

    def form(self, function: int) -> CallForm:
        """How a function is called. `load` has been called."""
        return self._children.form(function)

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
        await self._children.load(progress)

    async def close(self) -> None:
        """End the child processes and all processes that they have started; open calls raise FlowError."""
        self._fail(FlowError("the reward functions' processes were closed during a call"))
        self._is_closed = True
        await self._children.close(self._workers)

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
                    process = await self._children.next()
                calls = self._take()
                if not await self._make(process, calls):
                    process = None
                calls = []
        except FlowError as error:
            self._fail(error)
        finally:  # also when the pool is closed
            for call in calls:
                call.fail(self._failure or FlowError("the processes of reward functions failed"))

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
        while len(taken) < most and left > 0 and (call := self._waiting.take()) is not None:
            taken.append(call)
            left -= sum(len(sample.row) for scoring in call.scorings for sample in scoring.samples)
        return taken

    def _on_end(self, worker: asyncio.Task[None]) -> None:
        """Fail the pool if a worker has ended with an internal error."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self._fail(FlowError(f"{type(error).__name__}: {error}"))

    def _fail(self, error: FlowError) -> None:
        self._failure = self._failure or error
        self._waiting.fail(error)
        self._async_calls.fail(error)

    async def _make(self, process: RewardProcess, calls: list[RewardCall]) -> bool:
        """Send calls to a child and set their outcomes; returns False if the child is lost or is being replaced."""
        left = {new_number(): call for call in calls}
        if not left:
            return True
        message = packed([call.message(number, self.form(call.function).facts) for number, call in left.items()])
        began, began_s, is_hung, has_begun = 0, monotonic(), False, False
        await process.send(message, self._options.timeout_s + GRACE_S)
        is_worn = False
        limit_s = self._options.timeout_s
        if any(self.form(call.function).is_async for call in calls):
            limit_s += GRACE_S  # the child ends calls of async functions itself
        while left:
            deadline_s = began_s + limit_s - monotonic()
            try:
                messages = await process.receive(max(deadline_s, 1e-3), "a reward")
            except WaitExpired:
                messages, is_hung = [], True
            for word, number, *rest in messages:
                if number not in left:
                    process.fault, messages = WROTE, []
                    break
                if word == "began":
                    began, began_s, has_begun = number, monotonic(), True
                elif word == "done":
                    rows, worn = rest
                    is_worn |= self._children.note_call(process) or worn
                    self._waiting.finish(left.pop(number), rows, monotonic() - began_s)
                    began_s, has_begun = monotonic(), False
            if not messages:
                culprit = began if has_begun else next(iter(left)) if is_hung else None
                call = left.pop(culprit) if culprit is not None else None
                self._waiting.put_back(left.values())
                self._children.in_background(self._lost(process, call, began_s, is_hung))
                return False
        if is_worn:
            self._children.replace(process)
        return not is_worn

    async def _lost(self, process: RewardProcess, call: RewardCall | None, began_s: float, is_hung: bool) -> None:
        """End a child that is hung or has ended; make the call in progress again, or set its outcome."""
        ended = await self._children.end(process, hung=is_hung)
        seconds = monotonic() - began_s
        if call is None:
            self._children.idle_ends += 1
            if self._children.idle_ends >= MAX_IDLE_ENDS:
                function = self._functions[0]
                what = f"{process.fault or described_end(ended)}, outside of a call, {MAX_IDLE_ENDS} times"
                self._fail(ConfigError(f"{function.described}: {what}; {FIX}"))
        elif halves := call.halves():
            self._waiting.put_back(halves)
        elif not is_hung and call.attempts < self._options.retries:
            call.attempts += 1
            self._waiting.put_back([call])
        elif not call.is_done:
            detail = process.fault or described_end(ended)
            if is_hung:
                detail = f"it did not return in {self._options.timeout_s:g} s"
            line = ended.get("lines", {}).get(self._functions[call.function].path, 0)
            result = Result.TIMEOUT if is_hung else Result.DIED
            call.finish([RewardOutcome(result, detail=detail, line=line, seconds=seconds)])
        if self._failure is not None:
            self._fail(self._failure)
        else:
            self._start_workers()
            self._async_calls.wake()
