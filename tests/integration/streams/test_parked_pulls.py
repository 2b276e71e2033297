"""A pull for rows that do not exist yet: it waits without polling, is woken when rows are ready, and can expire."""

import asyncio
import signal
from typing import Any

import psutil
import pytest
import torch

from flowrt import api
from flowrt.client.connection import Event
from flowrt.protocol import messages as m
from tests.integration.streams.conftest import ANSWER_TIMEOUT_S, Peer, Run, Start, Stream

COLUMNS = (api.Column("data", "float32", "group"),)
TWO_STAGES = api.Dataflow(
    COLUMNS, (api.Stage("judge", ("data",), ("score",)), api.Stage("read", ("data", "score", "tag"), ())), tags=("tag",)
)
TWO_FLOWS = api.Dataflow(
    COLUMNS,
    (api.Stage("read", ("data",), (), flow="rows"), api.Stage("inspect", ("tag",), (), flow="others")),
    tags=("tag",),
)


async def parked(stream: Stream, session_peer: Start, **pull: Any) -> Peer:
    """A process whose pull is parked."""
    reader = await session_peer(stream.address, "reader")
    reader.command("pull", **pull)
    await stream.until(lambda: "reader" in stream.waits)
    return reader


async def test_parked_pull_is_woken_without_polling(run: Run, session_peer: Start) -> None:
    async with run(TWO_FLOWS) as stream:
        reader, other = await parked(stream, session_peer, slots=8), await session_peer(stream.address, "other")
        stream.received.clear()
        for prompt in range(20):
            await other.do("offer", prompts=[prompt], flow="others")
            assert (await other.do("pull", stage="inspect"))["prompts"] == [prompt]
            await other.do("commit", stage="inspect")
        await stream.until(lambda: len([worker for worker, _ in stream.received if worker == "reader"]) > 1)
        assert {type(message) for worker, message in stream.received if worker == "reader"} <= {m.Heartbeat, m.Report}
        assert (
            len(
                [
                    worker
                    for worker, message in stream.received
                    if worker == "other" and not isinstance(message, m.Heartbeat)
                ]
            )
            == 60
        )
        await other.do("offer", prompts=[7, 8])
        assert (await reader.answer())["prompts"] == [7, 8]


async def test_a_parked_pull_is_woken_by_the_commit_that_writes_its_column(run: Run, session_peer: Start) -> None:
    async with run(TWO_STAGES) as stream:
        reader, judge = await parked(stream, session_peer, slots=8), await session_peer(stream.address, "judge")
        await judge.do("offer", prompts=[1, 2, 3])
        await judge.do("pull", stage="judge", slots=3)
        assert stream.waits == {"reader": "slots ready for read"}
        await judge.do("commit", stage="judge", only=[1], inline=["score"])
        assert (await reader.answer())["prompts"] == [2]
        reader.command("pull", slots=8)
        await judge.do("commit", stage="judge", only=[0, 2], inline=["score"])
        assert (await reader.answer())["prompts"] == [1, 3]


async def test_an_expired_pull_leaves_no_wait_and_no_lease(run: Run, session_peer: Start) -> None:
    async with run() as stream:
        reader = await parked(stream, session_peer, slots=8, deadline_s=0.4)
        answer = await reader.answer()
        assert answer["error"] == "WaitExpired"
        assert "Pull withdrawn after 0.4 s of waiting for slots ready for read" in answer["text"]
        assert stream.server.status()["waits"] == []
        other = await session_peer(stream.address, "other")
        await other.do("offer", prompts=[1])
        assert stream.table.leases == {}
        assert (await other.do("pull", slots=8))["prompts"] == [1]


async def test_a_grant_that_crosses_a_cancellation_is_not_lost(run: Run, session_peer: Start) -> None:
    async with run() as stream:
        producer = await session_peer(stream.address, "producer")
        reader = await parked(stream, session_peer, slots=8, deadline_s=0.5)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            # The client polls for a short time before it sleeps.
            while psutil.Process(reader.pid).status() != psutil.STATUS_SLEEPING:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0)
        reader.signal(signal.SIGSTOP)
        await producer.do("offer", prompts=[1, 2])
        await stream.until(lambda: stream.table.leases)
        # While the reader is stopped, its deadline passes and the grant arrives: it continues with both.
        producer.command("pull", slots=1, deadline_s=0.7)
        assert (await producer.answer())["error"] == "WaitExpired"
        reader.signal(signal.SIGCONT)
        assert (await reader.answer())["prompts"] == [1, 2]
        assert ("reader", m.CancelRequest) in [(worker, type(message)) for worker, message in stream.received]
        assert (await reader.do("commit"))["refused"] == []
        await stream.until(lambda: not stream.table.slots)
        stream.assert_empty()


@pytest.mark.parametrize("rounds", [-1, 0, 1, 2, 3])
async def test_pull_cancelled_at_the_moment_of_its_grant_leaves_no_lease(
    run: Run, session_peer: Start, rounds: int
) -> None:
    async with run() as stream:
        producer, session = (
            await session_peer(stream.address, "producer"),
            await api.connect(stream.address, "s", "s", ANSWER_TIMEOUT_S),
        )
        pulling = asyncio.create_task(session.pull("read", slots=8))
        await stream.until(lambda: "s" in stream.waits)
        original, cancelled = session._handle, asyncio.Event()

        async def cancel_pull() -> None:
            for _ in range(rounds):
                await asyncio.sleep(0)
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            cancelled.set()

        def receive(event: Event) -> None:
            if isinstance(event, m.Grant) and rounds < 0:
                pulling.cancel()
            original(event)
            if isinstance(event, m.Grant):
                cancellations.append(asyncio.create_task(cancel_pull()))

        cancellations: list[asyncio.Task[None]] = []
        session._handle = receive  # type: ignore[method-assign]
        await producer.do("offer", prompts=[1, 2], length=1 << 20)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await cancelled.wait()
        assert pulling.cancelled()
        session._handle = original  # type: ignore[method-assign]
        await stream.until(lambda: not stream.table.leases and not stream.waits)
        assert (await producer.do("pull", slots=8))["prompts"] == [1, 2]
        await session.close()


async def test_an_offer_cancelled_at_the_moment_it_is_accepted_can_still_be_read(run: Run, session_peer: Start) -> None:
    async with run() as stream:
        reader, session = (
            await parked(stream, session_peer, slots=8),
            await api.connect(stream.address, "s", "s", ANSWER_TIMEOUT_S),
        )
        original = session._handle

        def receive(event: Event) -> None:
            if isinstance(event, m.OfferAccepted):
                offering.cancel()
            original(event)

        session._handle = receive  # type: ignore[method-assign]
        data = {"data": [torch.full((4,), 3.0)]}
        offering = asyncio.create_task(session.offer_many("rows", [3], tensors=data, tags={"tag": [3.0]}))
        assert (await reader.answer())["prompts"] == [3]
        assert offering.cancelled()
        await session.close()
