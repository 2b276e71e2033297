"""A stage as a PyTorch dataset, for training loops that are built around a DataLoader."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from flowrt.client.batches import Batch
from flowrt.client.greeting import connect
from flowrt.client.session import Session
from flowrt.client.stream import stream
from flowrt.waiting import Guard, blocking, joined

Result = TypeVar("Result")
Row = dict[str, torch.Tensor | float]
JOIN_S = 60.0
CLOSE_S = 10.0


class StreamDataset(IterableDataset[Row]):
    """The rows of a stage that makes nothing, as dictionaries of their columns; ends when its flows are exhausted.

    Each process that iterates (each worker of a DataLoader) is a consumer of its own, with a connection of its own;
    together they see every row once. ``slots`` rows are fetched at a time and committed when all of them have been
    taken; rows taken by a process that dies before that are served again, to another consumer. Workers of a
    DataLoader commit what they fetch at once: it takes rows from them in turns, and while it waits for one of them,
    that one must not wait for rows that another has not been asked for.
    """

    def __init__(self, address: str, stage: str, slots: int = 64, name: str = "dataset", role: str = "dataset") -> None:
        self._address = address
        self._stage = stage
        self._slots = slots
        self._name = name
        self._role = role

    def __iter__(self) -> Iterator[Row]:
        worker = f"{self._name}-{os.getpid()}-{threading.get_ident()}"
        with _background_loop() as call:
            session = call(connect(self._address, worker, self._role, JOIN_S))
            read = stream if get_worker_info() is None else _taken
            batches = read(session, self._stage, self._slots)
            try:
                while (batch := call(_next(batches))) is not None:
                    yield from _rows(batch)
            finally:
                call(_close(batches))
                call(session.close())


async def _taken(session: Session, stage: str, slots: int) -> AsyncIterator[Batch]:
    """Batches of the stage that are committed already; between two of them nothing is leased."""
    while not (batch := await session.pull(stage, slots)).closed:
        if not await session.commit(stage, batch.slots, batch.leases):
            yield batch


async def _next(batches: Any) -> Batch | None:
    return await anext(batches, None)


async def _close(batches: Any) -> None:
    await batches.aclose()


def _rows(batch: Batch) -> Iterator[Row]:
    for row in range(len(batch)):
        tensors = {column: rows[row] for column, rows in batch.tensors.items()}
        yield {**tensors, **{column: values[row] for column, values in batch.inline.items()}}


class _Call:
    """Runs a coroutine on the loop of another thread and waits for its result."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Coroutine[Any, Any, Result]) -> Result:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        return blocking(done.result, Guard("the deadline of what runs there"), "the stream's own loop", "that loop")


@contextmanager
def _background_loop() -> Iterator[_Call]:
    """An event loop on a thread of its own: heartbeats and lanes go on while the training loop computes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="flowrt stream", daemon=True)
    thread.start()
    call = _Call(loop)
    try:
        yield call
    finally:
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        if joined(thread, CLOSE_S):
            loop.close()
