"""Live processes outside the run are killed: those that left it, and those that never joined."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.launcher.supervision import HungProcessReaper

TIMEOUT_S, CONNECT_TIMEOUT_S, EXTENSION_S = 10.0, 100.0, 60.0


class ReaperHarness:
    """A reaper of fake processes, with a driven clock."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.killed: list[str] = []
        names = ("reward", "trainer", "other")
        self.local = {"reward": ["reward"], "trainer": ["trainer"]}
        self._running = [SimpleNamespace(name=name, process=SimpleNamespace(pid=1)) for name in names]
        children: Any = self
        self.messages: list[str] = []
        self.reaper = HungProcessReaper(children, TIMEOUT_S, CONNECT_TIMEOUT_S, self.messages.append)
        patch.setattr("flowrt.launcher.supervision.monotonic", lambda: self.now)

    def running(self) -> list[Any]:
        return self._running

    def signal_group(self, child: Any, number: signal.Signals) -> None:
        assert number is signal.SIGKILL
        self.killed.append(child.name)

    def check(self, after_s: float, *workers: str) -> list[str]:
        self.now += after_s
        self.reaper.check(workers, self.local, {"trainer"})
        return self.killed


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ReaperHarness:
    return ReaperHarness(monkeypatch)


def test_a_process_whose_worker_left_is_killed_after_the_timeout(harness: ReaperHarness) -> None:
    harness.check(0.0, "reward", "trainer", "other")
    assert harness.check(TIMEOUT_S - 1) == []
    assert harness.check(2.0) == ["reward"], "the trainer is critical"
    assert harness.messages == ["reward left the run, but its process is alive: killing it"]


def test_a_process_that_never_joins_is_killed_after_both_timeouts(harness: ReaperHarness) -> None:
    harness.check(0.0)
    assert harness.check(CONNECT_TIMEOUT_S + TIMEOUT_S - 1) == []
    assert harness.check(2.0) == ["reward", "trainer"]
    assert harness.messages == [
        f"{name} never joined the run, but its process is alive: killing it" for name in harness.killed
    ]


def test_a_process_that_joins_late_is_kept(harness: ReaperHarness) -> None:
    harness.check(0.0)
    harness.check(CONNECT_TIMEOUT_S, "reward", "trainer")
    assert harness.check(TIMEOUT_S - 1, "reward", "trainer") == []
    assert harness.check(TIMEOUT_S - 1) == []


def test_a_controller_restart_extends_the_deadlines(harness: ReaperHarness) -> None:
    harness.check(0.0, "reward", "trainer")
    harness.reaper.extend(EXTENSION_S)
    assert harness.check(EXTENSION_S + TIMEOUT_S - 1) == []
    assert harness.check(2.0) == ["reward"]


def test_every_rank_of_a_process_must_join(harness: ReaperHarness) -> None:
    harness.local["trainer"] = ["trainer-0", "trainer-1"]
    harness.check(0.0, "reward", "trainer-0")
    assert harness.check(CONNECT_TIMEOUT_S + TIMEOUT_S - 1, "reward", "trainer-0") == []
    assert harness.check(2.0, "reward", "trainer-0") == ["trainer"]
    assert harness.messages == ["trainer-1 never joined the run, but its process is alive: killing it"]


def test_a_critical_process_is_kept_when_a_rank_leaves(harness: ReaperHarness) -> None:
    harness.local["trainer"] = ["trainer-0", "trainer-1"]
    harness.check(0.0, "reward", "trainer-0", "trainer-1")
    assert harness.check(10 * CONNECT_TIMEOUT_S, "reward", "trainer-0") == []
