"""Events that the core logs: joining, restarting, leaving and draining workers, and published versions."""

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
    return [command for command in commands if isinstance(command, LogEvent)]


def joined(term: int = 0) -> WorkerConnected:
    return WorkerConnected(worker=ROLLOUT, role="rollout", host="h1", lanes=(), term=term)


def test_joining_loss_and_restart_of_a_worker_are_logged() -> None:
    driver = CoreDriver()
    [first] = logged(driver.event(joined()))
    assert (first.kind, first.worker, first.text) == (
        "joined",
        ROLLOUT,
        "rollout7 (rollout on host 'h1') has joined",
    )
    assert dict(first.fields) == {"role": "rollout", "host": "h1"}
    [gone] = logged(driver.event(WorkerDisconnected(ROLLOUT, "not heard of for 30 s")))
    assert (gone.kind, gone.text) == ("gone", "rollout7 (rollout on host 'h1') is gone: not heard of for 30 s")
    [again] = logged(driver.event(joined()))
    assert (again.kind, again.text) == ("restarted", "rollout7 (rollout on host 'h1') has been restarted")


def test_the_log_distinguishes_early_exits_from_completed_ones() -> None:
    driver = CoreDriver()
    driver.event(joined())
    [gone] = logged(driver.event(WorkerDisconnected(ROLLOUT, "")))
    assert gone.text.endswith("left before its part was complete; see its log")
    driver.event(joined())
    driver.send(ROLLOUT, m.RoleCompleted())
    [gone] = logged(driver.event(WorkerDisconnected(ROLLOUT, "")))
    assert gone.text.endswith("has completed its part and left")


def test_joining_and_leaving_of_an_observer_are_not_logged() -> None:
    driver = CoreDriver()
    observer = WorkerId("watcher")
    connected = WorkerConnected(worker=observer, role=OBSERVER, host="h1")
    assert logged(driver.event(connected)) == []
    assert logged(driver.event(WorkerDisconnected(observer, "gone"))) == []


def test_published_versions_and_drains_are_logged() -> None:
    driver = CoreDriver()
    [published] = logged(driver.send("trainer0", m.Publish((whole(1),), ())))
    assert (published.kind, published.worker, published.fields) == ("published", "trainer0", (("version", 1),))
    [drained] = logged(driver.send("rollout0", m.Drain(0, "rollout0")))
    assert (drained.kind, drained.text) == ("drained", "rollout0 is to leave without losing a sample")


def test_only_an_observer_writes_events_and_only_of_permitted_kinds() -> None:
    driver = CoreDriver()
    driver.event(WorkerConnected(worker=WorkerId("launcher"), role=OBSERVER, host="h1"))
    [event] = logged(driver.send("launcher", m.Notice("exporter", "exporter-mine exited")))
    assert (event.kind, event.step, event.text) == ("exporter", 0, "exporter-mine exited")
    with pytest.raises(RemoteProtocolError, match="there is exporter and warning"):
        driver.send("launcher", m.Notice("ended", "the run ends"))
    with pytest.raises(RemoteProtocolError, match="writes an event"):
        driver.send("rollout0", m.Notice("exporter", "me too"))
