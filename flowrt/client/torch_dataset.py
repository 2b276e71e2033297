"""A stage as a PyTorch dataset, for training loops with a DataLoader."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch.utils.data import IterableDataset, get_worker_info

from flowrt.client.sample_tensors import Batch, Columns, Numbers
from flowrt.client.session import Session, connect
from flowrt.client.streams import stream
from flowrt.runtime.waits import BoundedElsewhere, blocking, join_thread

Result = TypeVar("Result")
Row = dict[str, torch.Tensor | float]
JOIN_S = 60.0
CLOSE_S = 10.0


class StreamDataset(IterableDataset[Row]):
    """The rows of a stage without output columns, as dictionaries; ends when the stage's flows are exhausted.

    Each iterating process (each worker of a DataLoader) is a separate consumer with its own connection; together they
    see every row once. Rows are committed when the whole batch has been consumed; if a process dies before that, they
    are granted again to another consumer. Workers of a DataLoader commit a batch as soon as they have fetched it: the
    DataLoader takes rows from its workers in turn, so one of them must not wait for rows that another one has leased.

    Example:
        for row in StreamDataset("tcp://10.0.0.1:5555", "consume"):
            print(row["response"], row["reward"])
    """

    def __init__(self, address: str, stage: str, slots: int = 64, name: str = "dataset", role: str = "dataset") -> None:
        """Describe the stream. Each iterator opens its own connection, and raises as `connect` and `Session.pull`.

        Args:
            address: the controller's address.
            stage: the stage to consume.
            slots: rows fetched at a time.
            name: prefix of the worker names of the consumers.
            role: role of the consumers in the run.
        """
        self._address = address
        self._stage = stage
        self._slots = slots
        self._name = name
        self._role = role

    def __iter__(self) -> Iterator[Row]:
        worker = f"{self._name}-{os.getpid()}-{threading.get_ident()}"
        with _background_loop() as call:
            session = call(connect(self._address, worker, self._role, JOIN_S))
            read = stream if get_worker_info() is None else _committed_batches
            batches = read(session, self._stage, self._slots)
            try:
                while (batch := call(_next(batches))) is not None:
                    yield from _rows(batch)
            finally:
                call(_close(batches))
                call(session.close())


async def _committed_batches(session: Session, stage: str, slots: int) -> AsyncIterator[Batch]:
    """Batches of the stage that are already committed, so that no lease is open while the caller uses a batch."""
    while not (batch := await session.pull(stage, slots)).closed:
        refused = await session.commit(stage, batch.slots, batch.leases)
        if kept := [row for row, slot in enumerate(batch.slots) if slot not in refused]:
            yield batch if len(kept) == len(batch) else _only(batch, kept)


def _only(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of a batch."""
    tensors = {column: [of_rows[row] for row in rows] for column, of_rows in batch.tensors.items()}
    numbers = Numbers((column, [values[row] for row in rows]) for column, values in batch.inline.items())
    return Batch(replace(batch.grant, slots=tuple(batch.slots[row] for row in rows)), Columns(tensors), numbers)


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
        return blocking(
            done.result,
            BoundedElsewhere("the deadlines of the coroutine"),
            "a coroutine of the stream",
            "its event loop",
        )


@contextmanager
def _background_loop() -> Iterator[_Call]:
    """An event loop on a separate thread: heartbeats and lanes continue while the training loop computes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="flowrt stream", daemon=True)
    thread.start()
    call = _Call(loop)
    try:
        yield call
    finally:
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        if join_thread(thread, CLOSE_S):
            loop.close()
