"""When the threads of a worker's socket speak: often enough not to count as stopped, and not all at the same moment."""

import zmq

from flowrt.net.link import client_options, server_socket
from flowrt.net.liveness import HEARTBEAT_MS

CROWD = 1000


def test_workers_speak_at_times_of_their_own() -> None:
    intervals_ms = [client_options()[zmq.HEARTBEAT_IVL] for _ in range(CROWD)]
    assert max(intervals_ms) <= HEARTBEAT_MS
    assert max(intervals_ms) - min(intervals_ms) > HEARTBEAT_MS / 4
    assert max(intervals_ms.count(one) for one in set(intervals_ms)) < CROWD / 50


async def test_a_controller_asks_by_its_kernel_alone() -> None:
    """What ZeroMQ asked would go out to all who have joined together at the same moments, for good."""
    raw = server_socket()
    assert raw.socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert raw.socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    raw.close()
