"""Logged delays of the event loop; peers of a blocked loop only miss its messages."""

import asyncio
import logging
import re
import time

import pytest

from flowrt.runtime.event_loop import CHECK_INTERVAL_S, MAX_DELAY_S, run_loop


async def block(seconds: float) -> int:
    await asyncio.sleep(CHECK_INTERVAL_S / 5)
    time.sleep(seconds)  # noqa: ASYNC251 (the mistake that is tested)
    await asyncio.sleep(2 * CHECK_INTERVAL_S)
    return 7


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "logged"), [(MAX_DELAY_S + CHECK_INTERVAL_S + 0.3, True), (0.1, False)])
def test_a_blocked_event_loop_is_logged_with_its_duration(
    caplog: pytest.LogCaptureFixture, seconds: float, logged: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run_loop(block(seconds)) == 7
    match = re.search(r"the event loop was blocked for ([\d.]+) s", caplog.text)
    assert (match is not None) == logged
    assert match is None or MAX_DELAY_S < float(match[1]) < seconds + 1.0
