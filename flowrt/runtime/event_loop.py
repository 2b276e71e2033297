"""The event loop of flowrt's processes: uvloop where it can be imported, else asyncio's own."""

import asyncio
import gc
import logging
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

from flowrt.runtime.resource_limits import raise_descriptor_limit
from flowrt.runtime.waits import pause

log = logging.getLogger(__name__)
Result = TypeVar("Result")
CHECK_INTERVAL_S = 0.5
MAX_DELAY_S = 1.0
"""A timer that is later than this is logged: the loop was blocked."""
YOUNG_OBJECTS = 100_000
"""Number of new objects after which the cycle collector runs."""


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a new event loop, and return its result."""
    try:
        from uvloop import new_event_loop as make_loop
    except ImportError:
        make_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(_with_delay_check(work))


def serve_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """`run_loop` for a process that only serves many peers.

    Raises the limit of open sockets to the largest that the system permits. Lets the cycle collector run rarely:
    reference counts free the millions of small records, and each full collection would delay all peers.
    """
    raise_descriptor_limit()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 50, 1000)
    return run_loop(work)


async def _with_delay_check(work: Coroutine[Any, Any, Result]) -> Result:
    check = asyncio.create_task(_log_delays())
    try:
        return await work
    finally:
        check.cancel()


async def _log_delays() -> None:
    while True:
        begin_s = monotonic()
        await pause(CHECK_INTERVAL_S)
        delay_s = monotonic() - begin_s - CHECK_INTERVAL_S
        if delay_s > MAX_DELAY_S:
            log.warning(
                "the event loop was blocked for %.1f s: this process was stopped, or a callback did not return", delay_s
            )
