"""Sessions over real sockets: admission, refusals, and tensors that move directly between workers."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import zmq

from flowrt import api
from flowrt.controller.events import AppendLedger
from flowrt.errors import EXIT_DISMISSED, LocalProtocolError, RemoteProtocolError, WaitExpired
from flowrt.protocol import codec
from flowrt.protocol import messages as m
from flowrt.protocol.codec import decode, encode
from flowrt.protocol.messages import MAX_SIGNAL_BYTES, unpack

COLUMNS = (api.Column("prompt", "int32", "group"), api.Column("response", "float32", "slot"))
STAGES = (
    api.Stage("rollout", needs=("prompt",), makes=("response",), generates=True),
    api.Stage("reward", needs=("response", "prompt"), makes=("reward",)),
    api.Stage("train", needs=("response", "reward"), makes=(), flow="train", whole_groups=True),
)
FLOW = api.Dataflow(COLUMNS, STAGES, "train", "train", token_columns=("response",))
POLICIES = api.Policies(api.StrictLag(1), api.Fifo(), api.TokenBudget(1), api.DelayedUpdate())
WITHIN_S = 60


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[tuple[api.Server, str]]:
    settings = api.Settings(steps=2, groups_per_step=1, completing_roles=("trainer",))
    async with api.controller(FLOW, settings, POLICIES, tmp_path, config="seed = 1") as running:
        yield running


class Stranger:
    """A bare DEALER socket that sends arbitrary bytes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    async def wait_disconnected(self) -> None:
        """Wait until the server has closed the connection."""
        assert await asyncio.to_thread(self._monitor.poll, 1000 * WITHIN_S), f"still connected after {WITHIN_S} s"
        self._monitor.recv_multipart()

    async def receive(self) -> m.Message:
        readable = await asyncio.to_thread(self._socket.poll, 1000 * WITHIN_S)
        assert readable, f"no answer within {WITHIN_S} s"
        return decode(self._socket.recv())

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


async def until(condition: "asyncio.Event", deadline_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(deadline_s):
        await condition.wait()


async def test_another_protocol_version_is_refused_with_both_version_numbers(
    controller: tuple[api.Server, str],
) -> None:
    client = Stranger(controller[1])
    client.send(
        encode(m.Hello(protocol=m.PROTOCOL + 1, worker="new", role="reward", host="host", pid=1, lanes=("gloo",)))
    )
    answer = await client.receive()
    client.close()
    assert isinstance(answer, m.Rejected)
    assert f"speaks protocol {m.PROTOCOL + 1}, the controller {m.PROTOCOL}" in answer.reason


async def test_only_a_source_receives_the_previous_position(controller: tuple[api.Server, str]) -> None:
    """The position of a large run is large, and only a source uses it."""
    server, address = controller
    server.ledger.add(AppendLedger(7, 0, "trained", 0), 1.0)
    positions = {}
    for role in ("source", "reward"):
        session = await api.connect(address, role, role, WITHIN_S)
        positions[role] = {epoch: set(of) for epoch, of in unpack(session.welcome.position.passed).items()}
        await session.close()
    assert positions == {"source": {0: {7}}, "reward": {}}


async def test_a_position_that_is_too_large_for_a_message_ends_the_run_with_a_sentence(
    controller: tuple[api.Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = controller
    for number in range(1000):
        server.ledger.add(AppendLedger(number << 40, 0, "trained", 0), 1.0)
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10_000)
    with pytest.raises(LocalProtocolError, match="cannot be told where the run continues"):
        await api.connect(address, "source", "source", WITHIN_S)
    assert server.ended is not None
    assert "Welcome has 1" in server.ended.reason


async def test_a_second_worker_of_the_same_name_is_refused(controller: tuple[api.Server, str]) -> None:
    first = await api.connect(controller[1], "reward", "reward", WITHIN_S)
    with pytest.raises(WaitExpired, match=r"a worker named reward is here already.*did not leave within 2 s"):
        await api.connect(controller[1], "reward", "reward", 2)
    await first.close()


async def test_a_worker_waits_until_the_worker_of_its_name_that_it_replaces_has_left(
    controller: tuple[api.Server, str],
) -> None:
    first = await api.connect(controller[1], "reward", "reward", WITHIN_S)
    second = asyncio.create_task(api.connect(controller[1], "reward", "reward", WITHIN_S))
    done, _ = await asyncio.wait([second], timeout=0.5)  # long enough to have been refused
    assert not done
    await first.close()
    await (await second).close()


async def test_missing_controller_is_reported_after_the_deadline() -> None:
    with pytest.raises(WaitExpired, match=r"waited 0 s for a controller at tcp://127\.0\.0\.1:9 and got no answer"):
        await api.connect("tcp://127.0.0.1:9", "reward", "reward", 0.3)


async def test_worker_may_start_before_its_controller(tmp_path: Path) -> None:
    settings = api.Settings(steps=2, groups_per_step=1, completing_roles=("trainer",))
    with socket.socket() as reserved:  # it does not listen, and no other process gets its port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        early = asyncio.create_task(api.connect(address, "reward", "reward", WITHIN_S))
        done, _ = await asyncio.wait([early], timeout=0.5)  # long enough to have been refused a few times
        assert not done
        async with api.controller(FLOW, settings, POLICIES, tmp_path, address):
            session = await early
            assert session.worker == "reward"
            await session.close()


async def test_an_oversized_rendezvous_key_disconnects_only_its_sender(controller: tuple[api.Server, str]) -> None:
    server, address = controller
    other, sender = await api.connect(address, "other", "reward", WITHIN_S), Stranger(address)
    sender.send(
        encode(m.Hello(protocol=m.PROTOCOL, worker="sender", role="reward", host="host", pid=1, lanes=("gloo",)))
    )
    assert isinstance(await sender.receive(), m.Welcome)
    sender.send(encode(m.RendezvousKey("other", "lane", "key", bytes(MAX_SIGNAL_BYTES + 1))))
    await sender.wait_disconnected()
    sender.close()
    assert server.refused_messages == 1
    assert server.ended is None
    assert set(server.status()["workers"]) == {"other"}
    await other.close()


async def test_malformed_messages_close_only_their_own_connection(controller: tuple[api.Server, str]) -> None:
    server, address = controller
    malformed = [(b"",), (b"\xc1",), (b"\xc1" + os.urandom(300),), (b"two", b"frames")]
    for frames in malformed:
        client = Stranger(address)
        client.send(*frames)
        await client.wait_disconnected()
        client.close()
    client = Stranger(address)
    for message in (
        m.Heartbeat(),
        m.StepCompleted(0, ()),
        m.Hello(protocol=m.PROTOCOL, worker="late", role="reward", host="host", pid=1, lanes=("gloo",)),
    ):
        client.send(encode(message))
    answers = [await client.receive() for _ in range(3)]
    assert [type(answer) for answer in answers] == [m.Stop, m.Stop, m.Welcome]  # readable messages are answered
    client.close()
    assert server.refused_messages == len(malformed) + 2
    assert server.ended is None
    worker = await api.connect(address, "reward", "reward", WITHIN_S)
    assert worker.welcome.config == "seed = 1"
    await worker.close()


async def test_a_worker_that_breaks_the_protocol_is_dismissed_by_name(controller: tuple[api.Server, str]) -> None:
    server, address = controller
    worker = await api.connect(address, "liar", "trainer", WITHIN_S)
    worker.step_done(0, {})
    with pytest.raises(api.Stopped, match="liar says StepCompleted, but has never pulled") as stopped:
        await worker.wait_stopped()
    assert stopped.value.code == EXIT_DISMISSED
    assert server.ended is None
    await worker.close()
    again = await api.connect(address, "liar", "trainer", WITHIN_S)  # the name is free again
    assert server.ended is None
    await again.close()


async def test_pull_of_an_unknown_stage_is_refused(controller: tuple[api.Server, str]) -> None:
    worker = await api.connect(controller[1], "reward", "reward", WITHIN_S)
    with pytest.raises(RemoteProtocolError, match="no stage 'rewards'"):
        await worker.pull("rewards", slots=1)
    await worker.close()


async def test_tensors_move_between_worker_stores_and_are_freed(controller: tuple[api.Server, str]) -> None:
    address = controller[1]
    source, rollout, reward, trainer = [await api.connect(address, n, n, WITHIN_S) for n in ("s", "o", "w", "trainer")]
    prompt = torch.arange(5, dtype=torch.int32)
    responses = [torch.rand(length) for length in (3, 0)]
    rollout.params.applied("policy", 0)
    assert await source.offer("train", 7, 0, 2, {"prompt": prompt}) == 0
    batch = await rollout.pull("rollout", slots=2)
    assert all(torch.equal(tensor, prompt) for tensor in batch.tensors["prompt"])
    spans = [(0, 3), (0, 0)]
    await rollout.commit("rollout", batch.slots, batch.leases, {"response": responses}, spans=spans)
    to_score = await reward.pull("reward", slots=8)
    assert all(torch.equal(a, b) for a, b in zip(to_score.tensors["response"], responses, strict=True))
    await reward.commit("reward", to_score.slots, to_score.leases, inline={"reward": [0.5, 1.0]})
    to_train = await trainer.pull("train", slots=0, step=0)
    assert to_train.inline["reward"] == [0.5, 1.0]
    assert all(torch.equal(a, b) for a, b in zip(to_train.tensors["response"], responses, strict=True))
    assert (await trainer.pull("train", slots=0, step=0)).closed
    trainer.step_done(0, {})
    # The answer to a later request follows the commands to free tensors, the trainer's also its report of the step.
    for session in (trainer, source, rollout, reward):
        with pytest.raises(RemoteProtocolError):
            await session.pull("nothing", slots=1)
        assert session.store.statistics() == (0, 0)
    for session in (source, rollout, reward, trainer):
        await session.close()


async def test_weights_are_staged_whole_and_old_versions_dropped(controller: tuple[api.Server, str]) -> None:
    trainer, rollout = [await api.connect(controller[1], name, name, WITHIN_S) for name in ("t", "o")]
    rollout.params.applied("policy", 0)
    with pytest.raises(RemoteProtocolError):  # an answer: the controller has received the report of version 0
        await rollout.pull("nothing", slots=1)
    for version in (1, 2):
        await trainer.params.publish("policy", api.Snapshot.take(version, {"w": torch.full((1000,), float(version))}))
        async with asyncio.timeout(WITHIN_S):
            staged = await rollout.params.wait_staged()
            while staged.snapshot.version < version:
                await asyncio.sleep(0)
                staged = await rollout.params.wait_staged()
        weights = {"w": torch.zeros(1000)}
        staged.snapshot.restore(weights)
        assert weights["w"].unique().tolist() == [version]
    for session in (trainer, rollout):
        with pytest.raises(RemoteProtocolError):
            await session.pull("nothing", slots=1)
        assert {version for _, version, _ in session.params._held} == {2}
        await session.close()


async def test_cancelled_wait_leaves_no_task(controller: tuple[api.Server, str]) -> None:
    session = await api.connect(controller[1], "o", "o", WITHIN_S)
    before = len(asyncio.all_tasks())
    for _ in range(5):
        waiting = asyncio.create_task(session.unless_ended(session.params.wait_staged()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before
    await session.close()
