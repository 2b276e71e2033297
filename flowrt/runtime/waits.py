"""Waits with deadlines: every wait of flowrt that may not end by itself is made here.

- Every wait has a deadline, and names what it waits for and, as ``blocked_on``, the worker or object that has to act.
- Open waits are listed by `open_waits`; a wait that reaches its deadline raises WaitExpired with the same information.
- A deadline is a number of seconds, a `LivenessTimeout` that heartbeats renew, or a `BoundedElsewhere`: another wait
  or timer that is certain to end this one.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

from flowrt.errors import WaitExpired
from flowrt.ids import CONTROLLER as CONTROLLER

log = logging.getLogger(__name__)
Result = TypeVar("Result")
POLLS_PER_TIMEOUT = 8
"""Number of checks of a `LivenessTimeout` within its seconds."""
MIN_POLL_S = 1e-3
POLL_FRACTION = 0.01
"""Polling interval as a fraction of the wait so far: an event is noticed late by at most this fraction of the wait."""


@dataclass(frozen=True, slots=True)
class BoundedElsewhere:
    """Deadline of a wait that another wait or timer ends; ``by`` names it."""

    by: str


@dataclass(slots=True)
class LivenessTimeout:
    """Deadline of ``seconds`` that starts again with each heartbeat, i.e. each call of `renew`."""

    seconds: float
    heartbeats: int = 0

    def renew(self) -> None:
        self.heartbeats += 1


Deadline = float | BoundedElsewhere | LivenessTimeout


@dataclass(slots=True)
class Wait:
    """An open wait."""

    thread: str  # name of the thread of this process that waits
    what: str
    blocked_on: str  # the worker or object that has to act
    deadline: Deadline
    since_s: float = field(default_factory=monotonic)

    @property
    def limit_s(self) -> float:
        """Longest duration of the wait in seconds; infinite for `BoundedElsewhere`."""
        if isinstance(self.deadline, BoundedElsewhere):
            return float("inf")
        return self.deadline.seconds if isinstance(self.deadline, LivenessTimeout) else self.deadline

    def __str__(self) -> str:
        elsewhere = self.deadline.by if isinstance(self.deadline, BoundedElsewhere) else ""
        limit = f"ended by {elsewhere}" if elsewhere else f"at most {self.limit_s:.0f} s"
        age_s = monotonic() - self.since_s
        return f"{self.thread} waits {age_s:.1f} s ({limit}) for {self.what}; blocked on {self.blocked_on}"


_open: "dict[int, tracked]" = {}
_numbers = itertools.count()


def open_waits() -> list[Wait]:
    """The open waits of this process, oldest first."""
    return [one.as_wait() for one in _open.copy().values()]


class tracked:  # noqa: N801
    """``with tracked(what, blocked_on, deadline):`` lists a wait whose deadline a library or another timer enforces."""

    __slots__ = ("_blocked_on", "_deadline", "_number", "_since_s", "_thread", "_what")

    def __init__(self, what: str, blocked_on: str, deadline: Deadline) -> None:
        self._what = what
        self._blocked_on = blocked_on
        self._deadline = deadline
        self._number = next(_numbers)

    def __enter__(self) -> None:
        # hot path: entered for every request, so a `Wait` is only made by `open_waits`
        self._since_s = monotonic()
        self._thread = threading.current_thread()
        _open[self._number] = self

    def as_wait(self) -> Wait:
        return Wait(
            thread=self._thread.name,
            what=self._what,
            blocked_on=self._blocked_on,
            deadline=self._deadline,
            since_s=self._since_s,
        )

    def __exit__(self, *_: object) -> None:
        del _open[self._number]


def expired(what: str, blocked_on: str, seconds: float) -> WaitExpired:
    """The error of a wait that has reached its deadline."""
    return WaitExpired(f"waited {seconds:.1f} s for {what}; blocked on {blocked_on}")


# ---- on an event loop


async def wait_until(work: Awaitable[Result], deadline: Deadline, what: str, blocked_on: str) -> Result:
    """Await ``work``. At the deadline it is cancelled and WaitExpired is raised."""
    with tracked(what, blocked_on, deadline):
        if isinstance(deadline, BoundedElsewhere):
            return await work
        if isinstance(deadline, LivenessTimeout):
            return await _while_alive(work, deadline, what, blocked_on)
        try:
            async with asyncio.timeout(deadline) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise  # raised by the work itself
            raise expired(what, blocked_on, deadline) from None


@contextlib.asynccontextmanager
async def locked(lock: asyncio.Lock, deadline: Deadline, what: str, blocked_on: str) -> AsyncIterator[None]:
    """Hold the lock during a block. Raises WaitExpired if the lock cannot be acquired by the deadline."""
    await wait_until(lock.acquire(), deadline, what, blocked_on)
    try:
        yield
    finally:
        lock.release()


async def _while_alive(work: Awaitable[Result], liveness: LivenessTimeout, what: str, blocked_on: str) -> Result:
    """Counts polls without a heartbeat, not time, because time also passes while this process itself is stopped."""
    task = asyncio.ensure_future(work)
    try:
        heartbeats = liveness.heartbeats
        missed = 0
        while missed < POLLS_PER_TIMEOUT:
            done, _ = await asyncio.wait({task}, timeout=liveness.seconds / POLLS_PER_TIMEOUT)
            if done:
                return task.result()
            missed = missed + 1 if heartbeats == liveness.heartbeats else 0
            heartbeats = liveness.heartbeats
        raise expired(what, blocked_on, liveness.seconds)
    finally:
        task.cancel()


async def wait_any(
    works: Collection[asyncio.Future[Any]], deadline: Deadline, what: str, blocked_on: str
) -> set[asyncio.Future[Any]]:
    """Wait until a future is done, and return all that are. Raises WaitExpired at the deadline; cancels no future."""
    limit_s = None if isinstance(deadline, BoundedElsewhere) else deadline
    assert not isinstance(limit_s, LivenessTimeout)
    with tracked(what, blocked_on, deadline):
        done, _ = await asyncio.wait(works, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise expired(what, blocked_on, limit_s or 0.0)
    return done


async def wait_all(works: Collection[asyncio.Future[Any]], deadline: Deadline, what: str, blocked_on: str) -> None:
    """Wait until all have a result or an error. Raises WaitExpired at the deadline; cancels no future."""
    limit_s = None if isinstance(deadline, BoundedElsewhere) else deadline
    assert not isinstance(limit_s, LivenessTimeout)
    if not works:
        return
    with tracked(what, blocked_on, deadline):
        _, pending = await asyncio.wait(works, timeout=limit_s)
    if pending:
        raise expired(what, blocked_on, limit_s or 0.0)


async def cancel_and_wait(tasks: Collection[asyncio.Future[Any]], deadline_s: float) -> bool:
    """Cancel tasks and wait until they have ended. Logs and returns False if one has not after ``deadline_s``."""
    for task in tasks:
        task.cancel()
    try:
        await wait_all(list(tasks), deadline_s, "the end of cancelled tasks", "these tasks")
    except WaitExpired as late:
        log.warning("%s", late)
        return False
    return True


async def pause(seconds: float) -> None:
    """Sleep on an event loop: a delay, not a wait for an event."""
    await asyncio.sleep(seconds)


# ---- on other threads


def poll_until_true(
    condition: threading.Condition, predicate: Callable[[], object], deadline_s: float, what: str, blocked_on: str
) -> None:
    """Wait until the predicate is true; the caller holds the condition. Raises WaitExpired after ``deadline_s``."""
    if predicate():
        return
    with tracked(what, blocked_on, deadline_s):
        if not condition.wait_for(predicate, deadline_s):
            raise expired(what, blocked_on, deadline_s)


def queue_get(items: "queue.SimpleQueue[Result]", deadline_s: float, what: str, blocked_on: str) -> Result:
    """The next item of a queue. Raises WaitExpired if none arrives within ``deadline_s``."""
    with tracked(what, blocked_on, deadline_s):
        try:
            return items.get(timeout=deadline_s)
        except queue.Empty:
            raise expired(what, blocked_on, deadline_s) from None


def join_thread(thread: threading.Thread, deadline_s: float) -> bool:
    """Wait for a thread to end. Returns False if it has not ended after ``deadline_s``."""
    with tracked(f"the end of thread {thread.name}", "that thread", deadline_s):
        thread.join(deadline_s)
    return not thread.is_alive()


def blocking(call: Callable[[], Result], deadline: Deadline, what: str, blocked_on: str) -> Result:
    """Make a blocking call whose library enforces the deadline. Returns its result and raises its errors."""
    with tracked(what, blocked_on, deadline):
        return call()


def poll_until(
    is_done: Callable[[], bool], stop: threading.Event, interval_s: float, deadline_s: float, what: str, blocked_on: str
) -> None:
    """Poll until ``is_done()``. Raises WaitExpired at the deadline, and when ``stop`` is set."""
    end_s = monotonic() + deadline_s
    with tracked(what, blocked_on, deadline_s):
        while not is_done():
            if monotonic() > end_s or stop.wait(interval_s):
                raise expired(what, blocked_on, deadline_s)


def poll_while_alive(
    is_done: Callable[[], bool], heartbeats: Callable[[], Mapping[int, int]], seconds: float, what: str, blocked_on: str
) -> list[int]:
    """Poll until ``is_done()``, or until a peer has sent no heartbeat for ``seconds``.

    Args:
        is_done: whether the wait is over.
        heartbeats: returns the count of heartbeats of each peer that has not arrived, by the peer's number.
        seconds: the liveness timeout of each peer. As in `wait_until`, polls are counted, not time.
        what: what is waited for, as in `Wait`.
        blocked_on: as in `Wait`.

    Returns:
        The peers without a heartbeat; empty when ``is_done()``.
    """
    begin_s = monotonic()
    last: dict[int, int] = {}
    missed: dict[int, int] = {}
    never = threading.Event()
    with tracked(what, blocked_on, LivenessTimeout(seconds)):
        while True:
            next_s = monotonic() + seconds / POLLS_PER_TIMEOUT
            while (now_s := monotonic()) < next_s:
                if is_done():
                    return []
                never.wait(min(max(MIN_POLL_S, (now_s - begin_s) * POLL_FRACTION), next_s - now_s))
            counts = heartbeats()
            missed = {
                peer: missed.get(peer, 0) + 1 if count == last.get(peer, count) else 0 for peer, count in counts.items()
            }
            last = dict(counts)
            if dead := [peer for peer, polls in missed.items() if polls == POLLS_PER_TIMEOUT]:
                return dead


def sleep_blocking(seconds: float) -> None:
    """Sleep on a thread without an event loop: a delay, not a wait for an event."""
    threading.Event().wait(seconds)


@contextlib.contextmanager
def every(call: Callable[[], object], interval_s: float, name: str) -> Iterator[None]:
    """Make a call every ``interval_s`` seconds on another thread, while the block runs."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(interval_s):
            call()

    threading.Thread(target=repeat, name=name, daemon=True).start()
    try:
        yield
    finally:
        stop.set()
