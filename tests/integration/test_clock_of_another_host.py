"""A worker with another monotonic clock, as on another host: its spans are converted to the controller's clock."""

import asyncio
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from flowrt import api
from flowrt.controller.storage.timeline_file import read_timeline

pytestmark = pytest.mark.slow
OFFSET_S = 36_000
ROUNDED_S = 1e-4
"""More than the resolution of the times in the timeline, and than the drift of the clock during the run."""
FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
WORKER = """
import asyncio, sys
from time import monotonic
from flowrt.client.session import connect

async def main():
    session = await connect(sys.argv[1], "far", "bench", 60.0)
    while session._clock.offset_s is None:  # until a heartbeat was answered
        await asyncio.sleep(0.02)
    before_s = monotonic()
    with session.timeline.busy("work"):
        print(before_s, monotonic(), session._clock.error_s, flush=True)
        await asyncio.sleep(0.2)
    await session.close()

asyncio.run(main())
"""


def shifted_clock_prefix() -> list[str]:
    """The command prefix for a process whose monotonic clock is ahead; skips where the kernel does not allow it."""
    prefix = ["unshare", "--time", "--monotonic", str(OFFSET_S), "--fork"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=20.0)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no time namespaces here: {error}")
    return prefix


async def test_spans_are_converted_to_the_clock_of_the_controller(tmp_path: Path) -> None:
    prefix = shifted_clock_prefix()
    (tmp_path / "run").mkdir()
    async with api.controller(FLOW, api.Settings(), POLICIES, tmp_path / "run") as (server, address):
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-c", WORKER, address), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(120.0):
            before_s, after_s, error_s = map(float, (await process.stdout.readline()).split())
            assert before_s - monotonic() > OFFSET_S / 2, "the worker has the same clock"
            assert await process.wait() == 0
        origin_s = server.metrics.start_s
    (span,) = [line for line in read_timeline(tmp_path / "run") if line.get("kind") == "work"]
    began_s = span["start_s"] + origin_s + OFFSET_S
    assert before_s - error_s - ROUNDED_S <= began_s <= after_s + error_s + ROUNDED_S
