"""Calls of async reward functions: many at a time in one child process.

- At most ``reward.concurrency`` calls are in progress, and ``reward.rate_per_s`` of them begin in a second.
- The child ends a call at its deadline. A child that does not, because its event loop is blocked, is killed, as one
  that ends in a call is replaced. If several calls were in progress, they are then made one after the other, as those
  of other functions, so that only the one at fault fails.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from flowrt.errors import WaitExpired
from flowrt.rewards.call_forms import Rate
from flowrt.rewards.calls import CallQueue, RewardCall, new_number
from flowrt.rewards.child import packed
from flowrt.rewards.children import RewardChildren
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.reward_process import BLOCKED_ON, GRACE_S, WROTE, RewardProcess
from flowrt.runtime.waits import BoundedElsewhere, cancel_and_wait, wait_any, wait_until

MORE = BoundedElsewhere("the next call, or the end of the pool")
OUTCOMES = BoundedElsewhere("the deadlines of the calls")
OnLoss = Callable[[RewardProcess, RewardCall | None, float, bool], Coroutine[Any, Any, None]]
"""Called with a child that hangs or has ended, the only call that was in progress, when it began (a monotonic time, in
seconds), and whether the child hangs."""


class AsyncCalls:
    """The calls of the async functions of a pool."""

    def __init__(
        self,
        children: RewardChildren,
        options: RewardOptions,
        rate: Rate,
        *,
        on_loss: OnLoss,
        call_one_by_one: Callable[[Sequence[RewardCall]], None],
    ) -> None:
        """Begin no call yet.

        Args:
            children: makes the child processes.
            options: deadlines and limits.
            rate: limit on the rate of calls.
            on_loss: ends a child, and makes its call again or sets its outcome.
            call_one_by_one: makes calls, one of which is at fault, each by itself.
        """
        self._children = children
        self._options = options
        self._rate = rate
        self._on_loss = on_loss
        self._call_one_by_one = call_one_by_one
        self._waiting = CallQueue(children.form, options.batch_size)
        self._running: dict[int, RewardCall] = {}
        self._since_s: dict[int, float] = {}
        """When each running call began; a call that has been sent may wait for others to end."""
        self._received_s = 0.0
        """When the child was last sent a call, or sent a message."""
        self._has_more = asyncio.Event()
        self.is_started = False

    def add(self, call: RewardCall) -> None:
        """Queue a call."""
        self._waiting.add([call])
        self.wake()

    def wake(self) -> None:
        """Look at the calls that wait."""
        self._has_more.set()

    def fail(self, error: BaseException) -> None:
        """Let those who wait for an outcome raise ``error``."""
        self._waiting.fail(error)
        for call in self._running.values():
            call.fail(error)

    async def run(self) -> None:
        """Make calls until cancelled. Raises ConfigError if a child cannot load the functions."""
        while True:
            while not self._waiting:
                self._has_more.clear()
                await self._more()
            await self._serve(await self._children.next())

    async def _more(self) -> None:
        await wait_until(self._has_more.wait(), MORE, "calls of async reward functions", "the reward role")

    async def _serve(self, process: RewardProcess) -> None:
        """Make calls with a child until it is lost or replaced."""
        receiving = asyncio.create_task(process.receive(OUTCOMES, "rewards"))
        is_worn = False
        await process.begin_async()
        try:
            while True:
                delay_s = None if is_worn else await self._send(process)
                if is_worn and not self._running:
                    self._children.replace(process)
                    return
                self._has_more.clear()
                await self._wait(receiving, delay_s)
                if receiving.done():
                    messages = receiving.result()
                    if not messages:
                        self._lose(process, is_hung=False)
                        return
                    receiving = asyncio.create_task(process.receive(OUTCOMES, "rewards"))
                    self._received_s = monotonic()
                    for word, number, *rest in messages:
                        if number not in self._running:
                            process.fault = WROTE
                            self._lose(process, is_hung=False)
                            return
                        if word == "began":
                            self._since_s[number] = monotonic()
                        else:
                            rows, worn = rest
                            is_worn |= self._children.note_call(process) or worn
                            seconds = monotonic() - self._since_s.pop(number)
                            self._waiting.finish(self._running.pop(number), rows, seconds)
                elif self._deadline_s() <= 0:
                    self._lose(process, is_hung=True)
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
            if (call := self._waiting.take()) is None:
                return None
            self._rate.take()
            number = new_number()
            self._running[number], self._received_s = call, monotonic()
            facts = self._children.form(call.function).facts
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

    def _lose(self, process: RewardProcess, *, is_hung: bool) -> None:
        """The child hangs or has ended: the only call in progress was at fault, or each is made again by itself."""
        running, began_s = list(self._running.values()), min(self._since_s.values(), default=monotonic())
        self._running.clear()
        self._since_s.clear()
        if len(running) > 1:
            self._call_one_by_one(running)
            self._children.in_background(self._children.end(process, hung=is_hung))
            return
        call = running[0] if running else None
        self._children.in_background(self._on_loss(process, call, began_s, is_hung))
