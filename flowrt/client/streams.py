"""Loops of pulls: for a stage with output columns, for one without, and with weight updates during a pull."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.ids import GATHER
from flowrt.protocol import messages as m
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, pause, wait_all, wait_any
from flowrt.transport.lanes.lane import ignore_exception
from flowrt.transport.tensor_store import Rows
from flowrt.transport.weights.snapshot import Snapshot

PULL_INTERVAL_S = 0.025
"""Shortest time between two batches of a stage whose samples become ready one by one, as those of rewards do."""


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The columns that a stage makes of a batch, one row per slot; see `Session.commit`."""

    tensors: Mapping[str, Rows] = field(default_factory=dict)
    inline: Mapping[str, Sequence[float]] = field(default_factory=dict)
    on_committed: Callable[[Sequence[int]], None] | None = None
    """Called with the refused slots when the commit is answered; what must not be counted twice belongs here."""


async def delay_pull(session: Session, since_s: float, interval_s: float) -> None:
    """Wait until ``interval_s`` after ``since_s`` (time of the event loop), so that the next pull finds more slots."""
    rest_s = since_s + interval_s - asyncio.get_running_loop().time()
    if rest_s > 0.0:
        with session.timeline.busy(GATHER):
            await pause(rest_s)


async def run_stage(
    session: Session,
    stage: str,
    slots: int,
    work: Callable[[Batch], Awaitable[StageOutput]],
    interval_s: float = 0.0,
) -> None:
    """Pull batches of a stage and commit the output of ``work`` for each, until the stage's flows are exhausted.

    The next batch is pulled before the answer to the last commit arrives, which saves a round trip per batch.

    Args:
        session: the session of the worker.
        stage: the stage.
        slots: the most slots of a batch.
        work: computes the columns of a batch.
        interval_s: shortest time in seconds from the arrival of a batch to the next pull. Where samples become ready
            one by one, a few hundredths of a second save most round trips; work that takes longer is not delayed.

    Raises:
        FlowError: as `Session.pull` and `Session.commit`.

    Example:
        async def score(batch: Batch) -> StageOutput:
            return StageOutput(inline={"reward": [float(len(tokens)) for tokens in batch.tensors["response"]]})

        await run_stage(session, "reward", slots=64, work=score)
    """
    loop = asyncio.get_running_loop()
    committing: asyncio.Task[m.Committed] | None = None
    try:
        while batch := await session.pull(stage, slots):
            arrived_s = loop.time()
            output = await work(batch)
            if committing is not None:
                await committing
            committing = session.start_commit(stage, batch.slots, batch.leases, output.tensors, output.inline)
            if output.on_committed is not None:
                committing.add_done_callback(partial(_on_committed, output.on_committed))
            await delay_pull(session, arrived_s, interval_s)
        if committing is not None:
            await committing
    finally:
        if committing is not None:
            committing.add_done_callback(ignore_exception)
            await wait_all(
                [committing], BoundedElsewhere("its own deadline"), "the answer to the last commit", CONTROLLER
            )


def _on_committed(report: Callable[[Sequence[int]], None], committing: asyncio.Task[m.Committed]) -> None:
    if not committing.cancelled() and committing.exception() is None:
        report(committing.result().refused)


async def stream(session: Session, stage: str, slots: int, ahead: bool = True) -> AsyncGenerator[Batch, None]:
    """Iterate over batches of a stage without output columns; ends when the stage's flows are exhausted.

    A batch counts as done when the next one is requested. If that never happens (the loop was left, or the process
    died), its leases are released and its rows are granted again, to this or another consumer of the stage.

    Args:
        session: the session of the consumer.
        stage: the stage.
        slots: the most rows of a batch.
        ahead: lease and fetch the next batch while the caller works on the present one.

    Example:
        async for batch in stream(session, "consume", slots=64):
            print(batch.inline["reward"], batch.tensors["response"])
    """
    following = asyncio.create_task(session.pull(stage, slots))
    committing: asyncio.Task[m.Committed] | None = None
    batch: Batch | None = None
    done: Batch | None = None  # a completed batch, to be reported with the next pull
    try:
        while True:
            batch = await following
            if batch.closed:
                break
            if ahead:
                following = asyncio.create_task(session.pull(stage, slots, done=done))
            else:
                done = None
            yield batch
            done = worked = batch
            batch = None
            if not ahead:
                following = asyncio.create_task(session.pull(stage, slots, done=done))
            elif not following.done():
                # The next pull may be answered much later, and sources may wait until these rows are freed. The answer
                # to the commit is awaited one batch later.
                if committing is not None:
                    await committing
                committing = session.start_commit(stage, worked.slots, worked.leases)
                done = None
        batch = None
    finally:
        following.cancel()
        leftover = [batch] if batch is not None else []
        if following.done() and not following.cancelled() and following.exception() is None:
            leftover += [following.result()]
        for unused in leftover:
            session.give_back(stage, unused)
        ends: list[asyncio.Future[Any]] = [committing] if committing is not None else []
        ends += [asyncio.create_task(session.commit(stage, done.slots, done.leases))] if done is not None else []
        for end in ends:
            end.add_done_callback(ignore_exception)
        await wait_all(ends, BoundedElsewhere("their own deadlines"), "the answers to the last commits", CONTROLLER)


async def pull_between(session: Session, stage: str, slots: int, swap: Callable[[Snapshot], None]) -> Batch:
    """Like `Session.pull`, for a generating worker that is idle until the answer arrives.

    Slots may become ready only once this worker uses the weights that arrive while it waits, so a worker that takes
    weights only before it pulls could wait for ever.

    Args:
        session: the session of the worker.
        stage: the stage to work on.
        slots: the most slots to lease.
        swap: called with each version that arrives; must put it into use at once.

    Raises:
        FlowError: as `Session.pull`.
    """
    pull = asyncio.create_task(session.pull(stage, slots))
    try:
        while not pull.done():
            staged = asyncio.create_task(session.unless_ended(session.params.wait_staged()))
            await wait_any(
                {pull, staged}, BoundedElsewhere("the deadline of the pull"), "slots, or a newer version", CONTROLLER
            )
            if not staged.done():
                staged.cancel()
                continue
            arrived = staged.result()
            swap(arrived.snapshot)
            session.params.applied(arrived.model, arrived.snapshot.version)
        return pull.result()
    finally:
        pull.cancel()
