"""Messages of the controller about evaluations: results (to trainers), and dropped groups (to sources)."""

import asyncio
from collections.abc import Iterable

from flowrt.protocol.messages import Evaluated, GroupsDropped
from flowrt.runtime.waits import CONTROLLER, BoundedElsewhere, wait_until

UNTIL_SESSION_END = BoundedElsewhere("the end of the session")


class EvaluationNews:
    """Results of evaluations in order of arrival, each once, and groups that were dropped."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], Evaluated] = {}
        self._taken = 0
        self._dropped: dict[int, str] = {}
        self._changed = asyncio.Event()

    def add(self, message: Evaluated | GroupsDropped) -> None:
        """Add a message of the controller; a repeated message changes nothing."""
        if isinstance(message, GroupsDropped):
            self._dropped.update(dict.fromkeys(message.groups, message.reason))
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
        while not (results := self.take()):
            self._changed.clear()
            await wait_until(self._changed.wait(), UNTIL_SESSION_END, "the results of an evaluation", CONTROLLER)
        return results

    def take_dropped(self, groups: Iterable[int]) -> dict[int, str]:
        """Those of these groups that were dropped, and why; they are forgotten."""
        return {group: reason for group in groups if (reason := self._dropped.pop(group, None)) is not None}
