"""A stage as a stream of batches: for consumers that add no columns; the next batch comes beside the present one."""

import asyncio
from collections.abc import AsyncIterator

from flowrt.client.batches import Batch
from flowrt.client.session import Session
from flowrt.transport.settling import seen
from flowrt.waiting import CONTROLLER, Guard, all_of


async def stream(session: Session, stage: str, slots: int, ahead: bool = True) -> AsyncIterator[Batch]:
    """Batches of at most ``slots`` rows of a stage that makes nothing; ends when the stage's flows are exhausted.

    A batch is done when the next one is asked for, and given back when it never is (the loop was left, or the
    process died): each row is then served again, to this or to another consumer of the stage. With ``ahead`` one
    more batch is leased and fetched while the present one is worked on.
    """
    following = asyncio.create_task(session.pull(stage, slots))
    committing: asyncio.Task[tuple[int, ...]] | None = None
    batch: Batch | None = None
    done: Batch | None = None  # the work on it is complete, and the next pull says so
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
                # It may be long until the next pull, and the rows be waited for. Its answer is awaited a batch later.
                if committing is not None:
                    await committing
                committing, done = asyncio.create_task(session.commit(stage, worked.slots, worked.leases)), None
        batch = None
    finally:
        following.cancel()
        leftover = [batch] if batch is not None else []
        if following.done() and not following.cancelled() and following.exception() is None:
            leftover += [following.result()]
        for one in leftover:
            session.give_back(stage, one)
        ends = [asyncio.create_task(session.commit(stage, done.slots, done.leases))] if done is not None else []
        ends += [committing] if committing is not None else []
        for end in ends:
            end.add_done_callback(seen)
        await all_of(ends, Guard("their own deadlines"), "the answers to the last commits", CONTROLLER)
