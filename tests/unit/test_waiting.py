"""The primitive of all waits: a deadline, what for, whose turn; and that open waits can be seen."""

import asyncio
import queue
import threading
import time

import pytest

from flowrt import waiting
from flowrt.errors import WaitExpired
from flowrt.waiting import Guard, Lifesign, open_waits


def seen(what: str) -> list[waiting.Wait]:
    return [one for one in open_waits() if one.what == what]


async def test_a_wait_ends_at_its_deadline_saying_for_what_and_whose_turn_it_was() -> None:
    with pytest.raises(WaitExpired, match=r"waited 0\.1 s for the moon; it was the turn of the tides"):
        await waiting.until(asyncio.Event().wait(), 0.05, "the moon", "the tides")
    assert not seen("the moon")


async def test_an_open_wait_can_be_seen_and_is_gone_when_it_ends_or_is_cancelled() -> None:
    event = asyncio.Event()
    first = asyncio.create_task(waiting.until(event.wait(), 10.0, "a word", "somebody"))
    second = asyncio.create_task(waiting.until(event.wait(), Guard("the first"), "a word", "somebody"))
    await asyncio.sleep(0)
    one, other = seen("a word")
    assert (one.turn, one.limit_s, other.limit_s) == ("somebody", 10.0, float("inf"))
    assert "at most 10 s" in str(one)
    assert "ended by the first" in str(other)
    second.cancel()
    event.set()
    await first
    await asyncio.gather(second, return_exceptions=True)
    assert not seen("a word")


async def test_a_timeout_of_the_work_itself_stays_what_it_is() -> None:
    async def work() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await waiting.until(work(), 5.0, "it", "itself")


async def test_a_sign_of_life_moves_the_deadline() -> None:
    sign = Lifesign(0.4)
    begin_s = time.monotonic()

    async def give() -> None:
        for _ in range(6):
            await asyncio.sleep(0.15)
            sign.give()

    giving = asyncio.create_task(give())
    with pytest.raises(WaitExpired, match="the turn of the patient"):
        await waiting.until(asyncio.Event().wait(), sign, "a pulse", "the patient")
    assert giving.done()
    assert time.monotonic() - begin_s > 6 * 0.15 + 0.3


async def test_whoever_was_itself_held_up_does_not_blame_the_other_side() -> None:
    sign, done = Lifesign(0.4), asyncio.Event()
    waiter = asyncio.create_task(waiting.until(done.wait(), sign, "a pulse", "the patient"))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251  # this process stands still for longer than the sign may take
    await asyncio.sleep(0.1)
    assert not waiter.done()
    done.set()
    assert await waiter


async def test_several_waits_are_waited_for_together() -> None:
    never, now = asyncio.Future[None](), asyncio.Future[None]()
    now.set_result(None)
    assert await waiting.first_of([never, now], 1.0, "one of two", "both") == {now}
    with pytest.raises(WaitExpired, match="for all of two"):
        await waiting.all_of([never, now], 0.05, "all of two", "both")
    assert not never.cancelled()
    with pytest.raises(WaitExpired):
        await waiting.first_of([never], 0.05, "the other", "it")


async def test_what_ignores_its_cancellation_is_not_waited_for_long() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if enough:
                    raise

    enough: list[bool] = []
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    assert not await waiting.cancelled([task], 0.05)
    enough.append(True)
    assert await waiting.cancelled([task], 1.0)


def test_threads_wait_with_a_deadline_too() -> None:
    condition, items = threading.Condition(), queue.SimpleQueue[int]()
    with condition, pytest.raises(WaitExpired, match=r"for a change; it was the turn of the world"):
        waiting.until_true(condition, lambda: False, 0.05, "a change", "the world")
    with pytest.raises(WaitExpired, match="for an item"):
        waiting.taken(items, 0.05, "an item", "whoever puts them")
    items.put(3)
    assert waiting.taken(items, 0.05, "an item", "whoever puts them") == 3
    with pytest.raises(WaitExpired, match="for a look"):
        waiting.looked_for(lambda: False, threading.Event(), 0.001, 0.05, "a look", "it")
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(5.0,))
    thread.start()
    assert not waiting.joined(thread, 0.05)
    release.set()
    assert waiting.joined(thread, 5.0)


def test_of_several_the_silent_one_is_named_and_the_others_are_waited_for() -> None:
    given, end_s = {1: 0, 2: 0, 3: 0}, float("inf")

    def sign() -> None:
        given[1] += 1
        given[3] += given[3] < 20  # it falls silent later than the second

    def heard_from(*missing: int) -> list[int]:
        return waiting.heard_from(
            lambda: time.monotonic() > end_s, lambda: {one: given[one] for one in missing}, 0.8, "all", "the others"
        )

    with waiting.repeated(sign, 0.02, "signs"):
        assert heard_from(1, 2, 3) == [2]
        assert heard_from(1, 3) == [3]
        end_s = time.monotonic() + 1.6  # longer than it would take somebody who is silent
        assert heard_from(1) == []
    assert not seen("all")


def test_a_wait_inside_a_library_can_be_seen_from_another_thread() -> None:
    inside, leave = threading.Event(), threading.Event()

    def call() -> bool:
        inside.set()
        return leave.wait(5.0)

    thread = threading.Thread(target=lambda: waiting.blocking(call, 5.0, "a library", "its peer"), name="caller")
    thread.start()
    assert inside.wait(5.0)
    [one] = seen("a library")
    assert (one.who, one.turn) == ("caller", "its peer")
    leave.set()
    thread.join(5.0)
    assert not seen("a library")
