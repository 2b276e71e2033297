"""Futures of transfers: how they get their result, and when nobody need look at it."""

import asyncio
from typing import Any

from flowrt.errors import TransferError


def settle(done: asyncio.Future[Any], result: Any, error: TransferError | None) -> None:
    """Give it its result, or the error, unless it has one."""
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def seen(done: asyncio.Future[Any]) -> None:
    """For transfers whose other end reports a failure: asyncio need not complain that nobody looked at this one."""
    if not done.cancelled():
        done.exception()
