"""Waiting: the one place where flowrt waits for something that may never come.

Every wait has a deadline, and says what it is for and whose turn it is. Those that are open can be seen
(`open_waits`); one that reaches its deadline raises WaitExpired, which repeats all that. A deadline is a number of
seconds, a `Lifesign` that somebody has to give again and again, or a `Guard`: another wait that is certain to end it.
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

log = logging.getLogger(__name__)
Result = TypeVar("Result")
CONTROLLER = "the controller"
"""Whose turn it is when an answer of the controller is awaited, which knows that itself."""
LOOKS = 8
"""How often a `Lifesign` is looked for within its time."""
SOONEST_S = 1e-3
OFTEN = 100
"""Looks for what cannot be waited for are so far apart that what comes is seen late by 1/100 of the wait, at most."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What ends a wait that has no timer of its own."""

    by: str


@dataclass(slots=True)
class Lifesign:
    """Seconds within which somebody has to be heard, again and again; `give` says that it was."""

    seconds: float
    given: int = 0

    def give(self) -> None:
        self.given += 1


Deadline = float | Guard | Lifesign


@dataclass(slots=True)
class Wait:
    """A wait that is open."""

    who: str  # the thread, of this process
    what: str
    turn: str  # who has to act
    deadline: Deadline
    since_s: float = field(default_factory=monotonic)

    @property
    def limit_s(self) -> float:
        """How long it may take; infinite where something else ends it."""
        if isinstance(self.deadline, Guard):
            return float("inf")
        return self.deadline.seconds if isinstance(self.deadline, Lifesign) else self.deadline

    def __str__(self) -> str:
        until = f"ended by {self.deadline.by}" if isinstance(self.deadline, Guard) else f"at most {self.limit_s:.0f} s"
        age_s = monotonic() - self.since_s
        return f"{self.who} waits {age_s:.1f} s ({until}) for {self.what}; it is the turn of {self.turn}"


_open: "dict[int, noted]" = {}
_numbers = itertools.count()


def open_waits() -> list[Wait]:
    """Every wait of this process that is open, the oldest first."""
    return [one.as_wait() for one in _open.copy().values()]


class noted:  # noqa: N801
    """``with noted(what, turn, deadline):`` around a wait whose deadline is kept elsewhere (a library, a timer)."""

    __slots__ = ("_deadline", "_number", "_since_s", "_thread", "_turn", "_what")

    def __init__(self, what: str, turn: str, deadline: Deadline) -> None:
        self._what, self._turn, self._deadline = what, turn, deadline
        self._number = next(_numbers)

    def __enter__(self) -> None:
        # There is one for every request: what is said of it is put together when somebody looks.
        self._since_s, self._thread = monotonic(), threading.current_thread()
        _open[self._number] = self

    def as_wait(self) -> Wait:
        return Wait(self._thread.name, self._what, self._turn, self._deadline, self._since_s)

    def __exit__(self, *_: object) -> None:
        del _open[self._number]


def expired(what: str, turn: str, seconds: float) -> WaitExpired:
    """The error of a wait that has reached its deadline."""
    return WaitExpired(f"waited {seconds:.1f} s for {what}; it was the turn of {turn}")


# ---- on an event loop


async def until(work: Awaitable[Result], deadline: Deadline, what: str, turn: str) -> Result:
    """Await ``work``; when the deadline comes first it is cancelled, and WaitExpired is raised."""
    with noted(what, turn, deadline):
        if isinstance(deadline, Guard):
            return await work
        if isinstance(deadline, Lifesign):
            return await _while_alive(work, deadline, what, turn)
        try:
            async with asyncio.timeout(deadline) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise  # of the work itself
            raise expired(what, turn, deadline) from None


@contextlib.asynccontextmanager
async def held(lock: asyncio.Lock, deadline: Deadline, what: str, turn: str) -> AsyncIterator[None]:
    """The lock, for the length of a block; raises WaitExpired when others do not let go of it in time."""
    await until(lock.acquire(), deadline, what, turn)
    try:
        yield
    finally:
        lock.release()


async def _while_alive(work: Awaitable[Result], sign: Lifesign, what: str, turn: str) -> Result:
    """Counts the looks that found nothing, not the clock: whoever was itself stopped must not blame the other side."""
    task = asyncio.ensure_future(work)
    try:
        given, missed = sign.given, 0
        while missed < LOOKS:
            done, _ = await asyncio.wait({task}, timeout=sign.seconds / LOOKS)
            if done:
                return task.result()
            given, missed = sign.given, missed + 1 if given == sign.given else 0
        raise expired(what, turn, sign.seconds)
    finally:
        task.cancel()


async def first_of(
    works: Collection[asyncio.Future[Any]], deadline: Deadline, what: str, turn: str
) -> set[asyncio.Future[Any]]:
    """Those that are done, as soon as one is. Raises WaitExpired when none is in time; cancels nothing."""
    limit_s = None if isinstance(deadline, Guard) else deadline
    assert not isinstance(limit_s, Lifesign)
    with noted(what, turn, deadline):
        done, _ = await asyncio.wait(works, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise expired(what, turn, limit_s or 0.0)
    return done


async def all_of(works: Collection[asyncio.Future[Any]], deadline: Deadline, what: str, turn: str) -> None:
    """Return when all are done, however each ended. Raises WaitExpired when some are not in time; cancels nothing."""
    limit_s = None if isinstance(deadline, Guard) else deadline
    assert not isinstance(limit_s, Lifesign)
    if not works:
        return
    with noted(what, turn, deadline):
        _, pending = await asyncio.wait(works, timeout=limit_s)
    if pending:
        raise expired(what, turn, limit_s or 0.0)


async def cancelled(tasks: Collection[asyncio.Future[Any]], deadline_s: float) -> bool:
    """Cancel these and wait until they have ended; what goes on beyond the deadline is logged, and False returned."""
    for task in tasks:
        task.cancel()
    try:
        await all_of(list(tasks), deadline_s, "the end of what was cancelled", "that work")
    except WaitExpired as late:
        log.warning("%s", late)
        return False
    return True


async def pause(seconds: float) -> None:
    """Let time pass: nobody is waited for."""
    await asyncio.sleep(seconds)


# ---- on a thread of its own


def until_true(
    condition: threading.Condition, predicate: Callable[[], object], deadline_s: float, what: str, turn: str
) -> None:
    """Wait, holding the condition, until the predicate holds. Raises WaitExpired."""
    if predicate():
        return
    with noted(what, turn, deadline_s):
        if not condition.wait_for(predicate, deadline_s):
            raise expired(what, turn, deadline_s)


def taken(items: "queue.SimpleQueue[Result]", deadline_s: float, what: str, turn: str) -> Result:
    """The next item of a queue. Raises WaitExpired."""
    with noted(what, turn, deadline_s):
        try:
            return items.get(timeout=deadline_s)
        except queue.Empty:
            raise expired(what, turn, deadline_s) from None


def joined(thread: threading.Thread, deadline_s: float) -> bool:
    """Wait for a thread to end; whether it has by the deadline."""
    with noted(f"the end of thread {thread.name}", "that thread", deadline_s):
        thread.join(deadline_s)
    return not thread.is_alive()


def blocking(call: Callable[[], Result], deadline: Deadline, what: str, turn: str) -> Result:
    """Make a call that blocks, and whose library keeps the deadline itself."""
    with noted(what, turn, deadline):
        return call()


def looked_for(
    is_there: Callable[[], bool], stop: threading.Event, look_s: float, deadline_s: float, what: str, turn: str
) -> None:
    """Look again and again, for what cannot be waited for. Raises WaitExpired, also when ``stop`` is set."""
    end_s = monotonic() + deadline_s
    with noted(what, turn, deadline_s):
        while not is_there():
            if monotonic() > end_s or stop.wait(look_s):
                raise expired(what, turn, deadline_s)


def heard_from(
    is_there: Callable[[], bool], signs: Callable[[], Mapping[int, int]], seconds: float, what: str, turn: str
) -> list[int]:
    """Look again and again, less often the longer it takes, until it is there; the result is empty then.

    ``signs``: by number those whose turn it still is, and how many signs of life each has given. Returns those who
    have given none for so many seconds. As in `until`, looks are counted and not the clock.
    """
    begin_s, given, quiet = monotonic(), dict[int, int](), dict[int, int]()
    nothing = threading.Event()
    with noted(what, turn, Lifesign(seconds)):
        while True:
            next_s = monotonic() + seconds / LOOKS
            while (now_s := monotonic()) < next_s:
                if is_there():
                    return []
                nothing.wait(min(max(SOONEST_S, (now_s - begin_s) / OFTEN), next_s - now_s))
            heard = signs()
            same = {one: count == given.get(one, count) for one, count in heard.items()}
            quiet = {one: quiet.get(one, 0) + 1 if same[one] else 0 for one in heard}
            given = dict(heard)
            if silent := [one for one, looks in quiet.items() if looks == LOOKS]:
                return silent


def passed(seconds: float) -> None:
    """Let time pass on a thread that is not a loop's: nobody is waited for."""
    threading.Event().wait(seconds)


@contextlib.contextmanager
def repeated(call: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Make a call every so many seconds, on a thread of its own, for the length of a block: nobody is waited for."""
    stop = threading.Event()

    def again() -> None:
        while not stop.wait(every_s):
            call()

    threading.Thread(target=again, name=name, daemon=True).start()
    try:
        yield
    finally:
        stop.set()
