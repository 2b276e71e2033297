"""Rows through stages: served complete, once per stage, shared by the consumers of a stage, to an exact end."""

import signal
from typing import Any

import pytest

from flowrt import api
from tests.integration.streams.conftest import Run, Start

ROWS = 20_000
GENERATED = api.Dataflow(
    (api.Column("data", "float32", "group"), api.Column("text", "float32", "slot")),
    (
        api.Stage("make", ("data",), ("text", "score"), generates=True),
        api.Stage("read", ("data", "text", "score", "tag"), ()),
        api.Stage("peek", ("score", "tag"), ()),
    ),
    tags=("tag",),
)
STAGES = ("train", "judge", "log")
PARALLEL_STAGES = api.Dataflow(
    (api.Column("data", "float32", "group"),),
    tuple(api.Stage(name, ("data", "tag"), ()) for name in STAGES),
    tags=("tag",),
)


def rows_of(*answers: dict[str, Any]) -> list[int]:
    return sorted(prompt for answer in answers for prompt in answer["prompts"])


async def test_a_row_is_served_only_with_all_its_tags_columns_and_versions(run: Run, session_peer: Start) -> None:
    """Readers compare each tensor, tag, number and version span of every row with its prompt, while it is written."""
    async with run(GENERATED, budget_rows=4000) as stream:
        names = ("producer", "maker", "reader", "second", "peeker")
        producer, maker, reader, second, peeker = [await session_peer(stream.address, name) for name in names]
        reader.command("consume", slots=100, spans=True)
        second.command("consume", slots=100, spans=True)
        peeker.command("consume", stage="peek", slots=100, spans=True)
        maker.command("run_stage", stage="make", slots=100, lengths={"text": 2}, inline=["score"], spans=True)
        producer.command("produce", rows=ROWS, at_once=100, length=2)
        read, rest, peeked, generated = [await peer.answer() for peer in (reader, second, peeker, maker)]
        assert rows_of(read, rest) == rows_of(peeked) == list(range(ROWS))
        assert generated["rows"] == ROWS
        stream.assert_empty()


async def test_every_stage_reads_every_row_once_and_its_consumers_share_them(run: Run, session_peer: Start) -> None:
    async with run(PARALLEL_STAGES, sources=2) as stream:
        producers = [await session_peer(stream.address, f"producer-{number}") for number in range(2)]
        consumers = {}
        for stage in STAGES:
            consumers[stage] = [await session_peer(stream.address, f"{stage}-{number}") for number in range(2)]
            for consumer in consumers[stage]:
                consumer.command("consume", stage=stage, slots=7)
        for number, producer in enumerate(producers):
            producer.command("produce", rows=500, at_once=9, first=500 * number)
        for stage in STAGES:
            seen = [await consumer.answer() for consumer in consumers[stage]]
            assert rows_of(*seen) == list(range(1000)), f"stage {stage}"
            assert all(answer["prompts"] for answer in seen), f"stage {stage} was not shared"
        stream.assert_empty()


async def test_stream_closes_only_after_every_source_completed(run: Run, session_peer: Start) -> None:
    async with run(sources=2) as stream:
        first, second, reader = [await session_peer(stream.address, name) for name in ("first", "second", "reader")]
        await first.do("offer", prompts=[1])
        await first.do("exhausted")
        assert (await reader.do("pull"))["prompts"] == [1]
        await reader.do("commit")
        reader.command("pull")
        await stream.until(lambda: stream.waits == {"reader": "slots ready for read"})
        await second.do("offer", prompts=[2])
        assert (await reader.answer())["prompts"] == [2]
        await second.do("exhausted")
        await reader.do("commit")
        assert (await reader.do("pull"))["closed"]


async def test_rows_of_a_killed_consumer_are_served_before_the_stream_closes(run: Run, session_peer: Start) -> None:
    async with run(sources=2) as stream:
        names = ("p", "q", "dying", "reader", "second")
        first, other, dying, reader, second = [await session_peer(stream.address, name) for name in names]
        await first.do("offer", prompts=list(range(40)))
        assert (await dying.do("pull", slots=10))["prompts"] == list(range(10))
        await other.do("offer", prompts=list(range(40, 80)))
        reader.command("consume", slots=8)
        second.command("consume", slots=8)
        await first.do("exhausted")
        await other.do("exhausted")
        # All but the ten are read, and both readers wait: the stream may not be closed yet.
        await stream.until(lambda: len(stream.table.slots) == 10 and len(stream.waits) == 2)
        dying.signal(signal.SIGKILL)
        seen = [await reader.answer(), await second.answer()]
        assert rows_of(*seen) == list(range(80))
        stream.assert_empty()


@pytest.mark.parametrize("ahead", [True, False])
async def test_closing_a_stream_returns_unprocessed_rows(run: Run, session_peer: Start, ahead: bool) -> None:
    async with run() as stream:
        producer, leaver, reader = [
            await session_peer(stream.address, name) for name in ("producer", "leaver", "reader")
        ]
        await producer.do("produce", rows=50, at_once=50)
        left = await leaver.do("consume", slots=10, ahead=ahead, leave_after=3)
        assert left["prompts"] == list(range(30))
        await stream.until(lambda: not stream.table.leases)
        # Two batches were committed by the pulls for the next ones; the third was unfinished, the fourth never read.
        assert rows_of(await reader.do("consume", slots=10, ahead=ahead)) == list(range(20, 50))
        stream.assert_empty()


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_stream_whose_process_is_killed_loses_no_row(run: Run, session_peer: Start, ahead: bool) -> None:
    async with run() as stream:
        producer, dying, reader = [await session_peer(stream.address, name) for name in ("producer", "dying", "reader")]
        await producer.do("produce", rows=500, at_once=50)
        dying.command("consume", slots=10, ahead=ahead)
        await stream.until(lambda: len(stream.table.slots) < 400)
        dying.signal(signal.SIGKILL)
        await stream.until(lambda: "dying" not in stream.core.state.membership)
        unfinished = sorted(slot.group.prompt for slot in stream.table.slots.values())
        assert unfinished
        assert unfinished == list(range(unfinished[0], 500))
        assert rows_of(await reader.do("consume")) == unfinished
        stream.assert_empty()


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_dataset_yields_every_row_once_and_leaves_no_process_or_thread(
    run: Run, session_peer: Start, start: Start, workers: int
) -> None:
    async with run() as stream:
        producer = await session_peer(stream.address, "producer")
        loader = await start("dataset", address=stream.address, workers=workers, slots=16)
        await producer.do("produce", rows=400, at_once=32)
        answer = await loader.answer()
        assert sorted(answer["prompts"]) == list(range(400))
        assert answer["children"] == []
        assert set(answer["threads"]) <= {"MainThread", "QueueFeederThread"}  # QueueFeederThread: multiprocessing
        await stream.until(lambda: list(stream.server.status()["workers"]) == ["producer"])
        stream.assert_empty()


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_dataset_closed_early_returns_its_rows(
    run: Run, session_peer: Start, start: Start, workers: int
) -> None:
    async with run() as stream:
        producer, reader = await session_peer(stream.address, "producer"), await session_peer(stream.address, "reader")
        await producer.do("produce", rows=100, at_once=100)
        loader = await start("dataset", address=stream.address, workers=workers, slots=10, leave_after=25)
        answer = await loader.answer()
        assert len(answer["prompts"]) == 25
        assert answer["children"] == []
        assert set(answer["threads"]) <= {"MainThread", "QueueFeederThread"}  # QueueFeederThread: multiprocessing
        await stream.until(lambda: not stream.table.leases)
        done = set(range(100)) - {slot.group.prompt for slot in stream.table.slots.values()}
        rest = rows_of(await reader.do("consume"))
        assert not done & set(rest)
        assert sorted(done | set(rest)) == list(range(100))
        # Rows that the dataset yielded are committed or served again; all other rows are served again.
        assert done | (set(rest) & set(answer["prompts"])) >= set(answer["prompts"])
        stream.assert_empty()
