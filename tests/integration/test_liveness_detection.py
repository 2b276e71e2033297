"""A stopped process is detected, and a live process that sends nothing is not disconnected."""

import asyncio
import contextlib
import signal
import sys
import time

from flowrt.net.link import ServerLink
from flowrt.protocol import messages as m

TICK_S = 0.1
PEER = """
import asyncio, sys
from flowrt.protocol import messages as m
from flowrt.net.link import ClientLink
async def main():
    link = ClientLink(lambda message: None, lambda error: None)
    link.connect(sys.argv[1])
    link.send(m.Heartbeat())
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_stopped_process_is_distinguished_from_a_silent_one() -> None:
    connected: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    left = asyncio.Event()
    link = ServerLink(lambda peer, message: connected.set_result(peer), lambda peer, reason: None, left.set)
    address = link.bind("tcp://127.0.0.1:0")
    peer = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, address)
    try:
        async with asyncio.timeout(60):
            name = await connected
        await poll_liveness(link, left, 7.0)  # it has sent one message, and is alive
        assert not left.is_set()
        assert link.send(name, m.Heartbeat())
        peer.send_signal(signal.SIGSTOP)
        await poll_liveness(link, left, 120.0)
        assert left.is_set()
    finally:
        peer.kill()
        await asyncio.wait_for(peer.wait(), 20)
        link.close()


async def poll_liveness(link: ServerLink, left: asyncio.Event, at_most_s: float) -> None:
    """Check for stopped peers as the controller does, until a peer has left or the time is over."""
    end_s = time.monotonic() + at_most_s
    while not left.is_set() and time.monotonic() < end_s:
        link.filter.close_stopped()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(left.wait(), TICK_S)
