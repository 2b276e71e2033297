"""An accepted worker floods a live controller: other workers are served, and memory stays bounded."""

import json
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from flowrt import api
from flowrt.launcher.observer import fetch_status
from flowrt.net.connection_filter import MAX_UNDELIVERED_BYTES
from tests.integration.helpers import flooder as flooding
from tests.integration.helpers import small_controller
from tests.integration.helpers.flooder import KINDS

FLOOD_S, DEADLINE_S = 2.5, 120.0
STATUS_BYTES = 500_000
GROWTH_BYTES = 4 * MAX_UNDELIVERED_BYTES
"""Undelivered bytes are held again while they are decoded, and not all memory is returned to the system."""


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, str]]:
    command = [
        sys.executable,
        small_controller.__file__,
        str(tmp_path_factory.mktemp("run")),
        "tcp://127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), process.stdout.readline().strip()
        finally:
            process.kill()


def flood(address: str, kind: str) -> "subprocess.Popen[str]":
    command = [sys.executable, flooding.__file__, address, kind, str(FLOOD_S)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_other_workers_are_served_and_memory_stays_bounded(
    controller: tuple[psutil.Process, str], kind: str
) -> None:
    process, address = controller
    other = await api.connect(address, f"calm {kind}", "reward", 20.0)
    before = process.memory_info().rss
    answers, growth = 0, 0
    with flood(address, kind) as flooder:
        assert flooder.stdout is not None
        try:
            assert flooder.stdout.readline() == "joined\n"
            while flooder.poll() is None:
                assert "workers" in await fetch_status(address, None, DEADLINE_S, address)
                answers += flooder.poll() is None
                growth = max(growth, process.memory_info().rss - before)
            sent = int(flooder.stdout.read())
        finally:
            flooder.kill()
    assert sent > 5
    assert answers > 0
    assert growth < GROWTH_BYTES
    assert process.is_running()
    status = await fetch_status(address, None, 10.0, address)
    assert len(json.dumps(status)) < STATUS_BYTES
    await other.close()
