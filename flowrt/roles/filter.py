"""The user's filter function, called in the reward worker, as the user's reward functions are."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import groupby
from operator import itemgetter
from typing import Any

from flowrt.client.sample_tensors import Batch
from flowrt.client.session import Session
from flowrt.controller.policies.group_filter import DECISION, REFUSED
from flowrt.errors import Drained
from flowrt.ids import UNSCORED
from flowrt.recipes.config import RunConfig
from flowrt.recipes.filter_function import FilterFunction, GroupFacts

MAX_PULL_SLOTS = 256
Role = Callable[[Session, RunConfig], Coroutine[Any, Any, None]]


def with_filter(role: Role) -> Role:
    """A role that also decides on groups, if the run has a filter function."""

    async def both(session: Session, config: RunConfig) -> None:
        if not config.algorithm.filter.function:
            await role(session, config)
            return
        drained: list[Drained] = []

        async def until_drained(run_role: Role) -> None:
            try:
                await run_role(session, config)
            except Drained as left:
                drained.append(left)

        # In a drained worker the next pull of either loop raises Drained. The other loop then still commits what it has
        # leased, because the controller waits for that.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(until_drained(role))
            tasks.create_task(until_drained(run))
        if drained:
            raise drained[0]

    return both


async def run(session: Session, config: RunConfig) -> None:
    """Decide on complete groups until the run ends; commits ``filter_decision`` (one float per slot).

    Each group is committed when it is decided, so that a slow call does not delay the groups before it.
    """
    function = FilterFunction(config.algorithm.filter)
    try:
        while True:
            batch = await session.pull("filter", slots=MAX_PULL_SLOTS)
            for _, rows in groupby(enumerate(batch.groups), itemgetter(1)):
                await _decide(session, function, batch, [row for row, _ in rows])
    finally:
        await function.close()


async def _decide(session: Session, function: FilterFunction, batch: Batch, rows: list[int]) -> None:
    unscored = batch.inline.get(UNSCORED) or [0.0] * len(batch)
    scored = [row for row in rows if not unscored[row]]
    rewards = [batch.inline["reward"][row] for row in scored]
    facts = GroupFacts(
        prompt=batch.grant.prompts[rows[0]],
        epoch=batch.grant.epochs[rows[0]],
        lengths=[sum(batch.grant.spans[row][1::2]) for row in scored],
        version=min(batch.oldest_version(row) for row in rows),
    )
    with session.timeline.busy("filter"), session.progress.expected(function.longest_call_s):
        decision = await function.decide(rewards, facts) if scored else REFUSED
    slots, leases = [batch.slots[row] for row in rows], [batch.leases[row] for row in rows]
    await session.commit("filter", slots, leases, inline={DECISION: [decision] * len(rows)})
