"""Processes that die are started again under their names, a few times; then the run ends with their own last words."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from flowrt.launch.processes import Child, Children

from flowrt.recipes.config import SupervisorConfig
from flowrt.waiting import Guard, pause

RUN = Guard("the end of the run")


class Supervisor:
    """Watches over what can be replaced; ``say`` is told of each new start."""

    def __init__(self, children: Children, config: SupervisorConfig, say: Callable[[str], None]) -> None:
        self._children = children
        self._config = config
        self._say = say
        self._starts: dict[str, deque[float]] = defaultdict(deque)

    async def keep(self, child: Child, words: Sequence[str]) -> Child:
        """Start this one anew whenever it fails; returns when it left of itself, or failed too often."""
        while await child.ended(RUN) != 0 and await self.is_due(child):
            child = await self._children.start(child.name, words)
        return child

    async def is_due(self, child: Child) -> bool:
        """Whether what has died is to be started again: True once it is time, False when that was done too often."""
        starts, now = self._starts[child.name], time.monotonic()
        while starts and now - starts[0] > self._config.window_s:
            starts.popleft()
        if len(starts) >= self._config.restarts:
            return False
        # Twice as long each time: what cannot come up must not take the machine from those that are at work.
        wait_s = self._config.backoff_s * 2 ** len(starts)
        starts.append(now)
        self._say(f"{child.how()}: it is started again in {wait_s:.1f} s")
        await pause(wait_s)
        return True
