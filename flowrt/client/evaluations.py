"""Messages of the controller about evaluations: results (to trainers), and lost versions (to sources)."""

import asyncio

from flowrt.protocol.messages import Evaluated, VersionLost
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, wait_until

UNTIL_SESSION_END = BoundedElsewhere("the end of the session")


class EvaluationNews:
    """Results of evaluations in order of arrival, each once, and versions that no worker has any more."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], Evaluated] = {}
        self._taken = 0
        self._lost: set[int] = set()
        self._changed = asyncio.Event()

    def add(self, message: Evaluated | VersionLost) -> None:
        """Add a message of the controller; a repeated message changes nothing."""
        if isinstance(message, VersionLost):
            self._lost.add(message.version)
        else:
            self._results.setdefault((message.name, message.version), message)
        self._changed.set()

    def take(self) -> list[Evaluated]:
        """The results that have arrived since the last call."""
        new = list(self._results.values())[self._taken :]
        self._taken += len(new)
        return new

    async def take_next(self) -> list[Evaluated]:
        """Wait until there are results that were not taken yet, and take them."""
        while not (found := self.take()):
            self._changed.clear()
            await wait_until(self._changed.wait(), UNTIL_SESSION_END, "the results of an evaluation", CONTROLLER)
        return found

    async def wait_lost(self, version: int) -> None:
        """Wait until no worker has this version any more."""
        while version not in self._lost:
            self._changed.clear()
            await wait_until(self._changed.wait(), UNTIL_SESSION_END, f"the loss of version {version}", CONTROLLER)
