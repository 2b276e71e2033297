"""A stage as a stream of batches: for consumers that add no columns; the next batch comes beside the present one."""

import asyncio
from collections.abc import AsyncIterator

from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.transport.lane import seen
from flowrt.waiting import CONTROLLER, Guard, all_of


async def stream(session: Session, stage: str, slots: int, ahead: bool = True) -> AsyncIterator[Batch]:
    """Batches of at most ``slots`` rows of a stage that makes nothing; ends when the stage's flows are exhausted.

    A batch is committed when the next one is asked for, and given back when it never is (the loop was left, or the
    process died): each row is then served again, to this or to another consumer of the stage. With ``ahead`` one
    more batch is leased and fetched while the present one is worked on.
    """
    following = asyncio.create_task(session.pull(stage, slots))
    committing: asyncio.Task[tuple[int, ...]] | None = None
    batch: Batch | None = None
    try:
        while True:
            batch = None
            batch = await following
            if batch.closed:
                break
            if ahead:
                following = asyncio.create_task(session.pull(stage, slots))
            yield batch
            # Its answer is awaited one batch later; the order of messages is kept, so the next pull comes after it.
            if committing is not None:
                await committing
            committing = asyncio.create_task(session.commit(stage, batch.slots, batch.leases))
            if not ahead:
                following = asyncio.create_task(session.pull(stage, slots))
        batch = None
    finally:
        following.cancel()
        leftover = [batch] if batch is not None else []
        if following.done() and not following.cancelled() and following.exception() is None:
            leftover += [following.result()]
        for one in leftover:
            session.give_back(stage, one)
        if committing is not None:
            await all_of([committing], Guard("its own deadline"), "the answer to the last commit", CONTROLLER)
            seen(committing)
