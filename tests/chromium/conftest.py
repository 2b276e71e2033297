"""A real Chromium for each test; skipped where none is installed."""

from collections.abc import AsyncIterator

import pytest
from common.chromium import PROGRAMS, Browser, Tab, program, running


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if program() is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed")
    async with running() as started:
        yield started


@pytest.fixture
async def tab(browser: Browser) -> Tab:
    tab = await browser.tab()
    await tab.emulate(width=1440, height=900)
    return tab
