"""The stage loop: it pulls before its commit is answered, ends with its stream, and raises rejections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq

from flowrt import api
from flowrt.client.requests import RequestTable
from flowrt.client.session import Session
from flowrt.errors import RemoteProtocolError, Stopped
from flowrt.ids import GATHER
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode

DEADLINE_S = 20.0
WELCOME = m.Welcome(
    term=1,
    heartbeat_s=60.0,
    request_timeout_s=DEADLINE_S,
    reconnect_timeout_s=1.0,
    transfer_idle_timeout_s=1.0,
    min_transfer_mb_per_s=0.0,
    store_bytes=0,
    columns=(),
    renewable=(),
    config="",
    position=m.Position(),
)


class ScriptedController:
    """A controller whose messages are received and sent by the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peer = b""

    async def receive(self) -> m.Message:
        """The next message other than heartbeats and reports."""
        while True:
            readable = await asyncio.to_thread(self._socket.poll, int(1000 * DEADLINE_S))
            assert readable, f"no message within {DEADLINE_S:.0f} s"
            self._peer, data = self._socket.recv_multipart()
            message = decode(data)
            if not isinstance(message, m.Heartbeat | m.Report):
                return message

    def send(self, message: m.Message) -> None:
        self._socket.send_multipart([self._peer, encode(message)])

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[ScriptedController, Session]]:
    controller = ScriptedController()
    with contextlib.closing(controller):
        joining = asyncio.create_task(api.connect(controller.address, "reward", "reward", DEADLINE_S))
        assert isinstance(await controller.receive(), m.Hello)
        controller.send(WELCOME)
        session = await joining
        yield controller, session
        await session.close()


def grant(pull: m.Message, *slots: int) -> m.Grant:
    """The answer to a pull; without slots, the end of the stream."""
    assert isinstance(pull, m.Pull)
    zeros = (0,) * len(slots)
    return m.Grant(
        request=pull.request,
        lease=1,
        slots=slots,
        flows=("train",),
        groups=zeros,
        members=zeros,
        prompts=zeros,
        epochs=zeros,
        attempts=zeros,
        spans=((),) * len(slots),
        inline=(),
        parts=(),
        incoming=(),
        closed=not slots,
    )


async def score(batch: api.Batch) -> api.StageOutput:
    return api.StageOutput(inline={"reward": [float(slot) for slot in batch.slots]})


def checked_commit(message: m.Message, *slots: int) -> m.Commit:
    assert isinstance(message, m.Commit)
    assert message.slots == slots
    assert message.inline == (m.Values("reward", tuple(map(float, slots))),)
    return message


async def test_the_next_pull_does_not_wait_for_the_commit_answer(scripted: tuple[ScriptedController, Session]) -> None:
    controller, session = scripted
    working = asyncio.create_task(api.run_stage(session, "reward", 8, score))
    controller.send(grant(await controller.receive(), 3, 4))
    first = checked_commit(await controller.receive(), 3, 4)
    following = await controller.receive()  # the commit has no answer yet
    controller.send(m.Committed(first.request, (), ""))
    controller.send(grant(following, 5))
    second = checked_commit(await controller.receive(), 5)
    controller.send(grant(await controller.receive()))  # no more slots: the last commit is answered after that
    assert not working.done()
    controller.send(m.Committed(second.request, (), ""))
    await asyncio.wait_for(working, DEADLINE_S)


async def test_pulls_are_at_least_the_interval_apart(scripted: tuple[ScriptedController, Session]) -> None:
    controller, session = scripted
    session.timeline.drain()
    working = asyncio.create_task(api.run_stage(session, "reward", 8, score, interval_s=0.5))
    first = await controller.receive()
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    controller.send(grant(first, 3))
    checked_commit(await controller.receive(), 3)
    following = await controller.receive()
    assert loop.time() - sent_s >= 0.5
    [waited] = [span for span in session.timeline.drain() if span.kind == GATHER]
    assert waited.end_s > waited.start_s
    controller.send(grant(following))
    working.cancel()


async def test_work_that_takes_longer_than_the_interval_is_not_delayed(
    scripted: tuple[ScriptedController, Session],
) -> None:
    controller, session = scripted

    async def slow(batch: api.Batch) -> api.StageOutput:
        await asyncio.sleep(0.05)  # the work
        return await score(batch)

    working = asyncio.create_task(api.run_stage(session, "reward", 8, slow, interval_s=0.02))
    controller.send(grant(await controller.receive(), 3))
    checked_commit(await controller.receive(), 3)
    await controller.receive()
    assert not [span for span in session.timeline.drain() if span.kind == GATHER]
    working.cancel()


async def test_a_rejected_commit_ends_the_loop(scripted: tuple[ScriptedController, Session]) -> None:
    controller, session = scripted
    working = asyncio.create_task(api.run_stage(session, "reward", 8, score))
    controller.send(grant(await controller.receive(), 3))
    commit = checked_commit(await controller.receive(), 3)
    following = await controller.receive()
    controller.send(m.Rejected(commit.request, "column 'reward' is none of this stage"))
    controller.send(grant(following, 4))
    with pytest.raises(RemoteProtocolError, match="none of this stage"):
        await asyncio.wait_for(working, DEADLINE_S)


async def test_the_end_of_the_run_ends_a_loop_with_an_open_commit(
    scripted: tuple[ScriptedController, Session], caplog: pytest.LogCaptureFixture
) -> None:
    controller, session = scripted
    working = asyncio.create_task(api.run_stage(session, "reward", 8, score))
    controller.send(grant(await controller.receive(), 3))
    checked_commit(await controller.receive(), 3)
    await controller.receive()
    controller.send(m.Stop("the run is complete", 0))
    with pytest.raises(Stopped, match="complete"):
        await asyncio.wait_for(working, DEADLINE_S)
    assert "never retrieved" not in caplog.text


async def test_a_request_cancelled_before_it_runs_is_not_pending() -> None:
    sent: list[m.Message] = []
    table = RequestTable("reward", sent.append, lambda _: None, lambda _: None)
    commit = m.Commit(table.number(), "reward", (1,), (1,), (), (), ())
    answer = table.start(commit, m.Committed, DEADLINE_S)
    assert sent == [commit], "sent at once"
    assert table.get(commit.request) is commit
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert table.get(commit.request) is None
    table.end(Stopped("over", 0))
    with pytest.raises(Stopped):
        table.start(commit, m.Committed, DEADLINE_S)
