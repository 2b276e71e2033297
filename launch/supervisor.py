"""Workers that die are started again under their names, a few times; then the run ends with their own last words."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from flowrt.launch.processes import Child, Children

from flowrt.recipes.config import SupervisorConfig


class Supervisor:
    """Watches over the workers that can be replaced; ``say`` is told of each new start."""

    def __init__(self, children: Children, config: SupervisorConfig, say: Callable[[str], None]) -> None:
        self._children = children
        self._config = config
        self._say = say

    async def keep(self, child: Child, arguments: Sequence[str]) -> Child:
        """Start this one anew whenever it fails; returns when it left of itself, or failed too often."""
        restarts: deque[float] = deque()
        while True:
            code = await child.process.wait()
            now = time.monotonic()
            while restarts and now - restarts[0] > self._config.window_s:
                restarts.popleft()
            if code == 0 or len(restarts) >= self._config.restarts:
                return child
            # Twice as long each time: what cannot come up must not take the machine from those that are at work.
            wait_s = self._config.backoff_s * 2 ** len(restarts)
            restarts.append(now)
            self._say(f"{child.how()}: it is started again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)
            child = await self._children.start(child.name, arguments)
