"""Weights passed on while they arrive: cut alike at both ends, in order, summed up on the way, ended by name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import TransferError
from flowrt.transport.relay import Arrival, pieces
from flowrt.transport.weights import RunningChecksum, Snapshot

MIB = 1024 * 1024


def bucket(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=4))
def test_pieces_are_views_that_cover_every_byte_once(sizes: list[int]) -> None:
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cut = pieces(buckets)
    for piece in cut:
        piece += 1
    assert all(bool((one == 1).all()) for one in buckets)
    assert sum(map(len, cut)) == sum(sizes)
    assert [len(piece) for piece in cut] == [len(piece) for piece in pieces(buckets)]


def test_a_version_is_cut_finely_enough_for_a_long_chain() -> None:
    for size in (40 * MIB, 200 * MIB):
        assert len(pieces([torch.empty(size, dtype=torch.uint8)])) >= 100


async def test_the_sum_of_pieces_is_that_of_the_whole() -> None:
    snapshot = Snapshot(1, [bucket(MIB + 7), bucket(3), bucket(2 * MIB)])
    with ThreadPoolExecutor(1) as thread:
        running = RunningChecksum(thread)
        for _ in Arrival("version 1", 1.0).receive(snapshot.buckets, running.add):
            pass
        assert await running.total() == snapshot.checksum()


def test_a_piece_is_passed_on_as_soon_as_it_is_here() -> None:
    buckets = [bucket(600 * 1024)]
    arrival = Arrival("version 1 of policy", 10.0)
    incoming = arrival.receive(buckets, lambda _: None)
    outgoing = arrival.relay(buckets)
    first = next(incoming)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, outgoing)
        assert not waiting.done()
        next(incoming)  # the lane asks for the second: the first is here
        assert waiting.result(10.0).data_ptr() == first.data_ptr()


def test_what_does_not_come_whole_is_not_waited_for() -> None:
    buckets = [bucket(600 * 1024)]
    arrival = Arrival("version 1 of policy", 10.0)
    incoming = arrival.receive(buckets, lambda _: None)
    next(incoming)
    next(incoming)
    arrival.fail("the lane broke")
    outgoing = arrival.relay(buckets)
    next(outgoing)  # it had come
    with pytest.raises(TransferError, match=r"version 1 of policy cannot be passed on.*the lane broke"):
        next(outgoing)


def test_a_sender_that_says_nothing_is_left_at_the_deadline() -> None:
    with pytest.raises(TransferError, match="nothing came"):
        next(Arrival("version 1 of policy", 0.01).relay([bucket(10)]))
