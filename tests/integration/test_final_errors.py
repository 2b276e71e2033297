"""A worker that reports an error and exits at once: it is processed even if the disconnect is detected first."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from flowrt import api
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from tests.integration.test_sessions import FLOW, POLICIES

REASON = "EngineError: rank 1 cannot reach the store of the ranks"
DEADLINE_S = 120.0


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[tuple[api.Server, str]]:
    settings = api.Settings(steps=2, groups_per_step=1, completing_roles=("trainer",), critical_roles=("trainer",))
    async with api.controller(FLOW, settings, POLICIES, tmp_path) as running:
        yield running


def join_and_fail(address: str) -> None:
    """Join, then fail at once. On return all messages have been sent and the connection is closed."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 60_000)
        socket.setsockopt(zmq.RCVHWM, 0)  # as a worker: with unread answers the kernel would reset the connection
        socket.connect(address)
        socket.send(
            encode(m.Hello(protocol=m.PROTOCOL, worker="trainer", role="trainer", host="host", pid=1, lanes=("gloo",)))
        )
        assert socket.poll(int(1000 * DEADLINE_S))
        assert isinstance(decode(socket.recv()), m.Welcome)
        for number in range(300):  # more than are read in one event loop turn
            socket.send(encode(m.Pull(request=number, stage="reward", slots=1, tokens=0, step=-1)))
        socket.send(encode(m.Report((), (("eval_last", 0.5),), ())))
        socket.send(encode(m.Leave(REASON)))


async def test_final_error_of_a_worker_is_processed_before_its_disconnect(controller: tuple[api.Server, str]) -> None:
    server, address = controller
    connections = server._connections
    failing = threading.Thread(target=join_and_fail, args=(address,))
    failing.start()
    while WorkerId("trainer") not in connections:  # noqa: ASYNC110
        await asyncio.sleep(0)
    # The event loop of the controller is blocked here, while all messages arrive and the connection ends.
    failing.join(DEADLINE_S)
    assert not failing.is_alive()
    end_s = time.monotonic() + DEADLINE_S
    while not connections._disconnected:
        connections.send_now(WorkerId("trainer"), m.Heartbeat())
        assert time.monotonic() < end_s
    server._process_disconnects()
    async with asyncio.timeout(DEADLINE_S):
        while server.ended is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert REASON in server.ended.reason
    assert server.refused_messages == 0
    assert server.metrics.numbers == {"eval_last": 0.5}
    assert "trainer" not in connections
