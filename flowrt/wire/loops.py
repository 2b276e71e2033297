"""The event loop that flowrt runs on: uvloop where it can be imported, else asyncio's own."""

import asyncio
import gc
import logging
import resource
from collections.abc import Coroutine
from time import monotonic
from typing import Any, TypeVar

from flowrt.waiting import pause

log = logging.getLogger(__name__)
Result = TypeVar("Result")
LOOK_S = 0.5
LATE_S = 1.0
"""A loop that comes back to what is due so much too late has kept everybody waiting, and says so."""
YOUNG = 100_000
"""New objects after which the collector looks at them."""


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on a fresh loop."""
    try:
        from uvloop import new_event_loop as make_loop
    except ImportError:
        make_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(_watched(work))


def serve_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Like `run_loop`, for a process that does nothing but serve many peers.

    It may open as many sockets as the system lets it, and its millions of small records are not walked by the cycle
    collector time and again: they are freed by reference counts, and each full walk would hold up everybody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 50, 1000)
    return run_loop(work)


async def _watched(work: Coroutine[Any, Any, Result]) -> Result:
    watch = asyncio.create_task(_watch())
    try:
        return await work
    finally:
        watch.cancel()


async def _watch() -> None:
    while True:
        before_s = monotonic()
        await pause(LOOK_S)
        late_s = monotonic() - before_s - LOOK_S
        if late_s > LATE_S:
            log.warning("nobody was answered for %.1f s: this process was stopped, or something held its loop", late_s)
