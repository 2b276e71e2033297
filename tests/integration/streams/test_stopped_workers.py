"""A busy worker stays in the run, a stopped worker is dismissed, and a hung worker loses its rows with its lease."""

import asyncio
import re
import signal
import time
from typing import Any

HELD_S = 8.0
NO_PROGRESS_TIMEOUT_S = 3.0
"""Less than the time after which the connection of a stopped process is closed."""


async def lease_two_rows(stream: Any, session_peer: Any) -> tuple[Any, Any]:
    """``first`` has leased both rows there are; ``second`` waits for one."""
    producer, first, second = [await session_peer(stream.address, name) for name in ("producer", "first", "second")]
    await producer.do("offer", prompts=[0, 1], length=4)
    assert (await first.do("pull", slots=2))["prompts"] == [0, 1]
    second.command("pull", slots=2)
    await stream.until(lambda: "second" in stream.waits)
    return first, second


async def test_a_worker_that_holds_the_interpreter_is_not_dismissed(run: Any, session_peer: Any) -> None:
    """A worker whose interpreter is busy for longer than the worker timeout keeps its leases."""
    async with run(worker_timeout_s=HELD_S / 3) as stream:  # HELD_S is far longer than the timeout
        first, _second = await lease_two_rows(stream, session_peer)
        start_s = time.monotonic()
        assert await first.do("hold", seconds=HELD_S) == {"holds": True}
        assert await first.answer() == {"held": HELD_S}
        assert time.monotonic() - start_s >= HELD_S
        assert (await first.do("commit"))["refused"] == []
        assert stream.server.ended is None
        assert "second" in stream.waits


async def test_a_stopped_worker_is_detected_by_default(run: Any, session_peer: Any) -> None:
    """A stopped process closes no connection: its silence is detected, and its rows are requeued."""
    async with run() as stream:
        first, second = await lease_two_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        assert (await second.answer())["prompts"] == [0, 1]
        assert "first" not in stream.core.state.membership


async def test_a_hung_worker_loses_its_rows_when_its_lease_expires(run: Any, session_peer: Any) -> None:
    """A worker that only sends heartbeats stays in the run and loses its rows when their lease ends."""
    async with run() as stream:
        first, second = await lease_two_rows(stream, session_peer)
        stream.expire_leases("first")
        assert (await second.answer())["prompts"] == [0, 1]
        assert "first" in stream.core.state.membership
        assert (await first.do("commit"))["refused"] != []


async def test_run_stalled_by_a_stopped_worker_ends_with_the_wait_graph(run: Any, session_peer: Any) -> None:
    """Without progress for no_progress_timeout_s the run ends with code 3, and the reason names the stopped worker."""
    async with run(no_progress_timeout_s=NO_PROGRESS_TIMEOUT_S) as stream:
        first, second = await lease_two_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        answer = await second.answer()
        assert answer["error"] == "Stopped"
        ended = stream.server.ended
        assert ended.code == 3
        assert re.match(r"no progress for \d+ s: ", ended.reason)
        assert "second waits" in ended.reason
        assert "first holds 2 slots of read" in ended.reason


async def test_the_wait_graph_shows_lane_waits_of_workers(run: Any, session_peer: Any) -> None:
    """A transfer that never arrives: the wait graph names the waiting worker, the lane and the blocking worker."""
    async with run(transfer_idle_timeout_s=30.0) as stream:
        producer, reader = [await session_peer(stream.address, name) for name in ("producer", "reader")]
        await producer.do("offer", prompts=[0], length=4)
        producer.signal(signal.SIGSTOP)
        reader.command("pull", slots=1)

        def lane_waits() -> list[Any]:
            graph = stream.core.wait_graph(stream.server._clock.now())
            return [edge for edge in graph.waits if edge.who == "reader" and "producer>reader" in edge.what]

        async with asyncio.timeout(60.0):
            while not lane_waits():
                await stream.until(lambda: True)
                await asyncio.sleep(0.05)
        [edge, *_] = lane_waits()
        assert edge.blocked_on == ("producer",)
        assert edge.limit_s <= 30.0
