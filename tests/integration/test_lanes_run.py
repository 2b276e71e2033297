"""Lanes in a run: rows of an owner that dies or hangs, and a full tensor store."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flowrt import api
from flowrt.errors import LocalProtocolError, OverBudget, TransferError
from tests.integration.helpers import lane_maker
from tests.integration.helpers.forked import CONTEXT

COLUMNS = (api.Column("prompt", "int32", "group"), api.Column("response", "float32", "slot"))
STAGES = (
    api.Stage("rollout", needs=("prompt",), makes=("response",)),
    api.Stage("reward", needs=("response",), makes=("score",)),
    api.Stage("read", needs=("response", "score"), makes=()),
)
FLOW = api.Dataflow(COLUMNS, STAGES)
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())
ROWS = 4
LANE_TIMEOUT_S, WORKER_TIMEOUT_S = 2.0, 3.0


class Run:
    """A controller, a source in this process, and a process that has generated all responses and sends them."""

    def __init__(self, address: str, producer: ForkServerProcess, stack: contextlib.AsyncExitStack) -> None:
        self.address = address
        self.producer = producer
        self._stack = stack

    async def join(self, name: str) -> api.Session:
        session = await api.connect(self.address, name, name, 60)
        self._stack.push_async_callback(session.close)
        return session

    @property
    def pid(self) -> int:
        """Of the producer."""
        assert self.producer.pid is not None
        return self.producer.pid

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@asynccontextmanager
async def running(folder: Path, lanes: str, **overrides: Any) -> AsyncIterator[Run]:
    settings = api.Settings(
        lanes=lanes, transfer_idle_timeout_s=LANE_TIMEOUT_S, worker_timeout_s=WORKER_TIMEOUT_S, **overrides
    )
    async with contextlib.AsyncExitStack() as stack:
        _, address = await stack.enter_async_context(api.controller(FLOW, settings, POLICIES, folder))
        source = await api.connect(address, "source", "source", 60)
        stack.push_async_callback(source.close)
        await source.offer_many("data", range(ROWS), tensors={"prompt": [torch.zeros(2, dtype=torch.int32)] * ROWS})
        ready, end = CONTEXT.Pipe(duplex=False)
        producer = CONTEXT.Process(target=lane_maker.run_maker, args=(address, "a-maker", ROWS, end))
        producer.start()
        end.close()
        try:
            assert await asyncio.to_thread(ready.poll, 30)
            assert ready.recv() == "ready"
            yield Run(address, producer, stack)
        finally:
            producer.kill()
            await asyncio.to_thread(producer.join, 30)
            producer.close()
            ready.close()


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Whether this tensor is in memory shared with the sender of a lane."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:flowrt-lane" in line]
    shared = [[int(address, 16) for address in line[0].split("-")] for line in lines]
    return any(first <= begin and end <= last for first, last in shared)


def check(batch: api.Batch) -> None:
    assert len(batch) == ROWS
    for slot, response in zip(batch.slots, batch.tensors["response"], strict=True):
        assert torch.equal(response, lane_maker.response_of(slot))


@pytest.mark.parametrize("lanes", ["gloo", "shm", "auto"])
async def test_rows_use_the_chosen_transport(tmp_path: Path, lanes: str) -> None:
    async with running(tmp_path, lanes) as run:
        reward = await run.join("reward")
        batch = await reward.pull("reward", ROWS, deadline_s=120)
        check(batch)
        assert [incoming.turn.transport for incoming in batch.grant.incoming] == ["shm" if lanes == "auto" else lanes]
        packed = batch.tensors.packed("response")
        assert torch.equal(packed.values, torch.cat(batch.tensors["response"]))
        assert is_in_shared_memory(packed.values) == (lanes != "gloo")  # readers get views of the sender's segment
        assert all(is_in_shared_memory(row) == (lanes != "gloo") for row in batch.tensors["response"])


@pytest.mark.parametrize("lanes", ["gloo", "shm"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_rows_of_a_lost_owner_are_generated_again(tmp_path: Path, lanes: str, number: signal.Signals) -> None:
    async with running(tmp_path, lanes) as run:
        reward, spare = await run.join("reward"), await run.join("spare")
        run.kill(number)
        pulling = asyncio.create_task(reward.pull("reward", ROWS, deadline_s=120))
        async with asyncio.timeout(120):
            await lane_maker.make(spare, ROWS)
            check(await pulling)


async def test_owner_without_file_descriptors_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    """Shared memory only: gloo ends a process that cannot accept a connection, and its rows are generated again."""
    async with running(tmp_path, "shm") as run:
        reward, owner = await run.join("reward"), psutil.Process(run.pid)
        before = owner.rlimit(psutil.RLIMIT_NOFILE)
        owner.rlimit(psutil.RLIMIT_NOFILE, (owner.num_fds(), before[1]))
        async with asyncio.timeout(60):
            with pytest.raises(TransferError, match="its tensors never arrived: lane a-maker>reward/samples"):
                await reward.pull("reward", ROWS, deadline_s=30)
            owner.rlimit(psutil.RLIMIT_NOFILE, before)
            check(await reward.pull("reward", ROWS, deadline_s=30))


@pytest.mark.parametrize("lanes", ["gloo", "shm"])
async def test_rows_of_a_hung_owner_come_from_another_worker(tmp_path: Path, lanes: str) -> None:
    async with running(tmp_path, lanes) as run:
        reward, reader = await run.join("reward"), await run.join("reader")
        scored = await reward.pull("reward", ROWS, deadline_s=120)
        await reward.commit("reward", scored.slots, scored.leases, inline={"score": [1.0] * ROWS})
        run.kill(signal.SIGSTOP)  # which the controller has not detected yet
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            batch = await reader.pull("read", ROWS, deadline_s=120)
        check(batch)
        assert {incoming.turn.sender for incoming in batch.grant.incoming} == {"reward"}


@pytest.mark.parametrize("lanes", ["gloo", "shm"])
async def test_pull_over_the_budget_fails_and_smaller_pulls_work(tmp_path: Path, lanes: str) -> None:
    row = 4 * 50_004
    async with running(tmp_path, lanes, store_bytes=ROWS * row + row) as run:
        reward = await run.join("reward")
        reward.store.put("response", 10**9, torch.zeros(75_000))
        with pytest.raises(TransferError, match="do not fit into this worker's store: 300000 are held"):
            await reward.pull("reward", ROWS, deadline_s=120)
        for _ in range(ROWS):
            batch = await reward.pull("reward", 1, deadline_s=120)
            assert {incoming.turn.transport for incoming in batch.grant.incoming} == {lanes}
            expected = lane_maker.response_of(batch.slots[0])
            assert torch.equal(batch.tensors["response"][0], expected)
            reward.store.free(("response",), batch.slots, ())
        with pytest.raises(OverBudget, match=r"raise controller\.store_gb"):
            await reward.commit("reward", (1,), (1,), {"response": [torch.zeros(10**6)]})


async def test_forced_unsupported_transport_is_rejected(tmp_path: Path) -> None:
    async with api.controller(FLOW, api.Settings(lanes="hccl"), POLICIES, tmp_path) as (_, address):
        with pytest.raises(LocalProtocolError, match="lanes are forced to be hccl, and it can only do shm, gloo"):
            await api.connect(address, "worker", "worker", 60)
