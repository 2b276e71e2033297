"""Calls of async reward functions: many at a time in one child process.

- At most ``reward.concurrency`` calls are in progress, and ``reward.rate_per_s`` of them begin in a second.
- The child ends a call at its deadline. A child that does not, because its event loop is blocked, is killed, as one
  that ends in a call is replaced. If several calls were in progress, they are then made one after the other, as those
  of other functions, so that only the one at fault fails.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import Any, Protocol

from flowrt.errors import WaitExpired
from flowrt.rewards.child import packed
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.processes import BLOCKED_ON, GRACE_S, RewardCall, RewardProcess
from flowrt.rewards.samples import CallForm, Rate
from flowrt.runtime.waits import BoundedElsewhere, cancel_and_wait, wait_any, wait_until

MAX_CALLS = 10_000
"""Number of calls after which a child is replaced."""
SIDE_BY_SIDE: list[object] = []
"""The message that makes a child make the calls that follow side by side."""
MORE = BoundedElsewhere("the next call, or the end of the pool")
OUTCOMES = BoundedElsewhere("the deadlines of the calls")


class CallingPool(Protocol):
    """The pool: its children, and what follows the end of a call."""

    def form(self, function: int) -> CallForm: ...
    def joined(self, one: RewardCall, waiting: deque[RewardCall]) -> RewardCall: ...
    async def next_process(self) -> RewardProcess: ...
    def done(self, call: RewardCall, rest: list[Any], seconds: float, waiting: deque[RewardCall]) -> bool: ...
    async def lost(self, process: RewardProcess, call: RewardCall | None, began_s: float, *, hung: bool) -> None: ...
    def call_one_by_one(self, calls: Sequence[RewardCall]) -> None: ...
    def replace(self, process: RewardProcess) -> None: ...
    async def end(self, process: RewardProcess, *, hung: bool = False) -> dict[str, Any]: ...
    def in_background(self, work: Coroutine[Any, Any, object]) -> None: ...


class AsyncCalls:
    """The calls of the async functions of a pool."""

    def __init__(self, pool: CallingPool, options: RewardOptions, rate: Rate) -> None:
        self._pool = pool
        self._options = options
        self._rate = rate
        self._waiting: deque[RewardCall] = deque()
        self._running: dict[int, RewardCall] = {}
        self._since_s: dict[int, float] = {}
        """When each running call began; a call that has been sent may wait for others to end."""
        self._received_s = 0.0
        """When the child was last sent a call, or sent a message."""
        self._has_more = asyncio.Event()
        self._next = 0
        self.is_started = False

    def add(self, call: RewardCall) -> None:
        """Queue a call."""
        self._waiting.append(call)
        self.wake()

    def wake(self) -> None:
        """Look at the calls that wait."""
        self._has_more.set()

    def fail(self, error: BaseException) -> None:
        """Let those who wait for an outcome raise ``error``."""
        for one in (*self._waiting, *self._running.values()):
            one.fail(error)
        self._waiting.clear()

    async def run(self) -> None:
        """Make calls until cancelled. Raises ConfigError if a child cannot load the functions."""
        while True:
            while not self._waiting:
                self._has_more.clear()
                await self._more()
            await self._serve(await self._pool.next_process())

    async def _more(self) -> None:
        await wait_until(self._has_more.wait(), MORE, "calls of async reward functions", "the reward role")

    async def _serve(self, process: RewardProcess) -> None:
        """Make calls with a child until it is lost or replaced."""
        receiving = asyncio.create_task(process.receive(OUTCOMES, "rewards"))
        is_worn = False
        await process.send(packed(SIDE_BY_SIDE), GRACE_S)
        try:
            while True:
                delay_s = None if is_worn else await self._send(process)
                if is_worn and not self._running:
                    self._pool.replace(process)
                    return
                self._has_more.clear()
                await self._wait(receiving, delay_s)
                if receiving.done():
                    messages = receiving.result()
                    if not messages:
                        self._lose(process, hung=False)
                        return
                    receiving = asyncio.create_task(process.receive(OUTCOMES, "rewards"))
                    self._received_s = monotonic()
                    for word, number, *rest in messages:
                        if word == "began":
                            self._since_s[number] = monotonic()
                        else:
                            process.calls += 1
                            seconds = monotonic() - self._since_s.pop(number)
                            is_worn |= self._pool.done(self._running.pop(number), rest, seconds, self._waiting)
                    is_worn |= process.calls >= MAX_CALLS
                elif self._deadline_s() <= 0:
                    self._lose(process, hung=True)
                    return
        finally:
            await cancel_and_wait([receiving], GRACE_S)

    async def _send(self, process: RewardProcess) -> float | None:
        """Send the calls that may begin; returns the seconds after which the next may, None if none waits for that."""
        while True:
            if not self._waiting or len(self._running) >= self._options.concurrency:
                return None
            if (delay_s := self._rate.due_in_s()) > 0:
                return delay_s
            call = self._pool.joined(self._waiting.popleft(), self._waiting)
            if call.is_done:  # cancelled
                continue
            self._rate.take()
            number, self._next = self._next, self._next + 1
            self._running[number], self._received_s = call, monotonic()
            facts = self._pool.form(call.function).facts
            message, limit_s = packed([call.message(number, facts)]), self._options.timeout_s + GRACE_S
            if not await process.send(message, limit_s):
                self._since_s[number] = monotonic() - limit_s  # late: the child is lost
                return None

    async def _wait(self, receiving: asyncio.Task[Any], delay_s: float | None) -> None:
        """Wait for a message, another call, the next deadline, or until the rate allows another call."""
        limit_s = max(min(self._deadline_s(), delay_s if delay_s is not None else self._deadline_s()), 1e-3)
        more = asyncio.create_task(self._more())
        try:
            limit = limit_s if limit_s < float("inf") else MORE
            await wait_any({receiving, more}, limit, "rewards of async functions", BLOCKED_ON)
        except WaitExpired:
            return
        finally:
            await cancel_and_wait([more], GRACE_S)

    def _deadline_s(self) -> float:
        """Seconds until a call is so late that the event loop of the child must be blocked; infinite without calls."""
        if not self._running:
            return float("inf")
        since_s = [*self._since_s.values()]
        if len(since_s) < len(self._running):
            since_s.append(self._received_s)
        return min(since_s) + self._options.timeout_s + GRACE_S - monotonic()

    def _lose(self, process: RewardProcess, *, hung: bool) -> None:
        """The child hangs or has ended: the only call in progress was at fault, or each is made again by itself."""
        running, began_s = list(self._running.values()), min(self._since_s.values(), default=monotonic())
        self._running.clear()
        self._since_s.clear()
        if len(running) > 1:
            self._pool.call_one_by_one(running)
            self._pool.in_background(self._pool.end(process, hung=hung))
            return
        call = running[0] if running else None
        self._pool.in_background(self._pool.lost(process, call, began_s, hung=hung))
