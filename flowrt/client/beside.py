"""What goes on beside a worker's role: where it fails, the worker has failed, and whoever waits for it hears why."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from flowrt.errors import MISTAKES, FlowError
from flowrt.waiting import cancelled
from flowrt.wire.messages import Message

log = logging.getLogger(__name__)


class Beside:
    """Tasks and orders; ``end`` is called with the first that failed."""

    def __init__(self, end: Callable[[FlowError], None]) -> None:
        self._end = end
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def guarded(self, obey: Callable[[Message], None]) -> Callable[[Message], None]:
        """``obey``, of whose mistakes nobody else would hear."""

        def heard(message: Message) -> None:
            try:
                obey(message)
            except MISTAKES as error:
                self._failed(error)

        return heard

    async def close(self, deadline_s: float) -> None:
        await cancelled(self._tasks, deadline_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        log.error("what goes on beside the role has failed", exc_info=error)
        words = error if isinstance(error, FlowError) else FlowError(f"this worker has failed: {error!r}; see its log")
        self._end(words)
