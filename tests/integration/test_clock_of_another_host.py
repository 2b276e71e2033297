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
OFFSET_S = 37
MAX_ERROR_S = 0.1
"""Half of a round trip between processes on a loaded machine."""
FLOW = api.Dataflow((api.Column("data", "int32", "group"),), (api.Stage("read", ("data",), ()),))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.GroupCount(1), api.DelayedUpdate())
WORKER = """
import asyncio, sys
from time import monotonic
from flowrt.client.session import connect

async def main():
    session = await connect(sys.argv[1], "far", "bench", 60.0)
    await asyncio.sleep(2.5)  # several heartbeats
    with session.timeline.busy("work"):
        print(monotonic(), flush=True)
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
            began_s = float(await process.stdout.readline()) - OFFSET_S
            assert abs(began_s - monotonic()) < 30.0, "the worker has another clock"
            assert await process.wait() == 0
        origin_s = server.metrics.start_s
    (span,) = [line for line in read_timeline(tmp_path / "run") if line.get("kind") == "work"]
    assert span["start_s"] + origin_s == pytest.approx(began_s, abs=MAX_ERROR_S)
