"""Leased rows of a consumer that dies, stops or is late: they are requeued, and no row is committed twice."""

import signal

from tests.integration.streams.conftest import Peer, Run, Start, Stream

LONG_LEASE_S = 600.0


async def lease_five_rows(stream: Stream, session_peer: Start) -> tuple[Peer, Peer, list[int]]:
    """Eight rows, five of them leased by ``first``; ``second`` has read the others and waits for more."""
    producer, first, second = [await session_peer(stream.address, name) for name in ("producer", "first", "second")]
    await producer.do("offer", prompts=list(range(8)), length=4)
    held = await first.do("pull", slots=5)
    assert held["prompts"] == [0, 1, 2, 3, 4]
    assert (await second.do("pull", slots=8))["prompts"] == [5, 6, 7]
    assert (await second.do("commit"))["refused"] == []
    second.command("pull", slots=8)
    await stream.until(lambda: "second" in stream.waits)
    return first, second, held["slots"]


async def read_requeued_rows(stream: Stream, second: Peer) -> None:
    """``second`` receives the five rows; no others are left."""
    again = await second.answer()
    assert again["prompts"] == [0, 1, 2, 3, 4]
    assert (await second.do("commit"))["refused"] == []
    await stream.until(lambda: not stream.table.slots)
    stream.assert_empty()


async def test_rows_of_a_killed_consumer_are_requeued_immediately(run: Run, session_peer: Start) -> None:
    async with run(lease_s=LONG_LEASE_S) as stream:
        first, second, _ = await lease_five_rows(stream, session_peer)
        first.signal(signal.SIGKILL)
        await stream.until(lambda: not stream.waits)
        await read_requeued_rows(stream, second)


async def test_rows_of_a_stopped_consumer_are_requeued_when_its_lease_expires(run: Run, session_peer: Start) -> None:
    async with run(lease_s=LONG_LEASE_S) as stream:
        first, second, slots = await lease_five_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        stream.expire_leases("first")
        await read_requeued_rows(stream, second)
        first.signal(signal.SIGCONT)
        assert (await first.do("commit"))["refused"] == slots
        # It is still a member of the run.
        assert list(stream.server.status()["workers"]) == ["producer", "first", "second"]


async def test_a_late_commit_does_not_affect_the_current_lease(run: Run, session_peer: Start) -> None:
    async with run(lease_s=LONG_LEASE_S) as stream:
        first, second, slots = await lease_five_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        stream.expire_leases("first")
        assert (await second.answer())["slots"] == slots
        first.signal(signal.SIGCONT)
        assert (await first.do("commit"))["refused"] == slots
        assert {lease.worker for lease in stream.table.leases.values()} == {"second"}
        assert (await second.do("commit"))["refused"] == []
        await stream.until(lambda: not stream.table.slots)


async def test_silent_consumer_loses_its_leases_and_receives_the_reason_later(run: Run, session_peer: Start) -> None:
    async with run(worker_timeout_s=3.0) as stream:
        first, second, _ = await lease_five_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        await read_requeued_rows(stream, second)
        first.signal(signal.SIGCONT)
        first.command("commit")
        answer = await first.answer()
        assert answer["error"] == "Stopped"
        assert "you were dismissed: not heard of for" in answer["text"]
        assert "leases were given back" in answer["text"]
        assert stream.server.ended is None
        await session_peer(stream.address, "first")  # its name is free again


async def test_consumer_whose_connection_was_closed_as_lost_receives_the_reason(run: Run, session_peer: Start) -> None:
    async with run() as stream:
        first, second, _ = await lease_five_rows(stream, session_peer)
        first.signal(signal.SIGSTOP)
        await read_requeued_rows(stream, second)  # after about 5 s: long before its lease ends or it counts as silent
        first.signal(signal.SIGCONT)
        first.command("commit")
        answer = await first.answer()
        assert answer["error"] == "Stopped"
        assert "counts as gone" in answer["text"]
        assert stream.server.ended is None
