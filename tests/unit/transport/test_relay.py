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
    assert all(bool((tensor == 1).all()) for tensor in buckets)
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


async def test_transfer_goes_on_after_the_chunks_that_arrived() -> None:
    snapshot = Snapshot(1, [bucket(MIB + 7), bucket(2 * MIB)])
    copy = [torch.zeros_like(tensor) for tensor in snapshot.buckets]
    pieces = split_buckets(snapshot.buckets)
    with ThreadPoolExecutor(1) as thread:
        running, arrival = RunningChecksum(thread), PipelinedReceive("version 1", 1.0)
        broken = arrival.receive(copy, running.add)
        for chunk, piece in zip(broken, pieces[:4], strict=False):
            chunk.copy_(piece)
        assert arrival.pause() == 4
        relayed = [chunk.data_ptr() for _, chunk in zip(range(4), arrival.relay(copy), strict=False)]
        rest = arrival.receive(copy, running.add)
        for chunk, piece in zip(rest, pieces[4:], strict=True):
            assert next(broken, None) is None  # its lane may end later
            chunk.copy_(piece)
        relayed += [chunk.data_ptr() for chunk in arrival.relay(copy, first=4)]
        assert await running.total() == snapshot.checksum() == Snapshot(1, copy).checksum()
    assert relayed == [chunk.data_ptr() for chunk in split_buckets(copy)]
