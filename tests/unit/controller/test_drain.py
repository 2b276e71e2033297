"""Workers that are to leave: what they still get, when they may go, and who may not."""

import dataclasses
from typing import Any

import pytest

from flowrt.controller.events import Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.recipes import grpo
from flowrt.recipes.config_io import defaults
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, whole

OBSERVER = "observer"


@pytest.fixture
def driver() -> CoreDriver:
    """Everybody is in, somebody watches, and rollout workers and a trainer are needed."""
    driver = CoreDriver(steps=4)
    driver.configure(replaceable_roles=("rollout", "reward"), critical_roles=("trainer",))
    driver.event(WorkerConnected(WorkerId("watcher"), OBSERVER, "host"))
    return driver


def test_it_finishes_what_it_has_and_goes_when_nothing_is_lost_with_it(driver: CoreDriver) -> None:
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    parked = m.Pull(request=9, stage="rollout", slots=1, tokens=0, step=-1)
    driver.send("rollout0", parked)
    told = driver.send("watcher", m.Drain(1, "rollout0"))
    assert driver.sent(told, m.Drain) == [("rollout0", m.Drain(1, "rollout0"))]
    [(who, refusal)] = driver.sent(told, m.Rejected)
    assert (who, refusal.request, refusal.reason) == ("rollout0", 9, "rollout0 is leaving the run")
    # It is at work, then it alone has what it made.
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    assert driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)[0][1].refused == ()
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    driver.score()
    trained = driver.pull("trainer0", "train", step=0)
    assert trained is not None
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    driver.send("trainer0", m.StepCompleted(0, ()))
    [(who, stop)] = driver.sent(driver.event(Tick()), m.Stop)
    assert (who, stop.code) == ("rollout0", 0)
    assert driver.sent(driver.event(Tick()), m.Stop) == []  # once
    driver.send("rollout0", m.Leave(""))
    assert driver.core.ended is None
    assert dict(driver.core.state.dropped) == {}


def test_it_gets_nothing_new(driver: CoreDriver) -> None:
    driver.send("watcher", m.Drain(1, "rollout0"))
    driver.offer()
    assert driver.pull("rollout0", "rollout") is None
    assert driver.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("nobody", "there is no worker 'nobody' in this run"),
        ("reward0", "reward0 is the only reward worker; start another one first"),
        ("trainer0", "the work of a trainer cannot be passed on"),
        ("source0", "the work of a source cannot be passed on"),
    ],
)
def test_who_cannot_leave_stays_and_the_asker_hears_why(driver: CoreDriver, worker: str, reason: str) -> None:
    said = driver.send("watcher", m.Drain(5, worker))
    [(who, refusal)] = driver.sent(said, m.Rejected)
    assert (who, refusal.request) == ("watcher", 5)
    assert reason in refusal.reason
    assert driver.sent(said, m.Drain) == []


def test_whoever_has_to_go_itself_is_not_kept(driver: CoreDriver) -> None:
    assert driver.sent(driver.send("reward0", m.Drain(0, "reward0")), m.Drain) == [("reward0", m.Drain(0, "reward0"))]
    assert driver.sent(driver.event(Tick()), m.Stop)[0][0] == "reward0"


def test_only_observers_send_others_away(driver: CoreDriver) -> None:
    driver.assert_illegal("reward0", m.Drain(0, "rollout0"))


# ---- roles that are empty for a while


def test_a_needed_role_may_be_empty_for_a_while(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.now += driver.core.settings.role_vacancy_timeout_s - 1
    driver.event(Tick())
    assert driver.core.ended is None
    driver.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is None


def test_a_needed_role_that_stays_empty_ends_the_run_with_the_reason(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is not None
    assert "no reward worker for 61 s: reward0: killed" in driver.core.ended.reason


def test_a_vital_worker_ends_the_run_at_once(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("trainer0"), "killed"))
    assert driver.core.ended is not None
    assert driver.core.ended.reason == "trainer0: killed (on host 'host')"


def test_a_role_whose_last_worker_leaves_in_order_is_vacant_at_once(driver: CoreDriver) -> None:
    driver.send("reward0", m.Drain(0, "reward0"))
    assert driver.core.state.membership.vacancies(driver.now) == {
        "reward": (0.0, "reward0 was terminated, and leaves in order")
    }
    driver.send("reward0", m.Leave(""))
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is not None
    assert driver.core.ended.code == 1
    assert "no reward worker for 61 s: reward0 was terminated" in driver.core.ended.reason


def test_a_replacement_fills_the_vacancy(driver: CoreDriver) -> None:
    driver.send("reward0", m.Drain(0, "reward0"))
    driver.send("reward0", m.Leave(""))
    driver.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    assert driver.core.state.membership.vacancies(driver.now) == {}
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is None


def test_a_worker_with_others_of_its_role_leaves_no_vacancy(driver: CoreDriver) -> None:
    driver.send("rollout0", m.Drain(0, "rollout0"))
    driver.send("rollout0", m.Leave(""))
    assert driver.core.state.membership.vacancies(driver.now) == {}
    driver.send("rollout1", m.Drain(0, "rollout1"))
    assert list(driver.core.state.membership.vacancies(driver.now)) == ["rollout"]


def test_the_last_rollout_worker_does_not_hold_up_its_replacement(driver: CoreDriver) -> None:
    """It holds a sample that the trainer will need, and the next prompt needs a rollout worker."""
    driver.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    driver.offer(prompt=0)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", m.Drain(0, "rollout0"))
    driver.offer(prompt=1)
    assert driver.sent(driver.event(Tick()), m.Stop) == [], "it is at work"
    driver.send("rollout0", driver.generated(grant))
    [(who, stop)] = driver.sent(driver.event(Tick()), m.Stop)
    assert (who, stop.code) == ("rollout0", 0)


def test_an_operator_who_drains_a_worker_is_remembered(driver: CoreDriver) -> None:
    driver.send("watcher", m.Drain(1, "rollout0"))
    driver.send("rollout0", m.Leave(""))
    assert driver.core.state.membership.drained == {"rollout0"}
    driver.event(WorkerConnected(WorkerId("rollout0"), "rollout", "host"))
    assert driver.core.state.membership.drained == set()


def test_workers_with_results_are_those_that_opened_prompts_or_committed(driver: CoreDriver) -> None:
    membership = driver.core.state.membership
    driver.offer()
    assert membership.with_results() == {"source0"}
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert membership.with_results() == {"source0"}, "a pull is no result"
    driver.send("rollout0", driver.generated(grant))
    assert membership.with_results() == {"source0", "rollout0"}
    driver.event(WorkerDisconnected(WorkerId("rollout0"), "killed"))
    assert membership.with_results() == {"source0"}


def test_the_time_without_progress_counts_once_every_role_has_joined() -> None:
    driver = CoreDriver(steps=4)
    driver.configure(
        replaceable_roles=("rollout", "judge"),
        no_progress_timeout_s=5.0,
        connect_timeout_s=20.0,
        worker_timeout_s=1e9,
    )
    driver.now = 10.0
    driver.event(Tick())
    ended = driver.core.ended
    assert ended is None, "no judge has joined yet"
    driver.event(WorkerConnected(WorkerId("judge0"), "judge", "host"))
    driver.now = 16.0
    driver.event(Tick())
    assert driver.core.ended is not None
    assert "no progress for 6 s" in driver.core.ended.reason


def test_a_role_that_never_joins_is_named() -> None:
    driver = CoreDriver(steps=4)
    driver.configure(
        replaceable_roles=("rollout", "judge"),
        no_progress_timeout_s=5.0,
        connect_timeout_s=20.0,
        worker_timeout_s=1e9,
    )
    driver.now = 21.0
    driver.event(Tick())
    assert driver.core.ended is not None
    assert driver.core.ended.code == 3
    assert "no worker of these roles has joined within 21 s: judge" in driver.core.ended.reason


# ---- rollout workers that come late


def test_a_late_worker_catches_up_from_a_neighbour_before_it_begins(driver: CoreDriver) -> None:
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    driver.send("rollout0", m.WeightsActivated(MODEL, 1))
    driver.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    driver.offer()
    driver.event(WorkerConnected(WorkerId("rollout1"), "rollout", "host"))
    fetches = driver.sent(driver.send("rollout1", m.WeightsActivated(MODEL, 0)), m.ReceiveWeights)
    assert driver.pull("rollout1", "rollout") is None, "it began with the weights of the start"
    [(who, fetch)] = fetches
    assert (who, fetch.turn.sender, fetch.weights.version) == ("rollout1", "rollout0", 1)
    driver.send("rollout1", m.WeightsStaged(MODEL, 1))
    granted = driver.sent(driver.send("rollout1", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout1"]


def test_an_observer_that_joins_does_not_put_off_the_end_of_a_stalled_run() -> None:
    driver = CoreDriver(steps=4)
    driver.configure(no_progress_timeout_s=5.0, worker_timeout_s=1e9)
    driver.now = 4.0
    driver.event(WorkerConnected(WorkerId("observer-1"), "observer", "host"))
    driver.now = 6.0
    driver.event(Tick())
    assert driver.core.ended is not None
    assert driver.core.ended.code == 3


@pytest.mark.parametrize(
    "name",
    [
        "lease_s",
        "worker_timeout_s",
        "reconnect_timeout_s",
        "lanes",
        "transfer_idle_timeout_s",
        "min_transfer_mb_per_s",
        "no_progress_timeout_s",
        "connect_timeout_s",
    ],
)
def test_the_controller_is_told_what_the_configuration_says(name: str) -> None:
    base = defaults("arithmetic")
    change: dict[str, Any] = {name: "gloo" if name == "lanes" else 1234.5}
    changed = dataclasses.replace(base, controller=dataclasses.replace(base.controller, **change))
    assert getattr(grpo.settings(changed), name) == change[name]
