"""Background work of a session that fails: the session ends with the error, or the failure is reported."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import torch

from flowrt.client.session import Session
from flowrt.client.weights import WeightTransfers
from flowrt.controller.events import EndRun, Tick
from flowrt.errors import EXIT_STALLED, FlowError, RemoteProtocolError
from flowrt.protocol.messages import (
    NO_BASE,
    EvictVersion,
    FetchFailed,
    Heartbeat,
    LaneTurn,
    Message,
    Position,
    Publish,
    ReceiveWeights,
    Weights,
    Welcome,
)
from flowrt.transport.lanes.lane import LaneSet
from flowrt.transport.weights.snapshot import Snapshot
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL

WAIT_S = 20.0


class InstantLanes:
    """Lanes over which every transfer arrives at once."""

    def receive_each(self, _: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        for tensor in tensors:
            tensor.fill_(7)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class ScriptedConnection:
    """A connection that delivers these messages and no others."""

    address = "tcp://127.0.0.1:1"
    is_away = False

    def __init__(self, *messages: Message) -> None:
        self.welcome = Welcome(
            term=1,
            heartbeat_s=WAIT_S,
            request_timeout_s=WAIT_S,
            reconnect_timeout_s=WAIT_S,
            transfer_idle_timeout_s=WAIT_S,
            min_transfer_mb_per_s=0.0,
            store_bytes=0,
            columns=(),
            renewable=(),
            config="",
            position=Position(),
        )
        self._messages = list(messages)

    def __aiter__(self) -> "ScriptedConnection":
        return self

    async def __anext__(self) -> Message:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    def handle_directly(self, _: Callable[[Message], None]) -> None:
        pass

    async def heartbeat(self, _: Heartbeat) -> None:
        await asyncio.Event().wait()

    def send(self, _: Message) -> None:
        pass

    def spin_wait(self, _: float) -> None:
        pass

    def stop_reconnecting(self) -> None:
        pass

    def close(self) -> None:
        pass


def session_over(*messages: Message) -> Session:
    return Session("worker", ScriptedConnection(*messages))  # type: ignore[arg-type]


async def test_a_background_task_that_fails_ends_the_session_with_its_error() -> None:
    async def fail() -> None:
        raise KeyError("bucket 3")

    session = session_over()
    session._spawn(fail())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(FlowError, match=r"this worker failed: KeyError\('bucket 3'\)"):
            await session.wait_stopped()
    await session.close()


async def test_a_command_that_fails_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't allocate memory: 9 GB")

    monkeypatch.setattr(WeightTransfers, "evict", fail)
    session = session_over(EvictVersion("policy", 1))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(FlowError, match="can't allocate memory: 9 GB"):
            await session.wait_stopped()
    await session.close()


async def test_a_message_that_only_workers_send_ends_the_session() -> None:
    session = session_over(Publish((), ()))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(RemoteProtocolError, match="the controller sent Publish, which only workers send"):
            await session.wait_stopped()
    await session.close()


class Tasks:
    """Background tasks that must not fail."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()


async def test_a_trainer_gets_the_error_of_a_publication_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("no sum")

    tasks = Tasks()
    params = WeightTransfers(LaneSet("trainer", {}, 1.0, lambda *_: None), lambda _: None, tasks.spawn, 1.0)
    monkeypatch.setattr(Snapshot, "checksum", fail)
    async with asyncio.timeout(WAIT_S):
        await params.publish_in_background("policy", Snapshot.take(1, {"w": torch.zeros(10)}))
        with pytest.raises(RuntimeError, match="no sum"):
            await params.wait_published()


async def test_a_delta_that_cannot_be_applied_is_reported_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> Snapshot:
        raise RuntimeError("changes beyond the end")

    sent: list[Message] = []
    is_sent = asyncio.Event()

    def send(message: Message) -> None:
        sent.append(message)
        is_sent.set()

    tasks = Tasks()
    params = WeightTransfers(InstantLanes(), send, tasks.spawn, WAIT_S)  # type: ignore[arg-type]
    monkeypatch.setattr(WeightTransfers, "_apply_delta", fail)
    params.receive(
        ReceiveWeights(
            LaneTurn(sender="trainer", receiver="rollout0", kind="weights", incarnation=0, sequence=0, transport="shm"),
            Weights(model="policy", version=2, base=1, bucket_bytes=(100,), checksum=5),
        )
    )
    async with asyncio.timeout(WAIT_S):
        await is_sent.wait()
    tasks.check()
    (failed,) = sent
    assert isinstance(failed, FetchFailed)
    assert "changes beyond the end" in failed.reason


def test_a_stall_names_the_last_failed_transfer() -> None:
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    weights = Weights(model=MODEL, version=1, base=NO_BASE, bucket_bytes=(100,), checksum=5)
    commands = driver.send("trainer0", Publish((weights,), ()))
    order = next(fetch for who, fetch in driver.sent(commands, ReceiveWeights) if who == "rollout0")
    driver.send("rollout0", FetchFailed(order.turn, order.weights, "lane trainer0 > rollout0: no route to host"))
    driver.now += 11.0
    (ended,) = [command for command in driver.event(Tick()) if isinstance(command, EndRun)]
    assert ended.code == EXIT_STALLED
    assert "the last transfer that failed: version 1 did not reach rollout0" in ended.reason
    assert "no route to host" in ended.reason
