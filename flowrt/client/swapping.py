"""Pulling between sequences: a worker that has nothing running takes new weights while it waits for slots."""

import asyncio
from collections.abc import Callable

from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.transport.weights import Snapshot
from flowrt.waiting import CONTROLLER, Guard, first_of


async def pull_between(session: Session, stage: str, slots: int, swap: Callable[[Snapshot], None]) -> Batch:
    """Like `Session.pull`, for a generating worker that is idle until the answer comes.

    Slots may be waiting for exactly the weights that have just arrived here, so whoever only looks for weights before
    it pulls can wait for ever. ``swap`` is called with each version that arrives; it must put it into use at once.
    """
    pull = asyncio.create_task(session.pull(stage, slots))
    try:
        while not pull.done():
            staged = asyncio.create_task(session.unless_ended(session.params.wait_staged()))
            await first_of({pull, staged}, Guard("the deadline of the pull"), "slots, or a newer version", CONTROLLER)
            if not staged.done():
                staged.cancel()
                continue
            arrived = staged.result()
            swap(arrived.snapshot)
            session.params.applied(arrived.model, arrived.snapshot.version)
        return pull.result()
    finally:
        pull.cancel()
