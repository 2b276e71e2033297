"""Waits with deadlines: every wait of flowrt that may not end by itself is made here.

- Every wait has a deadline, and names what it waits for and, as ``blocked_on``, the worker or object that has to act.
- Open waits are listed by `open_waits`; a wait that reaches its deadline raises WaitExpired with the same information.
- A number of seconds does not contain the time in which this process itself did not run, because it was stopped or its
  event loop blocked: what it waits for may have happened, or may have been stopped as well.
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
from flowrt.runtime.clock import MIN_ABSENCE_S

log = logging.getLogger(__name__)
Result = TypeVar("Result")
POLLS_PER_TIMEOUT = 8
"""Number of checks of a `LivenessTimeout`, or of a number of seconds, within its seconds."""
MAX_LATE_POLLS = POLLS_PER_TIMEOUT
"""Number of late checks that do not count, so that a wait on a loop that is often blocked has an end, too."""
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
    return [wait.as_wait() for wait in _open.copy().values()]


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
            async with asyncio.timeout(None) as timer:
                with _expiring(timer, deadline):
                    return await work
        except TimeoutError:
            if not timer.expired():
                raise  # raised by the work itself
            raise expired(what, blocked_on, deadline) from None


class _Polls:
    """The checks of one deadline of ``seconds``: a check that is late does not count."""

    def __init__(self, seconds: float) -> None:
        self.interval_s = seconds / POLLS_PER_TIMEOUT
        self._left, self._late_left = POLLS_PER_TIMEOUT, MAX_LATE_POLLS

    def count(self, late_s: float) -> bool:
        """Count a check that was made ``late_s`` seconds late; returns whether it was the last one."""
        if late_s > MIN_ABSENCE_S and self._late_left:
            self._late_left -= 1
        else:
            self._left -= 1
        return self._left <= 0


@contextlib.contextmanager
def _expiring(timer: asyncio.Timeout, seconds: float) -> Iterator[None]:
    """Let ``timer`` expire after ``seconds`` in which the event loop ran."""
    loop, polls = asyncio.get_running_loop(), _Polls(seconds)
    handle: asyncio.TimerHandle

    def check() -> None:
        nonlocal handle
        now = loop.time()
        if polls.count(now - handle.when()):
            timer.reschedule(now)
        else:
            handle = loop.call_later(polls.interval_s, check)

    handle = loop.call_later(polls.interval_s, check)
    try:
        yield
    finally:
        handle.cancel()


async def _wait(
    works: Collection[asyncio.Future[Any]], seconds: float | None, return_when: str
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """As `asyncio.wait`, for ``seconds`` in which the event loop ran."""
    if seconds is None:
        return await asyncio.wait(works, return_when=return_when)
    loop, polls = asyncio.get_running_loop(), _Polls(seconds)
    while True:
        due_s = loop.time() + polls.interval_s
        done, pending = await asyncio.wait(works, timeout=polls.interval_s, return_when=return_when)
        is_over = not pending or (done and return_when == asyncio.FIRST_COMPLETED)
        if is_over or polls.count(loop.time() - due_s):
            return done, pending


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
        done, _ = await _wait(works, limit_s, asyncio.FIRST_COMPLETED)
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
        _, pending = await _wait(works, limit_s, asyncio.ALL_COMPLETED)
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
