"""Conformance of transports, with the other end in another process: bytes, order, failures, no leaks."""

import asyncio
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrt.protocol.messages import GONE, ITEM_BYTES
from flowrt.runtime.process_sessions import SHARED
from flowrt.transport.devices import has_npu, npu_is_here
from tests.integration.helpers import lane_pair as pairs
from tests.integration.helpers import lane_peer as peer
from tests.integration.helpers.lane_pair import failed, moved, take

SMALL = [("int32", [3, 0, 5])]
LARGE = [("uint8", [17_000_000, 10, 17_000_000])]
"""Rows of two chunks each, more than the buffers of a connection hold."""
FAST_S, SLOW_S = 1.5, 30.0
NEVER_S = 600.0
"""A deadline that no test reaches: what fails does not fail because of it."""
DEVICE_TRANSPORTS = ("socket", "nccl", "hccl")
Start = Callable[..., Awaitable[pairs.Pair]]


@pytest.fixture(params=["gloo", "shm", *DEVICE_TRANSPORTS])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in pairs.NOT_HERE:
        pytest.skip(pairs.NOT_HERE[name])
    return name


@pytest.fixture(scope="module")
def ends() -> dict[str, Any]:
    return peer.transports()


@pytest.fixture
async def start(ends: dict[str, Any], fork_server: None) -> AsyncIterator[Start]:
    """Start a pair; afterwards no thread, descriptor, mapping or shared memory of it may remain."""
    files, named = pairs.open_files(), pairs.named_memory(os.getpid())
    started: list[pairs.Pair] = []

    async def start_pair(transport: str, deadline_s: float, idle_s: float = 10.0) -> pairs.Pair:
        started.append(pairs.Pair(transport, deadline_s, ends, idle_s))
        await started[-1].start()
        return started[-1]

    yield start_pair
    for pair in started:
        await pair.close()
    for thread in pairs.lane_threads():
        await asyncio.to_thread(thread.join, pairs.WITHIN_S)
    assert not pairs.lane_threads()
    gc.collect()
    assert pairs.open_files() <= files
    assert not pairs.mapped()
    assert not [path for pair in started for path in pair.named_memory - named if path.exists()]


def test_the_named_memory_of_a_process_is_what_it_has_mapped() -> None:
    with tempfile.NamedTemporaryFile(dir=SHARED) as of_another_process:
        own = SharedMemory(create=True, size=1)
        mapped = pairs.named_memory(os.getpid())
        own.close()
        own.unlink()
    assert SHARED / own.name in mapped
    assert Path(of_another_process.name) not in mapped


async def test_every_dtype_with_ragged_and_empty_rows_is_exact(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    ragged = [[dtype, [7, 0, 300_001, 1]] for dtype in ITEM_BYTES]
    for sending in (True, False):
        await moved(pair, sending, ragged, seed=1, sequence=0)
        await moved(pair, sending, [("int32", []), ("float32", [0, 0])], sequence=1)
        await moved(pair, sending, [("uint8", [5, 2_000_000, 17, 20_000_000, 3])], sequence=2)
        await moved(pair, sending, [("int16", [9] * 3000)], sequence=3)


async def test_hundred_turns_arrive_in_order(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    both = [(sending, sequence) for sequence in range(100) for sending in (True, False)]
    many = [moved(pair, sending, [("int32", [number, 5])], number, sequence=number) for sending, number in both]
    async with asyncio.timeout(60):
        received = [flats for flats in await asyncio.gather(*many) if flats]
    # `moved` has checked each on arrival; the kept ones are unchanged.
    assert [flat.numel() for (flat,) in received] == [4 * (sequence + 5) for sequence in range(100)]
    assert received[3][0].numpy().tobytes() == pairs.flat_bytes(peer.message_of(3, [("int32", [3, 5])]))[0]


async def test_sixty_four_lanes_transfer_concurrently(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    columns = [("float32", [20_000, 3])]
    both = [(kind, sending) for kind in range(32) for sending in (True, False)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(moved(pair, sending, columns, kind, kind=f"k{kind}") for kind, sending in both))
        await asyncio.gather(
            *(moved(pair, sending, columns, kind, kind=f"k{kind}", sequence=1) for kind, sending in both)
        )


async def test_absent_peer_fails_the_lane_at_the_deadline(start: Start, transport: str) -> None:
    pair = await start(transport, FAST_S)
    pair.kill(signal.SIGKILL)
    begin_s = time.monotonic()
    for work in [take(pair, sending, SMALL) for sending in (True, False)]:
        await failed(work)
    assert time.monotonic() - begin_s > 0.5 * FAST_S


async def test_notice_of_a_lost_peer_fails_waiting_turns(start: Start, transport: str) -> None:
    pair = await start(transport, FAST_S)
    await moved(pair, False, SMALL)
    works = [take(pair, False, SMALL, sequence=1), take(pair, True, SMALL)]
    pair.lanes.deliver(pairs.THERE, "", GONE, b"")
    assert all(work.done() for work in works)
    for work in works:
        await failed(work, "has left the run")


async def test_peer_killed_during_a_transfer_fails_it_before_the_deadline(start: Start, transport: str) -> None:
    pair = await start(transport, NEVER_S)
    works = []
    for sending in (True, False):
        await moved(pair, sending, SMALL)
    pair.kill(signal.SIGSTOP)
    for sending in (True, False):
        works.append(take(pair, sending, LARGE, sequence=1))
        works.append(take(pair, sending, SMALL, sequence=2))
    done, _ = await asyncio.wait(works, timeout=0.3)  # until they block
    assert not done
    kill_peer(pair)
    for work in works:
        await failed(work)


async def test_received_tensors_outlive_their_sender(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    (kept,) = await moved(pair, False, LARGE, seed=4)
    next_one = take(pair, False, SMALL, sequence=1)
    kill_peer(pair)
    await failed(next_one)
    assert kept.numpy().tobytes() == pairs.flat_bytes(peer.message_of(4, LARGE))[0]
    kept.fill_(1)  # received tensors may be changed


async def test_hung_peer_fails_at_the_deadline_and_a_new_incarnation_works(start: Start, transport: str) -> None:
    pair, both = await start(transport, FAST_S), (True, False)
    for sending in both:
        await moved(pair, sending, SMALL)
    pair.kill(signal.SIGSTOP)
    remote = [pair.order(pair.turn(sending, sequence=1), LARGE) for sending in both]
    begin_s = time.monotonic()
    for work in [take(pair, sending, LARGE, sequence=1) for sending in both]:
        await failed(work)
    assert time.monotonic() - begin_s > 0.5 * FAST_S
    for sending in both:
        later = take(pair, sending, SMALL, sequence=2)
        assert later.done(), "a turn of a failed lane waits"
        await failed(later, "failed")
    pair.kill(signal.SIGCONT)
    async with asyncio.timeout(pairs.WITHIN_S):
        assert all(answer["error"] is not None for answer in await asyncio.gather(*remote))
    for sending in both:
        await moved(pair, sending, SMALL, seed=9, incarnation=1)


@pytest.mark.long
async def test_slow_transfer_with_progress_does_not_fail(start: Start, transport: str) -> None:
    deadline_s = 1.0
    pair = await start(transport, deadline_s)
    columns = [("uint8", [1_000_000] * 600)]
    await moved(pair, False, SMALL)
    turn = pair.turn(False, sequence=1)
    answer = pair.order(turn, columns)
    await pair.issued(turn)
    begin_s = time.monotonic()
    work = pair.lanes.receive(turn, peer.sizes_of(columns))
    await asyncio.wait([work], timeout=0.02)
    while not work.done() and time.monotonic() - begin_s < 2 * deadline_s:
        # The peer is stopped most of the time, and makes some progress in between, also on a busy machine.
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
async def test_transfer_below_the_minimum_rate_fails_with_its_rate(start: Start, transport: str, sending: bool) -> None:
    """Bytes arrive all the time, but the transfer would take 40 s."""
    pair, rows = await start(transport, FAST_S), 400
    columns = [["uint8", [1000] * rows]]
    turn = pair.turn(sending)
    remote = pair.order(turn, columns, pause_s=0.1)
    tensors = [torch.zeros(1000, dtype=torch.uint8) for _ in range(rows)]
    begin_s = time.monotonic()
    work = pair.lanes.send_each(turn, tensors) if sending else pair.lanes.receive_each(turn, tensors)
    slow = (
        r"is too slow: 0\.\d MB moved in \d+ s, and after 2 s at least 1 MB/s are required; .* "
        r"lower controller.min_transfer_mb_per_s"
    )
    try:
        await failed(work, f"lane .*({slow}|gone|losed|reset by peer)")
        assert time.monotonic() - begin_s >= 0.5 * FAST_S
    finally:
        error = str(work.exception())
    async with asyncio.timeout(pairs.WITHIN_S):
        errors = error + str((await remote)["error"])
    assert re.search(slow, errors), errors  # one end detects it, and closes the connection to the other


async def test_only_the_turn_of_a_stale_incarnation_fails(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    await moved(pair, False, SMALL, incarnation=5)
    await failed(take(pair, False, SMALL, sequence=1, incarnation=4), "is stale")
    await moved(pair, False, SMALL, incarnation=5, sequence=1)


async def test_turn_out_of_order_fails_its_lane_only(start: Start, transport: str) -> None:
    pair = await start(transport, SLOW_S)
    await moved(pair, False, SMALL)
    await moved(pair, False, SMALL, kind="weights")
    await failed(take(pair, False, SMALL, sequence=2), "received turn 2 in place of turn 1")
    await moved(pair, False, SMALL, kind="weights", sequence=1)


async def test_memory_is_reused_only_without_views(start: Start) -> None:
    pair = await start("shm", SLOW_S)
    columns = [("uint8", [300_000])]
    kept = [(await moved(pair, False, columns, seed=sequence, sequence=sequence))[0] for sequence in range(4)]
    view = kept[2][5:10].view(torch.uint8)
    exact = view.tolist()
    assert pairs.mapped() == 4
    kept.clear()
    for sequence in range(4, 12):
        await moved(pair, False, columns, seed=sequence, sequence=sequence)
    assert pairs.mapped() == 4  # no new segment was mapped
    assert view.tolist() == exact


async def test_idle_lane_frees_its_memory_and_still_works(start: Start) -> None:
    pair = await start("shm", SLOW_S, idle_s=0.05)
    for sequence in range(2):
        for sending in (True, False):
            await moved(pair, sending, LARGE, sequence=sequence)
        assert pairs.mapped()
        pair.forget()
        async with asyncio.timeout(pairs.WITHIN_S):
            while pairs.mapped():  # without a signal: both ends become idle
                await asyncio.to_thread(threading.Event().wait, 0.05)


def kill_peer(pair: pairs.Pair) -> None:
    """Kill the peer. Some transports do not detect it, but the controller reports it."""
    pair.kill(signal.SIGKILL)
    if pair.transport in DEVICE_TRANSPORTS:
        pair.lanes.deliver(pairs.THERE, "", GONE, b"")


@pytest.mark.skipif(npu_is_here(), reason="an NPU is present, and these tests use it")
def test_detection_of_devices_does_not_import_torch_npu() -> None:
    assert not has_npu()
    assert "torch_npu" not in sys.modules
