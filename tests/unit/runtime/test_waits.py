"""Waits with deadlines: their errors, and the list of open waits."""

import asyncio
import queue
import threading
import time

import pytest

from flowrt.errors import WaitExpired
from flowrt.runtime import waits
from flowrt.runtime.waits import BoundedElsewhere, LivenessTimeout, open_waits


def seen(what: str) -> list[waits.Wait]:
    return [one for one in open_waits() if one.what == what]


async def test_expired_wait_names_what_and_blocked_on() -> None:
    with pytest.raises(WaitExpired, match=r"waited 0\.1 s for the moon; blocked on the tides"):
        await waits.wait_until(asyncio.Event().wait(), 0.05, "the moon", "the tides")
    assert not seen("the moon")


async def test_open_wait_is_listed_until_it_ends_or_is_cancelled() -> None:
    event = asyncio.Event()
    first = asyncio.create_task(waits.wait_until(event.wait(), 10.0, "a word", "somebody"))
    second = asyncio.create_task(waits.wait_until(event.wait(), BoundedElsewhere("the first"), "a word", "somebody"))
    await asyncio.sleep(0)
    one, other = seen("a word")
    assert (one.blocked_on, one.limit_s, other.limit_s) == ("somebody", 10.0, float("inf"))
    assert "at most 10 s" in str(one)
    assert "ended by the first" in str(other)
    second.cancel()
    event.set()
    await first
    await asyncio.gather(second, return_exceptions=True)
    assert not seen("a word")


async def test_timeout_of_the_work_itself_is_raised_unchanged() -> None:
    async def work() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await waits.wait_until(work(), 5.0, "it", "itself")


@pytest.mark.slow
async def test_heartbeat_renews_the_deadline() -> None:
    sign = LivenessTimeout(0.4)
    begin_s = time.monotonic()

    async def give() -> None:
        for _ in range(6):
            await asyncio.sleep(0.15)
            sign.renew()

    giving = asyncio.create_task(give())
    with pytest.raises(WaitExpired, match="blocked on the patient"):
        await waits.wait_until(asyncio.Event().wait(), sign, "a pulse", "the patient")
    assert giving.done()
    assert time.monotonic() - begin_s > 6 * 0.15 + 0.3


@pytest.mark.slow
async def test_stopped_process_does_not_blame_its_peer() -> None:
    sign, done = LivenessTimeout(0.4), asyncio.Event()
    waiter = asyncio.create_task(waits.wait_until(done.wait(), sign, "a pulse", "the patient"))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251  # this process stands still for longer than the sign may take
    await asyncio.sleep(0.1)
    assert not waiter.done()
    done.set()
    assert await waiter


async def test_wait_all_and_wait_any() -> None:
    never, now = asyncio.Future[None](), asyncio.Future[None]()
    now.set_result(None)
    assert await waits.wait_any([never, now], 1.0, "one of two", "both") == {now}
    with pytest.raises(WaitExpired, match="for all of two"):
        await waits.wait_all([never, now], 0.05, "all of two", "both")
    assert not never.cancelled()
    with pytest.raises(WaitExpired):
        await waits.wait_any([never], 0.05, "the other", "it")


async def test_task_that_ignores_cancellation_is_abandoned() -> None:
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
    assert not await waits.cancel_and_wait([task], 0.05)
    enough.append(True)
    assert await waits.cancel_and_wait([task], 1.0)


def test_waits_of_threads_have_deadlines() -> None:
    condition, items = threading.Condition(), queue.SimpleQueue[int]()
    with condition, pytest.raises(WaitExpired, match=r"for a change; blocked on the world"):
        waits.poll_until_true(condition, lambda: False, 0.05, "a change", "the world")
    with pytest.raises(WaitExpired, match="for an item"):
        waits.queue_get(items, 0.05, "an item", "the producer")
    items.put(3)
    assert waits.queue_get(items, 0.05, "an item", "the producer") == 3
    with pytest.raises(WaitExpired, match="for a look"):
        waits.poll_until(lambda: False, threading.Event(), 0.001, 0.05, "a look", "it")
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(5.0,))
    thread.start()
    assert not waits.join_thread(thread, 0.05)
    release.set()
    assert waits.join_thread(thread, 5.0)


@pytest.mark.slow
def test_peer_without_heartbeats_is_named_and_others_awaited() -> None:
    given, end_s = {1: 0, 2: 0, 3: 0}, float("inf")

    def sign() -> None:
        given[1] += 1
        given[3] += given[3] < 20  # its heartbeats end later than those of the second

    def heard_from(*missing: int) -> list[int]:
        return waits.poll_while_alive(
            lambda: time.monotonic() > end_s, lambda: {one: given[one] for one in missing}, 0.8, "all", "the others"
        )

    with waits.every(sign, 0.02, "signs"):
        assert heard_from(1, 2, 3) == [2]
        assert heard_from(1, 3) == [3]
        end_s = time.monotonic() + 1.6  # longer than the timeout of a silent peer
        assert heard_from(1) == []
    assert not seen("all")


def test_wait_inside_a_library_is_listed() -> None:
    inside, leave = threading.Event(), threading.Event()

    def call() -> bool:
        inside.set()
        return leave.wait(5.0)

    thread = threading.Thread(target=lambda: waits.blocking(call, 5.0, "a library", "its peer"), name="caller")
    thread.start()
    assert inside.wait(5.0)
    [one] = seen("a library")
    assert (one.thread, one.blocked_on) == ("caller", "its peer")
    leave.set()
    thread.join(5.0)
    assert not seen("a library")
