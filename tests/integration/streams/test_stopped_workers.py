"""A worker that computes is not dead, one that is stopped is, and one that hangs meets the deadline of its lease."""

import asyncio
import re
import signal
import time
from typing import Any

HELD_S = 8.0
NOTICED_S = 5.0
STALL_S = 2.0


async def two_rows(stream: Any, session_peer: Any) -> tuple[Any, Any]:
    """``first`` has leased both rows there are; ``second`` waits for one."""
    producer, first, second = [await session_peer(stream.address, name) for name in ("producer", "first", "second")]
    await producer.do("offer", prompts=[0, 1], length=4)
    assert (await first.do("pull", slots=2))["prompts"] == [0, 1]
    second.command("pull", slots=2)
    await stream.until(lambda: "second" in stream.waits)
    return first, second


async def test_a_worker_that_holds_the_interpreter_is_not_dismissed(run: Any, session_peer: Any) -> None:
    """A busy interpreter is not death: nothing is taken from a worker that computes for longer than pings may take."""
    async with run(worker_timeout_s=HELD_S / 3) as stream:  # far longer than a worker may be silent
        first, _second = await two_rows(stream, session_peer)
        begin_s = time.monotonic()
        assert await first.do("hold", seconds=HELD_S) == {"holds": True}
        assert await first.answer() == {"held": HELD_S}
        assert time.monotonic() - begin_s >= HELD_S
        assert (await first.do("commit"))["refused"] == []
        assert stream.server.ended is None
        assert "second" in stream.waits


async def test_a_stopped_worker_is_noticed_within_5_s_by_default(run: Any, session_peer: Any) -> None:
    """A process that is stopped closes no connection: its silence is noticed all the same, and its rows come back."""
    async with run() as stream:
        first, second = await two_rows(stream, session_peer)
        stopped_s = time.monotonic()
        first.signal(signal.SIGSTOP)
        assert (await second.answer())["prompts"] == [0, 1]
        assert time.monotonic() - stopped_s < NOTICED_S + 0.5
        assert "first" not in stream.core.state.membership


async def test_a_hung_worker_meets_the_deadline_of_its_lease(run: Any, session_peer: Any) -> None:
    """The engine sleeps and nobody knows: it sends its heartbeats, and loses what it holds when its lease ends."""
    async with run(lease_s=1.5) as stream:
        first, second = await two_rows(stream, session_peer)
        assert (await second.answer())["prompts"] == [0, 1]
        assert "first" in stream.core.state.membership
        assert (await first.do("commit"))["refused"] != []


async def test_run_stalled_by_a_stopped_worker_ends_with_the_wait_graph(run: Any, session_peer: Any) -> None:
    """No progress and no message: after no_progress_timeout_s the run ends with code 3 and names who was waited for."""
    async with run(no_progress_timeout_s=STALL_S) as stream:
        first, second = await two_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        answer = await second.answer()
        assert answer["error"] == "Stopped"
        assert time.monotonic() - begin_s < STALL_S + 2.0
        ended = stream.server.ended
        assert ended.code == 3
        assert re.match(r"no progress for \d+ s: ", ended.reason)
        assert "second waits" in ended.reason
        assert "first holds 2 slots of read" in ended.reason


async def test_a_lane_wait_of_a_worker_is_seen_by_the_controller(run: Any, session_peer: Any) -> None:
    """Weights or tensors that never come: the status says who waits on which lane, and whose turn it is."""
    async with run(transfer_idle_timeout_s=30.0) as stream:
        producer, reader = [await session_peer(stream.address, name) for name in ("producer", "reader")]
        await producer.do("offer", prompts=[0], length=4)
        producer.signal(signal.SIGSTOP)
        reader.command("pull", slots=1)

        def on_lanes() -> list[Any]:
            graph = stream.core.wait_graph(stream.server._clock.now())
            return [edge for edge in graph.waits if edge.who == "reader" and "producer>reader" in edge.what]

        async with asyncio.timeout(NOTICED_S):
            while not on_lanes():
                await stream.until(lambda: True)
                await asyncio.sleep(0.05)
        [edge, *_] = on_lanes()
        assert edge.blocked_on == ("producer",)
        assert edge.limit_s <= 30.0
