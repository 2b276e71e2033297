"""A worker in a separate process: generates ``response`` for the given number of rows, then serves them."""

import asyncio
from multiprocessing.connection import Connection

import torch

from flowrt import api


def response_of(slot: int) -> torch.Tensor:
    return torch.full((50_000 + slot,), float(slot))


async def make(session: api.Session, rows: int) -> None:
    committed = 0
    while committed < rows:
        batch = await session.pull("rollout", rows - committed)
        responses = [response_of(slot) for slot in batch.slots]
        await session.commit("rollout", batch.slots, batch.leases, {"response": responses})
        committed += len(batch)


async def main(address: str, name: str, rows: int, ready: Connection) -> None:
    session = await api.connect(address, name, "rollout", 20)
    await make(session, rows)
    ready.send("ready")
    try:
        await session.wait_stopped()
    except api.FlowError:
        await session.close()


def run_maker(address: str, name: str, rows: int, ready: Connection) -> None:
    torch.set_num_threads(1)
    asyncio.run(main(address, name, rows, ready))
