"""Pipelined relay of weights: equal chunks at both ends, in order, with a running checksum and named failures."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import TransferError
from flowrt.transport.weights.relay import PipelinedReceive, split_buckets
from flowrt.transport.weights.snapshot import RunningChecksum, Snapshot

MIB = 1024 * 1024


def bucket(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4))
def test_chunks_are_views_that_cover_every_byte_once(sizes: list[int]) -> None:
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cut = split_buckets(buckets)
    for piece in cut:
        piece += 1
    assert all(bool((one == 1).all()) for one in buckets)
    assert sum(map(len, cut)) == sum(sizes)
    assert [len(piece) for piece in cut] == [len(piece) for piece in split_buckets(buckets)]


def test_version_has_enough_chunks_for_a_long_chain() -> None:
    for size in (40 * MIB, 200 * MIB):
        assert len(split_buckets([torch.empty(size, dtype=torch.uint8)])) >= 100


async def test_checksum_of_chunks_is_that_of_the_whole() -> None:
    snapshot = Snapshot(1, [bucket(MIB + 7), bucket(3), bucket(2 * MIB)])
    with ThreadPoolExecutor(1) as thread:
        running = RunningChecksum(thread)
        for _ in PipelinedReceive("version 1", 1.0).receive(snapshot.buckets, running.add):
            pass
        assert await running.total() == snapshot.checksum()


def test_chunk_is_relayed_before_the_transfer_ends() -> None:
    buckets = [bucket(600 * 1024)]
    arrival = PipelinedReceive("version 1 of policy", 10.0)
    incoming = arrival.receive(buckets, lambda _: None)
    outgoing = arrival.relay(buckets)
    first = next(incoming)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, outgoing)
        assert not waiting.done()
        next(incoming)  # the lane requests the second chunk: the first has arrived
        assert waiting.result(10.0).data_ptr() == first.data_ptr()


def test_relay_fails_with_its_own_transfer() -> None:
    buckets = [bucket(600 * 1024)]
    arrival = PipelinedReceive("version 1 of policy", 10.0)
    incoming = arrival.receive(buckets, lambda _: None)
    next(incoming)
    next(incoming)
    arrival.fail("the lane broke")
    outgoing = arrival.relay(buckets)
    next(outgoing)  # it has arrived
    with pytest.raises(TransferError, match=r"version 1 of policy cannot be relayed.*the lane broke"):
        next(outgoing)


def test_relay_of_a_silent_sender_fails_at_the_deadline() -> None:
    with pytest.raises(TransferError, match="nothing arrived"):
        next(PipelinedReceive("version 1 of policy", 0.01).relay([bucket(10)]))
