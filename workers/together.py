"""Where the ranks of a trainer wait for each other: with a deadline, and a name for whoever did not come."""

import asyncio
import contextlib
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import torch.distributed as dist

from flowrt.engines.roll_call import OTHERS, RollCall
from flowrt.errors import WaitExpired
from flowrt.waiting import Guard, until

Result = TypeVar("Result")
DEADLINE = Guard("trainer.ranks_s, which torch.distributed keeps")
MOST_WORDS = 200


class Together:
    """Calls that all ranks make in the same order, on a thread beside the loop; one rank alone just makes them.

    Within a call torch.distributed keeps the deadline, and says at best which connection was silent. So the ranks wait
    for each other before it: that says who did not come, and lets those come late who are excused.
    """

    def __init__(self) -> None:
        self._roll = RollCall("calls")

    async def call(self, call: Callable[[], Result], what: str) -> Result:
        """Make it when all are there. Raises WaitExpired when another rank has not come in time, or has left."""

        def met() -> Result:
            self._roll.here(what)
            return call()

        return await self._waited_for(met, what)

    async def apart(self, call: Callable[[], Result], what: str) -> Result:
        """One that each rank makes when and as often as it has to, though others may be waited for within it."""
        return await self._waited_for(call, what)

    def excused(self) -> contextlib.AbstractContextManager[None]:
        """``with ranks.excused():`` around what this rank is at alone, and what may take longer than ranks wait."""
        return self._roll.excused()

    async def _waited_for(self, call: Callable[[], Result], what: str) -> Result:
        begin_s = monotonic()
        try:
            return await until(asyncio.to_thread(call), DEADLINE, what, OTHERS)
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            silent = await until(asyncio.to_thread(self._roll.silent), DEADLINE, "signs of life", OTHERS)
            words = f"rank {', '.join(map(str, silent))} gives no sign" if silent else f"{error}"[:MOST_WORDS]
            raise WaitExpired(
                f"rank {dist.get_rank()} waited {monotonic() - begin_s:.0f} s for {what} with {OTHERS}: {words}"
            ) from error
