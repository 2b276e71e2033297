"""A producer or consumer of rows on sessions of flowrt, a child of a bench; `baseline.py` does it on TransferQueue.

A row is one number in one inline column; a missing row or one that comes twice is an error.
"""

import asyncio
import itertools
import os
import time

import torch
from common.children import serve_commands_on_loop

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session, connect
from flowrt.runtime.event_loop import run_loop

JOIN_S = 60.0
STAGE = "consume"
names = itertools.count()
sessions: list[Session] = []


async def join(address: str, role: str = "streamer") -> None:
    sessions.append(await connect(address, f"{role}{os.getpid()}-{next(names)}", role, JOIN_S))


async def leave() -> None:
    await sessions.pop().close()


async def put(part: str, rows: int, requests: int, depth: int = 1, at_s: float = 0.0, last: bool = False) -> float:
    """Put ``rows`` rows a request, numbered from 0 on, ``depth`` requests in flight; returns the seconds.

    ``at_s`` is the start on the monotonic clock; ``last`` sends the end of data afterwards.
    """
    session = sessions[-1]
    batches = [list(range(first, first + rows)) for first in range(0, rows * requests, rows)]
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))
    start_s = time.monotonic()

    async def chain(first: int) -> None:
        for request in range(first, requests, depth):
            assert await session.offer_many(part, batches[request], tags={"value": batches[request]}) is not None

    await asyncio.gather(*(chain(first) for first in range(depth)))
    if last:
        session.exhausted(part)
    return time.monotonic() - start_s


async def get(part: str, rows: int, requests: int, depth: int = 1) -> float:  # noqa: ARG001
    """Read and commit all rows of a `put`, ``rows`` a request; returns the seconds. Raises ValueError for other rows.

    The commit of a batch is sent with the next pull, as in the iteration over a stream.
    """
    session = sessions[-1]
    got: list[list[float]] = []

    async def chain(first: int) -> None:
        batch: Batch | None = None
        for _ in range(first, requests, depth):
            batch = await session.pull(STAGE, rows, done=batch)
            got.append(batch.inline["value"])
        if batch is not None:
            await session.commit(STAGE, batch.slots, batch.leases)

    start_s = time.monotonic()
    await asyncio.gather(*(chain(first) for first in range(depth)))
    seconds = time.monotonic() - start_s
    if sorted(itertools.chain(*got)) != list(range(rows * requests)):
        raise ValueError(f"{rows * requests} rows were put, {sum(map(len, got))} came out, and not the same")
    return seconds


async def drain(part: str, rows: int, total: int) -> dict[str, float]:  # noqa: ARG001
    """Read and commit, with other consumers, until the stream is closed; returns the rows and when the last came."""
    session, count, last_s = sessions[-1], 0, time.monotonic()
    while not (batch := await session.pull(STAGE, rows)).closed:
        await session.commit(STAGE, batch.slots, batch.leases)
        count += len(batch.slots)
        last_s = time.monotonic()
    return {"rows": count, "last_s": last_s}


async def fill(part: str, rows: int, queue: int = -1) -> None:
    """Put ``rows`` rows into the joined queue of index ``queue``, 1,000 a request."""
    for first in range(0, rows, 1000):
        numbers = range(first, min(first + 1000, rows))
        await sessions[queue].offer_many(part, numbers, tags={"value": numbers})


async def pull_times(parts: list[str], rows: int, count: int, warm: int) -> list[list[float]]:
    """Seconds of ``count`` pulls of ``rows`` rows from each of the queues joined last, one for each part, by turns.

    ``warm`` pulls of one row come first, because a process that slept during the filling wakes slowly.
    """
    queues = sessions[-len(parts) :]
    times: list[list[float]] = [[] for _ in queues]
    batches: list[tuple[Session, Batch]] = []
    for wanted in [1] * warm + [rows] * count:
        for session, seconds in zip(queues, times, strict=True):
            start_s = time.monotonic()
            batch = await session.pull(STAGE, wanted)
            seconds.append(time.monotonic() - start_s)
            assert len(batch.slots) == wanted
            batches.append((session, batch))
    for session, batch in batches:
        await session.commit(STAGE, batch.slots, batch.leases)
    return [seconds[warm:] for seconds in times]


async def clear(part: str, rows: int, queue: int = -1) -> None:  # noqa: ARG001
    """Read and commit the ``rows`` rows that are left."""
    while rows:
        batch = await sessions[queue].pull(STAGE, min(rows, 1000))
        await sessions[queue].commit(STAGE, batch.slots, batch.leases)
        rows -= len(batch.slots)


async def first_sample(address: str) -> float:
    """Join the controller of a GRPO run, offer a prompt and pull it; returns when it came (monotonic seconds)."""
    await join(address, "source")  # the only role that may offer prompts in this run
    session = sessions[-1]
    session.params.applied("policy", 0)
    prompt = {"prompt": torch.zeros(4, dtype=torch.int32), "answer": torch.zeros(1, dtype=torch.uint8)}
    await session.offer("eval", 0, 0, 1, prompt)
    batch = await session.pull("rollout", 1)
    assert len(batch.slots) == 1
    return time.monotonic()


if __name__ == "__main__":
    torch.set_num_threads(1)
    orders = (join, leave, put, get, drain, fill, pull_times, clear, first_sample)
    run_loop(serve_commands_on_loop({order.__name__: order for order in orders}, os.getpid()))
