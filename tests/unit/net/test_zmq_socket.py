"""Heartbeats of ZeroMQ sockets: within the liveness interval, and not synchronised between workers."""

import zmq

from flowrt.net.link import client_options, server_socket
from flowrt.net.liveness import HEARTBEAT_MS

WORKERS = 1000


def test_heartbeat_intervals_differ_between_workers() -> None:
    intervals_ms = [client_options()[zmq.HEARTBEAT_IVL] for _ in range(WORKERS)]
    assert max(intervals_ms) <= HEARTBEAT_MS
    assert max(intervals_ms) - min(intervals_ms) > HEARTBEAT_MS / 4
    assert max(intervals_ms.count(interval_ms) for interval_ms in set(intervals_ms)) < WORKERS / 50


async def test_a_controller_uses_tcp_keepalive_no_zmq_heartbeat_and_a_short_handshake() -> None:
    """ZeroMQ heartbeats to workers that joined together would stay synchronised."""
    raw = server_socket()
    assert raw.socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert raw.socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    assert raw.socket.getsockopt(zmq.HANDSHAKE_IVL) == 5000  # ZeroMQ's own is 30 s
    raw.close()
