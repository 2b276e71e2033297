"""A single open request polls for its answer before it sleeps, while answers come at once."""

import asyncio
from time import monotonic
from types import SimpleNamespace

import pytest

from flowrt.client import requests
from flowrt.client.connection import Connection
from flowrt.client.requests import SPIN_S, RequestTable
from flowrt.net.link import spin_wait
from flowrt.protocol import messages as m

TIMEOUT_S = 30.0
POLL_S = 0.001


@pytest.fixture(autouse=True)
def _every_answer_is_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", TIMEOUT_S)


class Requester:
    """A request table, and for how long it polled for each answer."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.polled_s: list[float] = []
        self.table = RequestTable("me", self.sent.append, self.poll, lambda _: None)

    def poll(self, for_s: float) -> None:
        self.polled_s.append(for_s)
        self.answer()

    def answer(self) -> None:
        pull = self.sent.pop(0)
        assert isinstance(pull, m.Pull)
        self.table.on_answer(pull.request, m.Committed(pull.request, (), ""))

    def ask(self, answer_in_s: float | None = None) -> asyncio.Task[m.Message]:
        if answer_in_s is not None:
            asyncio.get_running_loop().call_later(answer_in_s, self.answer)
        pull = m.Pull(request=self.table.number(), stage="work", slots=1, tokens=0, step=-1)
        return asyncio.create_task(self.table.ask(pull, m.Committed, TIMEOUT_S))


async def test_a_request_polls_while_answers_come_at_once() -> None:
    requester = Requester()
    await requester.ask(answer_in_s=0.0)
    assert not requester.polled_s  # no answer time is known yet
    for _ in range(3):
        await requester.ask()
    assert requester.polled_s == [SPIN_S] * 3


async def test_a_request_does_not_poll_after_a_slow_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    requester = Requester()
    await requester.ask(answer_in_s=0.0)
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", 0.0)
    await requester.ask()
    assert requester.polled_s == [SPIN_S]
    monkeypatch.setattr(requests, "SPIN_IF_FASTER_S", TIMEOUT_S)
    await requester.ask(answer_in_s=0.0)
    assert requester.polled_s == [SPIN_S]  # not longer: the previous answer was slow
    await requester.ask()
    assert requester.polled_s == [SPIN_S] * 2


async def test_several_open_requests_do_not_poll() -> None:
    requester = Requester()
    await requester.ask(answer_in_s=0.0)
    several = [requester.ask() for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)  # both tasks send their request
    assert len(requester.sent) == 2
    assert not requester.polled_s
    requester.answer()
    requester.answer()
    await asyncio.gather(*several)


def test_spin_wait_ends_when_a_message_arrives() -> None:
    polls, taken = iter([False, False, True]), []
    assert spin_wait(lambda: next(polls), lambda: taken.append(True), TIMEOUT_S)
    assert taken == [True]
    assert next(polls, None) is None


def test_spin_wait_without_a_message_ends_at_its_deadline() -> None:
    started_s = monotonic()
    assert not spin_wait(lambda: False, lambda: 1 / 0, POLL_S)
    assert monotonic() - started_s >= POLL_S


async def test_a_connection_does_not_poll_while_a_message_is_queued() -> None:
    hello = m.Hello(protocol=m.PROTOCOL, worker="me", role="reader", host="host", pid=1, lanes=())
    connection = Connection("tcp://127.0.0.1:1", hello, None)
    polls: list[float] = []
    connection._link = SimpleNamespace(spin_wait=polls.append)  # type: ignore[assignment]
    connection.is_away = False
    connection.spin_wait(SPIN_S)
    connection._receive(m.Heartbeat())
    connection.spin_wait(SPIN_S)
    assert polls == [SPIN_S]
    assert await anext(connection) == m.Heartbeat()
    connection.spin_wait(SPIN_S)
    assert polls == [SPIN_S] * 2
