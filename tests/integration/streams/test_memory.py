"""Freed rows return their memory to the system, and a long stream does not grow any process."""

import asyncio
import time
from pathlib import Path

import pytest

from flowrt.transport.lanes.lane import IDLE_S
from tests.integration.streams.conftest import Peer, Run, Start

ROWS, KEPT_ROWS = 256, 2
POLL_INTERVAL_S = 0.2
ROW_BYTES = 1 << 20
SLACK_BYTES = 24 << 20
STREAM_ROWS, MARK_AT = 200_000, 50_000
GROWTH_BYTES = 6 << 20


async def wait_until_rss_below(peer: Peer, rss: int, within_s: float) -> None:
    """Wait until the process has less than ``rss`` bytes in memory."""
    end_s = time.monotonic() + within_s
    while (measured := (await peer.do("measure"))["rss"]) >= rss:
        assert time.monotonic() < end_s, f"after {within_s:.0f} s it has {measured} bytes, not {rss}"
        await asyncio.to_thread(time.sleep, POLL_INTERVAL_S)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["separate tensors", "views of one tensor"])
async def test_freeing_nearly_all_rows_frees_their_memory(run: Run, session_peer: Start, shared: bool) -> None:
    async with run() as stream:
        producer, reader = await session_peer(stream.address, "producer"), await session_peer(stream.address, "reader")
        # The first transfer sets up what every later one uses.
        await producer.do("offer", prompts=[0], length=8)
        await reader.do("pull")
        await reader.do("commit")
        before = {peer: (await peer.do("measure"))["rss"] for peer in (producer, reader)}
        await producer.do("offer", prompts=list(range(ROWS)), length=ROW_BYTES // 4, shared=shared)
        assert len((await reader.do("pull", slots=ROWS))["slots"]) == ROWS
        for peer in (producer, reader):
            full = await peer.do("measure")
            assert full["bytes"] == ROWS * ROW_BYTES
            assert full["rss"] - before[peer] > ROWS * ROW_BYTES - SLACK_BYTES
        # All rows arrived in one packet; the rows that are kept are in its middle.
        freed = [place for place in range(ROWS) if place not in (100, 200)]
        await reader.do("commit", only=freed)
        await reader.do("forget_batch")
        for peer in (producer, reader):
            left = await peer.do("measure")
            assert (left["tensors"], left["bytes"]) == (KEPT_ROWS, KEPT_ROWS * ROW_BYTES)
        # Both ends of a lane keep the buffer of their last message until the lane has been idle for a while.
        for peer in (reader, producer):  # the sender becomes idle after the receiver
            await wait_until_rss_below(
                peer, before[peer] + KEPT_ROWS * ROW_BYTES + SLACK_BYTES, within_s=2 * IDLE_S + 5
            )
        assert stream.table.bytes.total() == KEPT_ROWS * ROW_BYTES


async def test_memory_does_not_grow_over_a_long_stream(start: Start, session_peer: Start, tmp_path: Path) -> None:
    controller = await start("controller", run_dir=str(tmp_path), stages=["read"], budget_rows=20_000)
    address = (await controller.answer())["address"]
    producer, reader = await session_peer(address, "producer"), await session_peer(address, "reader")
    reader.command("consume", slots=1000, mark_at=MARK_AT)
    producer.command("produce", rows=STREAM_ROWS, at_once=1000, length=4, mark_at=MARK_AT)
    early = {reader: (await reader.answer())["marked"], producer: (await producer.answer())["marked"]}
    controller.command("measure")
    early[controller] = (await controller.answer())["rss"]
    late = {producer: (await producer.answer())["rss"]}
    answer = await reader.answer()
    late[reader] = answer["rss"]
    controller.command("measure")
    table = await controller.answer()
    late[controller] = table["rss"]
    assert answer["rows"] == STREAM_ROWS
    assert answer["tensors"] == 0
    assert (table["rows"], table["groups"], table["leases"]) == (0, 0, 0)
    names = {producer: "producer", reader: "reader", controller: "controller"}
    growth = {names[peer]: late[peer] - early[peer] for peer in late}
    assert max(growth.values()) < GROWTH_BYTES, growth
