"""The thread in which a worker computes on its model.

With more than one, a pass may begin in a thread whose heap has none of the memory that the passes before it have freed:
in the C library each thread keeps its own, and OpenMP starts its own team of threads for each.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ComputeThread:
    """Runs calls one after the other, all in one thread, which ends with this object."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compute")

    async def run(
        self, call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """As `asyncio.to_thread`, in this thread; a call that is cancelled goes on, and the next waits for its end."""
        work = partial(contextvars.copy_context().run, call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
