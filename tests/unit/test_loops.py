"""A loop that something holds says so: whoever waits for this process would only see it silent."""

import asyncio
import logging
import re
import time

import pytest

from flowrt.wire.loops import LATE_S, LOOK_S, run_loop


async def hold(seconds: float) -> int:
    await asyncio.sleep(LOOK_S / 5)
    time.sleep(seconds)  # noqa: ASYNC251 (what must never be done)
    await asyncio.sleep(2 * LOOK_S)
    return 7


@pytest.mark.parametrize(("seconds", "told"), [(LATE_S + LOOK_S + 0.3, True), (0.1, False)])
def test_a_loop_that_was_held_says_for_how_long(caplog: pytest.LogCaptureFixture, seconds: float, told: bool) -> None:
    with caplog.at_level(logging.WARNING):
        assert run_loop(hold(seconds)) == 7
    found = re.search(r"nobody was answered for ([\d.]+) s", caplog.text)
    assert (found is not None) == told
    assert found is None or LATE_S < float(found[1]) < seconds + 1.0
