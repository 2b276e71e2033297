"""Work beside a worker's role that fails with what nobody expects: it is told, and nobody waits for ever."""

import asyncio
import dataclasses
from collections.abc import Iterable

import pytest
import torch

from flowrt.client.beside import Beside
from flowrt.client.params import Params
from flowrt.controller.events import End, Tick
from flowrt.errors import EXIT_STALLED, FlowError
from flowrt.testing.scenario import MODEL
from flowrt.testing.talk import Talk
from flowrt.transport.lane import LaneSet
from flowrt.transport.weights import Snapshot
from flowrt.wire.messages import Fetch, FetchFailed, Heartbeat, Message, Publish
from flowrt.wire.records import NO_BASE, LaneTurn, Weights

WAIT_S = 20.0


class Delivered:
    """Lanes over which everything comes at once."""

    def receive_each(self, _: LaneTurn, tensors: Iterable[torch.Tensor]) -> "asyncio.Future[None]":
        for tensor in tensors:
            tensor.fill_(7)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def test_a_task_that_fails_ends_the_session_with_its_words() -> None:
    ended: list[FlowError] = []
    over = asyncio.Event()

    def end(error: FlowError) -> None:
        ended.append(error)
        over.set()

    async def fail() -> None:
        raise KeyError("bucket 3")

    Beside(end).spawn(fail())
    async with asyncio.timeout(WAIT_S):
        await over.wait()
    assert "KeyError('bucket 3')" in str(ended[0])


def test_an_order_that_cannot_be_obeyed_ends_the_session() -> None:
    ended: list[FlowError] = []

    def obey(_: Message) -> None:
        raise RuntimeError("can't allocate memory: 9 GB")

    Beside(ended.append).guarded(obey)(Heartbeat())
    assert "can't allocate memory: 9 GB" in str(ended[0])


async def test_a_trainer_hears_why_a_version_could_not_be_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("no sum")

    beside = Beside(lambda _: None)
    params = Params(LaneSet("trainer", {}, 1.0, lambda *_: None), lambda _: None, beside.spawn, 1.0)
    monkeypatch.setattr(Snapshot, "checksum", fail)
    async with asyncio.timeout(WAIT_S):
        await params.publish_beside("policy", Snapshot.take(1, {"w": torch.zeros(10)}))
        with pytest.raises(RuntimeError, match="no sum"):
            await params.settled()


async def test_a_version_that_cannot_be_put_together_has_failed_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> Snapshot:
        raise RuntimeError("changes beyond the end")

    said: list[Message] = []
    told = asyncio.Event()

    def send(message: Message) -> None:
        said.append(message)
        told.set()

    beside = Beside(lambda error: pytest.fail(f"ended: {error}"))
    params = Params(Delivered(), send, beside.spawn, WAIT_S)  # type: ignore[arg-type]
    monkeypatch.setattr(Params, "_changed_by", fail)
    params.fetch(Fetch(LaneTurn("trainer", "rollout0", "weights", 0, 0, "shm"), Weights("policy", 2, 1, (100,), 5)))
    async with asyncio.timeout(WAIT_S):
        await told.wait()
    (failed,) = said
    assert isinstance(failed, FetchFailed)
    assert "changes beyond the end" in failed.reason


def test_a_stall_says_which_transfer_failed_last() -> None:
    talk = Talk()
    talk.core.settings = dataclasses.replace(talk.core.settings, stall_s=10.0)
    weights = Weights(MODEL, 1, NO_BASE, (100,), 5)
    commands = talk.say("trainer0", Publish((weights,), ()))
    order = next(fetch for who, fetch in talk.heard(commands, Fetch) if who == "rollout0")
    talk.say("rollout0", FetchFailed(order.turn, order.weights, "lane trainer0 > rollout0: no route to host"))
    talk.now += 11.0
    (ended,) = [command for command in talk.event(Tick()) if isinstance(command, End)]
    assert ended.code == EXIT_STALLED
    assert "the last transfer that failed: version 1 did not reach rollout0" in ended.reason
    assert "no route to host" in ended.reason
