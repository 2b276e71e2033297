"""Whoever waits for one answer, and is answered at once as a rule, looks for it before it sleeps."""

import asyncio
from time import monotonic
from types import SimpleNamespace

import pytest

from flowrt.client import requests
from flowrt.client.connection import Connection
from flowrt.client.requests import SPIN_S, RequestTable
from flowrt.net.link import spin_wait
from flowrt.protocol import messages as m

PATIENCE_S = 30.0
LOOK_S = 0.001


@pytest.fixture(autouse=True)
def _a_busy_machine_is_brisk_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", PATIENCE_S)


class Desk:
    """Requests, and for how long each was looked for."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.looked_s: list[float] = []
        self.asking = RequestTable("me", self.sent.append, self.look, lambda _: None)

    def look(self, for_s: float) -> None:
        self.looked_s.append(for_s)
        self.answer()

    def answer(self) -> None:
        pull = self.sent.pop(0)
        assert isinstance(pull, m.Pull)
        self.asking.on_answer(pull.request, m.Committed(pull.request, (), ""))

    def ask(self, answer_in_s: float | None = None) -> asyncio.Task[m.Message]:
        if answer_in_s is not None:
            asyncio.get_running_loop().call_later(answer_in_s, self.answer)
        pull = m.Pull(request=self.asking.number(), stage="work", slots=1, tokens=0, step=-1)
        return asyncio.create_task(self.asking.ask(pull, m.Committed, PATIENCE_S))


async def test_it_is_looked_for_while_answers_come_at_once() -> None:
    desk = Desk()
    await desk.ask(answer_in_s=0.0)
    assert not desk.looked_s  # nothing was known of how soon answers come
    for _ in range(3):
        await desk.ask()
    assert desk.looked_s == [SPIN_S] * 3


async def test_it_is_not_looked_for_after_an_answer_that_took_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    await desk.ask(answer_in_s=0.0)
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", 0.0)
    await desk.ask()
    assert desk.looked_s == [SPIN_S]
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", PATIENCE_S)
    await desk.ask(answer_in_s=0.0)
    assert desk.looked_s == [SPIN_S]  # as before: this one was not
    await desk.ask()
    assert desk.looked_s == [SPIN_S] * 2


async def test_of_several_that_are_waited_for_none_is_looked_for() -> None:
    desk = Desk()
    await desk.ask(answer_in_s=0.0)
    several = [desk.ask() for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)  # both are asked, and all that they have left to do is done
    assert len(desk.sent) == 2
    assert not desk.looked_s
    desk.answer()
    desk.answer()
    await asyncio.gather(*several)


def test_a_look_ends_with_what_comes() -> None:
    looks, taken = iter([False, False, True]), []
    assert spin_wait(lambda: next(looks), lambda: taken.append(True), PATIENCE_S)
    assert taken == [True]
    assert next(looks, None) is None


def test_a_look_for_nothing_ends_in_time() -> None:
    began_s = monotonic()
    assert not spin_wait(lambda: False, lambda: 1 / 0, LOOK_S)
    assert LOOK_S <= monotonic() - began_s < PATIENCE_S


async def test_nothing_is_looked_for_while_a_message_waits_to_be_handled() -> None:
    hello = m.Hello(protocol=m.PROTOCOL, worker="me", role="reader", host="host", pid=1, lanes=())
    connection = Connection("tcp://127.0.0.1:1", hello, None)
    looks: list[float] = []
    connection._link = SimpleNamespace(spin_wait=looks.append)  # type: ignore[assignment]
    connection.is_away = False
    connection.spin_wait(SPIN_S)
    connection._receive(m.Heartbeat())
    connection.spin_wait(SPIN_S)
    assert looks == [SPIN_S]
    assert await anext(connection) == m.Heartbeat()
    connection.spin_wait(SPIN_S)
    assert looks == [SPIN_S] * 2
