"""Processes that live and are not in the run are killed: those that have left it, and those that never came."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from flowrt.launcher.supervision import HungProcessReaper

PATIENCE_S, JOIN_S, RETURN_S = 10.0, 100.0, 60.0


class Watched:
    """Missing with two processes and a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.killed: list[str] = []
        names = ("reward", "trainer", "theirs")
        self.ours = {"reward": ["reward"], "trainer": ["trainer"]}
        self._running = [SimpleNamespace(name=name, process=SimpleNamespace(pid=1)) for name in names]
        children: Any = self
        self.said: list[str] = []
        self.reaper = HungProcessReaper(children, PATIENCE_S, JOIN_S, self.said.append)
        patch.setattr("flowrt.launcher.supervision.monotonic", lambda: self.now)

    def running(self) -> list[Any]:
        return self._running

    def signal_group(self, child: Any, number: signal.Signals) -> None:
        assert number is signal.SIGKILL
        self.killed.append(child.name)

    def look(self, after_s: float, *workers: str) -> list[str]:
        self.now += after_s
        self.reaper.check(workers, self.ours, {"trainer"})
        return self.killed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_who_has_left_is_killed_when_it_outlives_that(watched: Watched) -> None:
    watched.look(0.0, "reward", "trainer", "theirs")
    assert watched.look(PATIENCE_S - 1) == []
    assert watched.look(2.0) == ["reward"], "and not who cannot be replaced"
    assert watched.said == ["reward left the run, but its process is alive: killing it"]


def test_who_never_came_is_killed_when_it_would_have_given_up_itself(watched: Watched) -> None:
    watched.look(0.0)
    assert watched.look(JOIN_S + PATIENCE_S - 1) == []
    assert watched.look(2.0) == ["reward", "trainer"]
    assert watched.said == [
        f"{name} never joined the run, but its process is alive: killing it" for name in watched.killed
    ]


def test_who_comes_late_stays(watched: Watched) -> None:
    watched.look(0.0)
    watched.look(JOIN_S, "reward", "trainer")
    assert watched.look(PATIENCE_S - 1, "reward", "trainer") == []
    assert watched.look(PATIENCE_S - 1) == []


def test_another_controller_gives_everybody_time_to_find_it(watched: Watched) -> None:
    watched.look(0.0, "reward", "trainer")
    watched.reaper.extend(RETURN_S)
    assert watched.look(RETURN_S + PATIENCE_S - 1) == []
    assert watched.look(2.0) == ["reward"]


def test_each_of_several_ranks_has_to_come(watched: Watched) -> None:
    watched.ours["trainer"] = ["trainer-0", "trainer-1"]
    watched.look(0.0, "reward", "trainer-0")
    assert watched.look(JOIN_S + PATIENCE_S - 1, "reward", "trainer-0") == []
    assert watched.look(2.0, "reward", "trainer-0") == ["trainer"]
    assert watched.said == ["trainer-1 never joined the run, but its process is alive: killing it"]


def test_a_rank_that_leaves_is_not_missed_here(watched: Watched) -> None:
    watched.ours["trainer"] = ["trainer-0", "trainer-1"]
    watched.look(0.0, "reward", "trainer-0", "trainer-1")
    assert watched.look(10 * JOIN_S, "reward", "trainer-0") == []
