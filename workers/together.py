"""Where the ranks of a trainer wait for each other: with a deadline, and a name for whoever did not come."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from flowrt.errors import WaitExpired
from flowrt.waiting import Guard, until

Result = TypeVar("Result")
OTHERS = "the other ranks"
DEADLINE = Guard("trainer.ranks_s, which torch.distributed keeps")
MOST_WORDS = 200
KEPT = 16
"""Marks of a rank: in some calls it waits for nobody, so it may be a few ahead of one that is still waiting."""


class Together:
    """Calls that all ranks make in the same order, on a thread beside the loop; one rank alone just makes them.

    torch.distributed keeps the deadline, and says at best which connection was silent. So each rank leaves its mark in
    the store of the group before it waits: whose is missing has not come.
    """

    def __init__(self) -> None:
        self._store = _get_default_store() if dist.is_initialized() else None
        self._number = 0

    async def call(self, call: Callable[[], Result], what: str) -> Result:
        """Make it. Raises WaitExpired when another rank has not come in time, or has left."""
        self._number += 1
        return await self._waited_for(call, what, self._number)

    async def apart(self, call: Callable[[], Result], what: str) -> Result:
        """One that each rank makes as often as it has to, though others may be waited for within it."""
        return await self._waited_for(call, what, 0)

    async def _waited_for(self, call: Callable[[], Result], what: str, number: int) -> Result:
        begin_s = monotonic()
        try:
            return await until(asyncio.to_thread(self._marked, call, number), DEADLINE, what, OTHERS)
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            missing = await until(asyncio.to_thread(self._missing, number), DEADLINE, "marks of ranks", "torchrun")
            who = f"rank {', '.join(map(str, missing))} did not come" if missing else f"{error}"[:MOST_WORDS]
            raise WaitExpired(
                f"rank {dist.get_rank()} waited {monotonic() - begin_s:.0f} s for {what} with {OTHERS}: {who}"
            ) from error

    def _marked(self, call: Callable[[], Result], number: int) -> Result:
        if self._store is not None and number:
            self._store.set(_mark(number, dist.get_rank()), "here")
            self._store.delete_key(_mark(number - KEPT, dist.get_rank()))
        return call()

    def _missing(self, number: int) -> list[int]:
        """The ranks that have left no mark; none where that cannot be known."""
        if self._store is None or not number:
            return []
        try:
            return [rank for rank in range(dist.get_world_size()) if not self._store.check([_mark(number, rank)])]
        except RuntimeError:
            return []  # the store has gone with whoever had it


def _mark(number: int, rank: int) -> str:
    return f"flowrt/{number}/{rank}"
