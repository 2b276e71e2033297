"""A worker that was let in floods a live controller: the others are served, and nothing piles up."""

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter

import psutil
import pytest

from flowrt import api
from flowrt.errors import WaitExpired
from flowrt.launcher.observer import fetch_status
from flowrt.net.connection_guard import MAX_UNDELIVERED_BYTES
from tests.integration.helpers import flooder as flooding
from tests.integration.helpers import small_controller
from tests.integration.helpers.flooder import KINDS

FLOOD_S, PULL_S = 2.0, 0.01
STATUS_BYTES = 500_000
MEDIAN_S, LONGEST_S, GROWN_BYTES = 0.25, 2.0, 4 * MAX_UNDELIVERED_BYTES
"""Of a machine that others use too; a quiet one answers in a millisecond, and in ten at most.

So much may be behind, not read yet; it is held once more while it is decoded, and not all of it is given back.
"""


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
    calm = await api.connect(address, f"calm {kind}", "reward", 20.0)
    before = process.memory_info().rss
    trips_s, grown = [], 0
    with flood(address, kind) as flooder:
        assert flooder.stdout is not None
        try:
            assert flooder.stdout.readline() == "in\n"
            while flooder.poll() is None:
                begin_s = perf_counter()
                with pytest.raises(WaitExpired):  # there is nothing to score: the controller says so when asked
                    await calm.pull("reward", slots=1, deadline_s=PULL_S)
                trips_s.append(perf_counter() - begin_s - PULL_S)
                grown = max(grown, process.memory_info().rss - before)
            said = int(flooder.stdout.read())
        finally:
            flooder.kill()
    assert said > 5
    assert median(trips_s) < MEDIAN_S
    assert max(trips_s) < LONGEST_S
    assert grown < GROWN_BYTES
    assert process.is_running()
    seen = await fetch_status(address, None, 10.0, address)
    assert len(json.dumps(seen)) < STATUS_BYTES
    await calm.close()
