"""Back-pressure by rows and bytes: a producer over the budget waits, with a deadline and a reason."""

import signal

import pytest

from tests.integration.streams.conftest import Peer, Run, Start, Stream

ROW_BYTES = 1000
LENGTH = ROW_BYTES // 4
BUDGETS = [
    pytest.param({"budget_rows": 10}, "room: 8 of 10 rows live", id="rows"),
    pytest.param({"budget_bytes": 10 * ROW_BYTES}, "room: 8000 of 10000 bytes live", id="bytes"),
]


async def nearly_full(stream: Stream, session_peer: Start) -> tuple[Peer, Peer]:
    """Eight rows are live under a budget of ten."""
    producer, reader = await session_peer(stream.address, "producer"), await session_peer(stream.address, "reader")
    await producer.do("offer", prompts=list(range(8)), length=LENGTH)
    return producer, reader


async def read_all(stream: Stream, reader: Peer) -> list[int]:
    """Read every live row."""
    prompts: list[int] = []
    while stream.table.slots:
        prompts += (await reader.do("pull", slots=3))["prompts"]
        await reader.do("commit")
    stream.assert_empty()
    return prompts


@pytest.mark.parametrize(("budget", "reason"), BUDGETS)
async def test_a_producer_over_its_budget_waits_until_there_is_room(
    run: Run, session_peer: Start, budget: dict[str, int], reason: str
) -> None:
    async with run(**budget) as stream:
        producer, reader = await nearly_full(stream, session_peer)
        producer.command("offer", prompts=[8, 9, 10, 11], length=LENGTH)
        await stream.until(lambda: "producer" in stream.waits)
        assert stream.waits == {"producer": reason}
        await reader.do("pull", slots=2)
        await reader.do("commit", only=[0])
        assert stream.waits["producer"] == reason.replace("8", "7")
        assert stream.table.rows.total() == 7
        await reader.do("commit", only=[1])
        assert "opened" in await producer.answer()
        assert stream.table.rows.total() == 10
        assert await read_all(stream, reader) == list(range(2, 12))


@pytest.mark.parametrize(("budget", "reason"), BUDGETS)
async def test_expired_offer_reports_what_it_waited_for_and_stores_nothing(
    run: Run, session_peer: Start, budget: dict[str, int], reason: str
) -> None:
    async with run(**budget) as stream:
        producer, reader = await nearly_full(stream, session_peer)
        producer.command("offer", prompts=[8, 9, 10, 11], length=LENGTH, deadline_s=0.3)
        answer = await producer.answer()
        assert answer["error"] == "WaitExpired"
        assert f"Offer withdrawn after 0.3 s of waiting for {reason}" in answer["text"]
        assert (stream.waits, stream.table.rows.total()) == ({}, 8)
        assert (await producer.do("measure"))["tensors"] == 8
        assert await read_all(stream, reader) == list(range(8))


async def test_producer_that_dies_while_parked_leaves_no_rows_and_unblocks_others(
    run: Run, session_peer: Start
) -> None:
    async with run(budget_rows=10) as stream:
        producer, reader = await nearly_full(stream, session_peer)
        dying = await session_peer(stream.address, "dying")
        dying.command("offer", prompts=[20, 21, 22, 23], length=LENGTH)
        await stream.until(lambda: "dying" in stream.waits)
        producer.command("offer", prompts=[8, 9], length=LENGTH)
        await stream.until(lambda: stream.waits.get("producer") == "the offers before it")
        dying.signal(signal.SIGKILL)
        assert "opened" in await producer.answer()
        assert await read_all(stream, reader) == list(range(10))


async def test_cancelled_offer_unblocks_later_offers(run: Run, session_peer: Start) -> None:
    async with run(budget_rows=10) as stream:
        producer, reader = await nearly_full(stream, session_peer)
        other = await session_peer(stream.address, "other")
        other.command("offer", prompts=[20, 21, 22, 23], length=LENGTH, deadline_s=3.0)
        await stream.until(lambda: "other" in stream.waits)
        producer.command("offer", prompts=[8, 9], length=LENGTH)
        assert (await other.answer())["error"] == "WaitExpired"
        assert "opened" in await producer.answer()
        assert await read_all(stream, reader) == list(range(10))


@pytest.mark.parametrize("budget", [{"budget_rows": 10}, {"budget_bytes": 10 * ROW_BYTES}])
async def test_an_offer_over_the_whole_budget_is_rejected_with_a_remedy(
    run: Run, session_peer: Start, budget: dict[str, int]
) -> None:
    async with run(**budget) as stream:
        producer = await session_peer(stream.address, "producer")
        producer.command("offer", prompts=list(range(11)), length=LENGTH)
        answer = await producer.answer()
        assert answer["error"] == "RemoteProtocolError"
        assert "has 11 rows and 11000 bytes, over the whole budget" in answer["text"]
        assert "offer fewer, or raise budget_rows or budget_bytes" in answer["text"]
        stream.assert_empty()
        assert (await producer.do("measure"))["tensors"] == 0
        assert "opened" in await producer.do("offer", prompts=list(range(10)), length=LENGTH)


async def test_exactly_the_acknowledged_rows_are_read(run: Run, session_peer: Start) -> None:
    """Many short deadlines under a small budget: each row is both acknowledged and read once, or neither."""
    async with run(budget_rows=8) as stream:
        producer, reader = await session_peer(stream.address, "producer"), await session_peer(stream.address, "reader")
        reader.command("consume", slots=3)
        acknowledged = []
        for first in range(0, 300, 3):
            prompts = [first, first + 1, first + 2]
            producer.command("offer", prompts=prompts, deadline_s=0.004)
            answer = await producer.answer()
            if "opened" in answer:
                acknowledged += prompts
        await producer.do("exhausted")
        read = await reader.answer()
        assert sorted(read["prompts"]) == acknowledged
        assert acknowledged
        stream.assert_empty()
