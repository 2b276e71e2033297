"""What every transport has to do, with the other end in a process of its own: bytes, order, failures, nothing left."""

import asyncio
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.transport.devices import has_npu, npu_is_here
from flowrt.wire.records import GONE, ITEM_BYTES

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:  # the peer's own words, which it runs as a script
    sys.path.insert(0, FOLDER)

import lane_pair as pairs  # noqa: E402
import lane_peer as peer  # noqa: E402
from lane_pair import failed, moved, take  # noqa: E402

SMALL = [["int32", [3, 0, 5]]]
LARGE = [["uint8", [40_000_000, 10, 40_000_000]]]
FAST_S, SLOW_S = 1.5, 30.0
OF_DEVICES = ("socket", "nccl", "hccl")
Start = Callable[..., Awaitable[pairs.Pair]]


@pytest.fixture(params=["gloo", "shm", *OF_DEVICES])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in pairs.NOT_HERE:
        pytest.skip(pairs.NOT_HERE[name])
    return name


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    return peer.transports()


@pytest.fixture
async def start(ends: dict[str, Any]) -> AsyncIterator[Start]:
    """Start a pair; afterwards no thread, descriptor, mapping or shared memory of it may be left."""
    files, segments = pairs.open_files(), set(os.listdir("/dev/shm"))
    started: list[pairs.Pair] = []

    async def start_pair(transport: str, deadline_s: float, rest_s: float = 10.0) -> pairs.Pair:
        started.append(pairs.Pair(transport, deadline_s, ends, rest_s))
        await started[-1].start()
        return started[-1]

    yield start_pair
    for pair in started:
        await pair.close()
    for thread in pairs.lane_threads():
        await asyncio.to_thread(thread.join, 2 * FAST_S)
    assert not pairs.lane_threads()
    gc.collect()
    assert pairs.open_files() <= files
    assert not pairs.mapped()
    assert set(os.listdir("/dev/shm")) <= segments


async def test_every_dtype_ragged_and_empty_is_exact(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    ragged = [[dtype, [7, 0, 300_001, 1]] for dtype in ITEM_BYTES]
    for sending in (True, False):
        await moved(pair, sending, ragged, seed=1, sequence=0)
        await moved(pair, sending, [["int32", []], ["float32", [0, 0]]], sequence=1)
        await moved(pair, sending, [["uint8", [5, 2_000_000, 17, 20_000_000, 3]]], sequence=2)
        await moved(pair, sending, [["int16", [9] * 3000]], sequence=3)


async def test_a_hundred_turns_come_in_their_order(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    both = [(sending, sequence) for sequence in range(100) for sending in (True, False)]
    many = [moved(pair, sending, [["int32", [number, 5]]], number, sequence=number) for sending, number in both]
    async with asyncio.timeout(60):
        received = [flats for flats in await asyncio.gather(*many) if flats]
    # Each was exact when it came; those that are kept still are.
    assert [flat.numel() for (flat,) in received] == [4 * (sequence + 5) for sequence in range(100)]
    assert received[3][0].numpy().tobytes() == pairs.flat_bytes(peer.message_of(3, [["int32", [3, 5]]]))[0]


async def test_sixty_four_lanes_at_once(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    columns = [["float32", [20_000, 3]]]
    both = [(kind, sending) for kind in range(32) for sending in (True, False)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(moved(pair, sending, columns, kind, kind=f"k{kind}") for kind, sending in both))
        await asyncio.gather(
            *(moved(pair, sending, columns, kind, kind=f"k{kind}", sequence=1) for kind, sending in both)
        )


async def test_a_peer_that_never_comes_is_an_error_at_the_deadline(start: Start, transport: str) -> None:
    pair = await start(transport, FAST_S)
    pair.kill(signal.SIGKILL)
    works = [take(pair, sending, SMALL) for sending in (True, False)]
    assert await failed(works[0], 3 * FAST_S) > 0.5 * FAST_S
    await failed(works[1], 3 * FAST_S)


async def test_word_that_the_peer_is_gone_frees_whoever_waits_for_it(start: Start, transport: str) -> None:
    pair = await start(transport, FAST_S)
    await moved(pair, False, SMALL)
    works = [take(pair, False, SMALL, sequence=1), take(pair, True, SMALL)]
    pair.lanes.deliver(pairs.THERE, "", GONE, b"")
    for work in works:
        assert await failed(work, FAST_S, "has left the run") < 0.5 * FAST_S


async def test_a_peer_killed_during_a_transfer_is_an_error_at_once(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    works = []
    for sending in (True, False):
        await moved(pair, sending, SMALL)
    pair.kill(signal.SIGSTOP)
    for sending in (True, False):
        works.append(take(pair, sending, LARGE, sequence=1))
        works.append(take(pair, sending, SMALL, sequence=2))
    done, _ = await asyncio.wait(works, timeout=0.3)  # as far as they come
    assert not done
    end(pair)
    for work in works:
        assert await failed(work, 5.0) < 0.2 * SLOW_S


async def test_what_arrived_outlives_its_sender(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    (kept,) = await moved(pair, False, LARGE, seed=4)
    next_one = take(pair, False, SMALL, sequence=1)
    end(pair)
    await failed(next_one, 5.0)
    assert kept.numpy().tobytes() == pairs.flat_bytes(peer.message_of(4, LARGE))[0]
    kept.fill_(1)  # and it is ours to change


async def test_a_hung_peer_is_an_error_at_the_deadline_and_a_new_incarnation_works(
    start: Start, transport: str
) -> None:
    pair, both = await start(transport, FAST_S), (True, False)
    for sending in both:
        await moved(pair, sending, SMALL)
    pair.kill(signal.SIGSTOP)
    theirs = [pair.order(pair.turn(sending, sequence=1), LARGE) for sending in both]
    ours = [take(pair, sending, LARGE, sequence=1) for sending in both]
    assert await failed(ours[0], 3 * FAST_S) > FAST_S * 0.5
    await failed(ours[1], 3 * FAST_S)
    for sending in both:
        assert await failed(take(pair, sending, SMALL, sequence=2), 1.0, "failed") < 0.5
    pair.kill(signal.SIGCONT)
    async with asyncio.timeout(3 * FAST_S):
        assert all(answer["error"] is not None for answer in await asyncio.gather(*theirs))
    for sending in both:
        await moved(pair, sending, SMALL, seed=9, incarnation=1)


async def test_slow_is_not_hung_as_long_as_something_moves(start: Start, transport: str) -> None:
    deadline_s = 1.0
    pair = await start(transport, deadline_s)
    columns = [["uint8", [1_000_000] * 600]]
    await moved(pair, False, SMALL)
    turn = pair.turn(False, sequence=1)
    answer = pair.order(turn, columns)
    await pair.issued(turn)
    begin_s = time.monotonic()
    work = pair.lanes.receive(turn, peer.sizes_of(columns))
    await asyncio.wait([work], timeout=0.02)
    while not work.done() and time.monotonic() - begin_s < 2 * deadline_s:
        # Most of the time it is stopped; what it does in between, however busy this machine is, is progress.
        pair.kill(signal.SIGSTOP)
        await asyncio.wait([work], timeout=0.35)
        worked_s, woken_s = pair.worked_s(), time.monotonic()
        pair.kill(signal.SIGCONT)
        while not work.done() and pair.worked_s() < worked_s + 0.03 and time.monotonic() < woken_s + 0.5 * deadline_s:
            await asyncio.wait([work], timeout=0.01)
    (flat,) = await work
    assert (await answer)["error"] is None
    assert flat.numel() == 600_000_000
    assert time.monotonic() - begin_s > deadline_s


@pytest.mark.parametrize("sending", [True, False])
async def test_a_transfer_that_trickles_is_an_error_that_says_how_slow_it_was(
    start: Start, transport: str, sending: bool
) -> None:
    """Something moves all the time, and it would be 40 s before all of it has."""
    pair, rows = await start(transport, FAST_S), 400
    columns = [["uint8", [1000] * rows]]
    turn = pair.turn(sending)
    theirs = pair.order(turn, columns, pause_s=0.1)
    mine = [torch.zeros(1000, dtype=torch.uint8) for _ in range(rows)]
    work = pair.lanes.send_each(turn, mine) if sending else pair.lanes.receive_each(turn, mine)
    slow = r"is too slow: 0\.\d MB moved in \d s, and after 2 s 1 MB/s are wanted; .* lower controller.lane_mb_per_s"
    try:
        assert await failed(work, 4 * FAST_S, f"lane .*({slow}|gone|losed|reset by peer)") >= 0.5 * FAST_S
    finally:
        error = str(work.exception())
    async with asyncio.timeout(4 * FAST_S):
        said = error + str((await theirs)["error"])
    assert re.search(slow, said), said  # one end found it, and the other is told by its connection


async def test_a_stale_incarnation_is_refused_and_disturbs_nobody(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    await moved(pair, False, SMALL, incarnation=5)
    await failed(take(pair, False, SMALL, sequence=1, incarnation=4), 1.0, "is stale")
    await moved(pair, False, SMALL, incarnation=5, sequence=1)


async def test_a_turn_out_of_order_breaks_its_lane_and_no_other(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    await moved(pair, False, SMALL)
    await moved(pair, False, SMALL, kind="weights")
    await failed(take(pair, False, SMALL, sequence=2), 1.0, "turn 2 came where 1 was due")
    await moved(pair, False, SMALL, kind="weights", sequence=1)


async def test_memory_is_used_again_only_when_its_reader_has_let_go(start: Start) -> None:
    pair = await start("shm", SLOW_S)
    columns = [["uint8", [300_000]]]
    kept = [(await moved(pair, False, columns, seed=sequence, sequence=sequence))[0] for sequence in range(4)]
    view = kept[2][5:10].view(torch.uint8)
    exact = view.tolist()
    assert pairs.mapped() == 4
    kept.clear()
    for sequence in range(4, 12):
        await moved(pair, False, columns, seed=sequence, sequence=sequence)
    assert pairs.mapped() == 4  # nothing new was needed
    assert view.tolist() == exact


async def test_a_lane_that_rests_gives_back_its_warm_memory_and_goes_on(start: Start) -> None:
    pair = await start("shm", SLOW_S, rest_s=0.05)
    for sequence in range(2):
        for sending in (True, False):
            await moved(pair, sending, LARGE, sequence=sequence)
        assert pairs.mapped()
        pair.forget()
        async with asyncio.timeout(5):
            while pairs.mapped():  # nobody tells: both ends have to come to rest
                await asyncio.to_thread(threading.Event().wait, 0.05)


def end(pair: pairs.Pair) -> None:
    """Kill the peer; of some transports no connection says so, but the controller does."""
    pair.kill(signal.SIGKILL)
    if pair.transport in OF_DEVICES:
        pair.lanes.deliver(pairs.THERE, "", GONE, b"")


@pytest.mark.skipif(npu_is_here(), reason="there is an NPU here, and these tests work on it")
def test_torch_npu_is_not_imported_to_look_for_a_device() -> None:
    assert not has_npu()
    assert "torch_npu" not in sys.modules
