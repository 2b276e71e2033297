"""The event loop that flowrt runs on: uvloop where it can be imported, else asyncio's own."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on a fresh loop."""
    try:
        from uvloop import new_event_loop as make_loop
    except ImportError:
        make_loop = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(work)
