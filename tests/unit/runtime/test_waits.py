"""Waits with deadlines: their errors, and the list of open waits."""

import asyncio
import queue
import threading
import time

import pytest

from flowrt.errors import WaitExpired
from flowrt.runtime import waits
from flowrt.runtime.waits import BoundedElsewhere, LivenessTimeout, open_waits


def waits_for(what: str) -> list[waits.Wait]:
    return [wait for wait in open_waits() if wait.what == what]


async def test_expired_wait_names_its_subject_and_the_blocking_peer() -> None:
    with pytest.raises(WaitExpired, match=r"waited 0\.1 s for an event; blocked on its sender"):
        await waits.wait_until(asyncio.Event().wait(), 0.05, "an event", "its sender")
    assert not waits_for("an event")


async def test_open_wait_is_listed_until_it_ends_or_is_cancelled() -> None:
    event = asyncio.Event()
    first = asyncio.create_task(waits.wait_until(event.wait(), 10.0, "a reply", "a peer"))
    second = asyncio.create_task(waits.wait_until(event.wait(), BoundedElsewhere("the first"), "a reply", "a peer"))
    await asyncio.sleep(0)
    wait, other_wait = waits_for("a reply")
    assert (wait.blocked_on, wait.limit_s, other_wait.limit_s) == ("a peer", 10.0, float("inf"))
    assert "at most 10 s" in str(wait)
    assert "ended by the first" in str(other_wait)
    second.cancel()
    event.set()
    await first
    await asyncio.gather(second, return_exceptions=True)
    assert not waits_for("a reply")


async def test_timeout_of_the_work_itself_is_raised_unchanged() -> None:
    async def work() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await waits.wait_until(work(), 5.0, "work", "itself")


@pytest.mark.slow
async def test_heartbeat_renews_the_deadline() -> None:
    timeout = LivenessTimeout(0.4)
    begin_s = time.monotonic()

    async def send_heartbeats() -> None:
        for _ in range(6):
            await asyncio.sleep(0.15)
            timeout.renew()

    sending = asyncio.create_task(send_heartbeats())
    with pytest.raises(WaitExpired, match="blocked on the peer"):
        await waits.wait_until(asyncio.Event().wait(), timeout, "a heartbeat", "the peer")
    assert sending.done()
    assert time.monotonic() - begin_s > 6 * 0.15 + 0.3


@pytest.mark.slow
async def test_stopped_process_does_not_time_out_its_peer() -> None:
    timeout, done = LivenessTimeout(0.4), asyncio.Event()
    waiter = asyncio.create_task(waits.wait_until(done.wait(), timeout, "a heartbeat", "the peer"))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251  # this process is stopped for longer than the timeout
    await asyncio.sleep(0.1)
    assert not waiter.done()
    done.set()
    assert await waiter


async def test_wait_all_and_wait_any_time_out_without_cancelling() -> None:
    never, now = asyncio.Future[None](), asyncio.Future[None]()
    now.set_result(None)
    assert await waits.wait_any([never, now], 1.0, "one of two", "both") == {now}
    with pytest.raises(WaitExpired, match="for all of two"):
        await waits.wait_all([never, now], 0.05, "all of two", "both")
    assert not never.cancelled()
    with pytest.raises(WaitExpired):
        await waits.wait_any([never], 0.05, "the other", "it")


async def test_task_that_ignores_cancellation_is_abandoned() -> None:
    async def ignore_cancellation() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if may_end:
                    raise

    may_end: list[bool] = []
    task = asyncio.create_task(ignore_cancellation())
    await asyncio.sleep(0)
    assert not await waits.cancel_and_wait([task], 0.05)
    may_end.append(True)
    assert await waits.cancel_and_wait([task], 1.0)


def test_waits_of_threads_have_deadlines() -> None:
    condition, items = threading.Condition(), queue.SimpleQueue[int]()
    with condition, pytest.raises(WaitExpired, match=r"for a change; blocked on the writer"):
        waits.poll_until_true(condition, lambda: False, 0.05, "a change", "the writer")
    with pytest.raises(WaitExpired, match="for an item"):
        waits.queue_get(items, 0.05, "an item", "the producer")
    items.put(3)
    assert waits.queue_get(items, 0.05, "an item", "the producer") == 3
    with pytest.raises(WaitExpired, match="for a poll"):
        waits.poll_until(lambda: False, threading.Event(), 0.001, 0.05, "a poll", "it")
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(5.0,))
    thread.start()
    assert not waits.join_thread(thread, 0.05)
    release.set()
    assert waits.join_thread(thread, 5.0)


@pytest.mark.slow
def test_peer_without_heartbeats_is_returned_and_the_others_awaited() -> None:
    heartbeats, end_s = {1: 0, 2: 0, 3: 0}, float("inf")

    def beat() -> None:
        heartbeats[1] += 1
        heartbeats[3] += heartbeats[3] < 20  # its heartbeats end later than those of the second

    def silent_peers(*missing: int) -> list[int]:
        return waits.poll_while_alive(
            lambda: time.monotonic() > end_s,
            lambda: {peer: heartbeats[peer] for peer in missing},
            0.8,
            "all",
            "the others",
        )

    with waits.every(beat, 0.02, "heartbeats"):
        assert silent_peers(1, 2, 3) == [2]
        assert silent_peers(1, 3) == [3]
        end_s = time.monotonic() + 1.6  # longer than the timeout of a silent peer
        assert silent_peers(1) == []
    assert not waits_for("all")


def test_wait_inside_a_library_is_listed() -> None:
    inside, leave = threading.Event(), threading.Event()

    def call() -> bool:
        inside.set()
        return leave.wait(60.0)

    thread = threading.Thread(target=lambda: waits.blocking(call, 5.0, "a library", "its peer"), name="caller")
    thread.start()
    assert inside.wait(60.0)
    [wait] = waits_for("a library")
    assert (wait.thread, wait.blocked_on) == ("caller", "its peer")
    leave.set()
    thread.join(60.0)
    assert not waits_for("a library")


STALL_S = 2.5
"""Longer than every deadline below, and than an absence that is not noticed."""


@pytest.mark.parametrize("kind", ["until", "any", "all"])
async def test_a_deadline_does_not_contain_time_in_which_the_loop_did_not_run(kind: str) -> None:
    """The loop is blocked, as it is in a process that is stopped; what is waited for comes right after."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def block() -> None:
        time.sleep(STALL_S)  # the stall
        loop.call_later(0.05, done.set_result, None)

    loop.call_later(0.01, block)
    if kind == "until":
        await waits.wait_until(done, STALL_S / 2, "an event", "its sender")
    elif kind == "any":
        assert await waits.wait_any([done], STALL_S / 2, "an event", "its sender") == {done}
    else:
        await waits.wait_all([done], STALL_S / 2, "an event", "its sender")


async def test_the_late_checks_of_a_deadline_are_limited() -> None:
    polls = waits._Polls(1.0)
    counts = [polls.count(late_s=10.0) for _ in range(waits.MAX_LATE_POLLS + waits.POLLS_PER_TIMEOUT)]
    assert counts[-1]
    assert not any(counts[:-1])
