"""Events that the core logs: workers that join, restart and leave, versions, checkpoints, orders to leave."""

from collections.abc import Iterable

import pytest

from flowrt.controller.events import Command, LogEvent, WorkerConnected, WorkerDisconnected
from flowrt.errors import RemoteProtocolError
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import whole

ROLLOUT = WorkerId("rollout7")


def logged(commands: Iterable[Command]) -> list[LogEvent]:
    return [one for one in commands if isinstance(one, LogEvent)]


def joined(term: int = 0) -> WorkerConnected:
    return WorkerConnected(worker=ROLLOUT, role="rollout", host="h1", lanes=(), term=term)


def test_a_worker_joins_is_lost_and_is_restarted() -> None:
    talk = CoreDriver()
    [first] = logged(talk.event(joined()))
    assert (first.kind, first.worker, first.text) == (
        "joined",
        ROLLOUT,
        "rollout7 (rollout on host 'h1') has joined",
    )
    assert dict(first.fields) == {"role": "rollout", "host": "h1"}
    [gone] = logged(talk.event(WorkerDisconnected(ROLLOUT, "not heard of for 30 s")))
    assert (gone.kind, gone.text) == ("gone", "rollout7 (rollout on host 'h1') is gone: not heard of for 30 s")
    [again] = logged(talk.event(joined()))
    assert (again.kind, again.text) == ("restarted", "rollout7 (rollout on host 'h1') has been restarted")


def test_one_that_leaves_by_itself_says_how() -> None:
    talk = CoreDriver()
    talk.event(joined())
    [gone] = logged(talk.event(WorkerDisconnected(ROLLOUT, "")))
    assert gone.text.endswith("left before its part was complete; see its log")
    talk.event(joined())
    talk.say(ROLLOUT, m.RoleCompleted())
    [gone] = logged(talk.event(WorkerDisconnected(ROLLOUT, "")))
    assert gone.text.endswith("has completed its part and left")


def test_an_observer_is_no_event() -> None:
    talk = CoreDriver()
    watcher = WorkerId("watcher")
    connected = WorkerConnected(worker=watcher, role=OBSERVER, host="h1")
    assert logged(talk.event(connected)) == []
    assert logged(talk.event(WorkerDisconnected(watcher, "gone"))) == []


def test_a_version_and_a_worker_that_drains() -> None:
    talk = CoreDriver()
    [published] = logged(talk.say("trainer0", m.Publish((whole(1),), ())))
    assert (published.kind, published.worker, published.fields) == ("published", "trainer0", (("version", 1),))
    [drained] = logged(talk.say("rollout0", m.Drain(0, "rollout0")))
    assert (drained.kind, drained.text) == ("drained", "rollout0 is to leave without losing a sample")


def test_only_an_observer_writes_an_event_and_only_of_some_kinds() -> None:
    talk = CoreDriver()
    talk.event(WorkerConnected(worker=WorkerId("launcher"), role=OBSERVER, host="h1"))
    [event] = logged(talk.say("launcher", m.Notice("exporter", "exporter-mine exited")))
    assert (event.kind, event.step, event.text) == ("exporter", 0, "exporter-mine exited")
    with pytest.raises(RemoteProtocolError, match="there is exporter and warning"):
        talk.say("launcher", m.Notice("ended", "the run ends"))
    with pytest.raises(RemoteProtocolError, match="writes an event"):
        talk.say("rollout0", m.Notice("exporter", "me too"))
