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
def talk() -> CoreDriver:
    """Everybody is in, somebody watches, and rollout workers and a trainer are needed."""
    talk = CoreDriver(steps=4)
    talk.configure(replaceable_roles=("rollout", "reward"), critical_roles=("trainer",))
    talk.event(WorkerConnected(WorkerId("watcher"), OBSERVER, "host"))
    return talk


def test_it_finishes_what_it_has_and_goes_when_nothing_is_lost_with_it(talk: CoreDriver) -> None:
    talk.offer()
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    parked = m.Pull(request=9, stage="rollout", slots=1, tokens=0, step=-1)
    talk.say("rollout0", parked)
    told = talk.say("watcher", m.Drain(1, "rollout0"))
    assert talk.heard(told, m.Drain) == [("rollout0", m.Drain(1, "rollout0"))]
    [(who, refusal)] = talk.heard(told, m.Rejected)
    assert (who, refusal.request, refusal.reason) == ("rollout0", 9, "rollout0 is leaving the run")
    # It is at work, then it alone has what it made.
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    assert talk.heard(talk.say("rollout0", talk.generated(grant)), m.Committed)[0][1].refused == ()
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    talk.score()
    trained = talk.pull("trainer0", "train", step=0)
    assert trained is not None
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    talk.say("trainer0", m.StepCompleted(0, ()))
    [(who, stop)] = talk.heard(talk.event(Tick()), m.Stop)
    assert (who, stop.code) == ("rollout0", 0)
    assert talk.heard(talk.event(Tick()), m.Stop) == []  # once
    talk.say("rollout0", m.Leave(""))
    assert talk.core.ended is None
    assert dict(talk.core.state.dropped) == {}


def test_it_gets_nothing_new(talk: CoreDriver) -> None:
    talk.say("watcher", m.Drain(1, "rollout0"))
    talk.offer()
    assert talk.pull("rollout0", "rollout") is None
    assert talk.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("nobody", "there is no worker 'nobody' in this run"),
        ("reward0", "reward0 is the only reward worker; start another one first"),
        ("trainer0", "the work of a trainer cannot be passed on"),
        ("source0", "the work of a source cannot be passed on"),
    ],
)
def test_who_cannot_leave_stays_and_the_asker_hears_why(talk: CoreDriver, worker: str, reason: str) -> None:
    said = talk.say("watcher", m.Drain(5, worker))
    [(who, refusal)] = talk.heard(said, m.Rejected)
    assert (who, refusal.request) == ("watcher", 5)
    assert reason in refusal.reason
    assert talk.heard(said, m.Drain) == []


def test_whoever_has_to_go_itself_is_not_kept(talk: CoreDriver) -> None:
    assert talk.heard(talk.say("reward0", m.Drain(0, "reward0")), m.Drain) == [("reward0", m.Drain(0, "reward0"))]
    assert talk.heard(talk.event(Tick()), m.Stop)[0][0] == "reward0"


def test_only_observers_send_others_away(talk: CoreDriver) -> None:
    talk.assert_illegal("reward0", m.Drain(0, "rollout0"))


# ---- roles that are empty for a while


def test_a_needed_role_may_be_empty_for_a_while(talk: CoreDriver) -> None:
    talk.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    talk.now += talk.core.settings.role_vacancy_timeout_s - 1
    talk.event(Tick())
    assert talk.core.ended is None
    talk.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    talk.now += talk.core.settings.role_vacancy_timeout_s + 1
    talk.event(Tick())
    assert talk.core.ended is None


def test_a_needed_role_that_stays_empty_ends_the_run_with_the_reason(talk: CoreDriver) -> None:
    talk.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    talk.now += talk.core.settings.role_vacancy_timeout_s + 1
    talk.event(Tick())
    assert talk.core.ended is not None
    assert "no reward worker for 61 s: reward0: killed" in talk.core.ended.reason


def test_a_vital_worker_ends_the_run_at_once(talk: CoreDriver) -> None:
    talk.event(WorkerDisconnected(WorkerId("trainer0"), "killed"))
    assert talk.core.ended is not None
    assert talk.core.ended.reason == "trainer0: killed (on host 'host')"


def test_a_role_whose_last_worker_leaves_in_order_is_vacant_at_once(talk: CoreDriver) -> None:
    talk.say("reward0", m.Drain(0, "reward0"))
    assert talk.core.state.membership.vacancies(talk.now) == {
        "reward": (0.0, "reward0 was terminated, and leaves in order")
    }
    talk.say("reward0", m.Leave(""))
    talk.now += talk.core.settings.role_vacancy_timeout_s + 1
    talk.event(Tick())
    assert talk.core.ended is not None
    assert talk.core.ended.code == 1
    assert "no reward worker for 61 s: reward0 was terminated" in talk.core.ended.reason


def test_a_replacement_fills_the_vacancy(talk: CoreDriver) -> None:
    talk.say("reward0", m.Drain(0, "reward0"))
    talk.say("reward0", m.Leave(""))
    talk.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    assert talk.core.state.membership.vacancies(talk.now) == {}
    talk.now += talk.core.settings.role_vacancy_timeout_s + 1
    talk.event(Tick())
    assert talk.core.ended is None


def test_a_worker_with_others_of_its_role_leaves_no_vacancy(talk: CoreDriver) -> None:
    talk.say("rollout0", m.Drain(0, "rollout0"))
    talk.say("rollout0", m.Leave(""))
    assert talk.core.state.membership.vacancies(talk.now) == {}
    talk.say("rollout1", m.Drain(0, "rollout1"))
    assert list(talk.core.state.membership.vacancies(talk.now)) == ["rollout"]


def test_the_last_rollout_worker_does_not_hold_up_its_replacement(talk: CoreDriver) -> None:
    """It holds a sample that the trainer will need, and the next prompt needs a rollout worker."""
    talk.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    talk.offer(prompt=0)
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    talk.say("rollout0", m.Drain(0, "rollout0"))
    talk.offer(prompt=1)
    assert talk.heard(talk.event(Tick()), m.Stop) == [], "it is at work"
    talk.say("rollout0", talk.generated(grant))
    [(who, stop)] = talk.heard(talk.event(Tick()), m.Stop)
    assert (who, stop.code) == ("rollout0", 0)


def test_an_operator_who_drains_a_worker_is_remembered(talk: CoreDriver) -> None:
    talk.say("watcher", m.Drain(1, "rollout0"))
    talk.say("rollout0", m.Leave(""))
    assert talk.core.state.membership.drained == {"rollout0"}
    talk.event(WorkerConnected(WorkerId("rollout0"), "rollout", "host"))
    assert talk.core.state.membership.drained == set()


def test_workers_with_results_are_those_that_opened_prompts_or_committed(talk: CoreDriver) -> None:
    membership = talk.core.state.membership
    talk.offer()
    assert membership.with_results() == {"source0"}
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    assert membership.with_results() == {"source0"}, "a pull is no result"
    talk.say("rollout0", talk.generated(grant))
    assert membership.with_results() == {"source0", "rollout0"}
    talk.event(WorkerDisconnected(WorkerId("rollout0"), "killed"))
    assert membership.with_results() == {"source0"}


def test_the_time_without_progress_counts_once_every_role_has_joined() -> None:
    talk = CoreDriver(steps=4)
    talk.configure(
        replaceable_roles=("rollout", "judge"),
        no_progress_timeout_s=5.0,
        connect_timeout_s=20.0,
        worker_timeout_s=1e9,
    )
    talk.now = 10.0
    talk.event(Tick())
    ended = talk.core.ended
    assert ended is None, "no judge has joined yet"
    talk.event(WorkerConnected(WorkerId("judge0"), "judge", "host"))
    talk.now = 16.0
    talk.event(Tick())
    assert talk.core.ended is not None
    assert "no progress for 6 s" in talk.core.ended.reason


def test_a_role_that_never_joins_is_named() -> None:
    talk = CoreDriver(steps=4)
    talk.configure(
        replaceable_roles=("rollout", "judge"),
        no_progress_timeout_s=5.0,
        connect_timeout_s=20.0,
        worker_timeout_s=1e9,
    )
    talk.now = 21.0
    talk.event(Tick())
    assert talk.core.ended is not None
    assert talk.core.ended.code == 3
    assert "no worker of these roles has joined within 21 s: judge" in talk.core.ended.reason


# ---- rollout workers that come late


def test_a_late_worker_catches_up_from_a_neighbour_before_it_begins(talk: CoreDriver) -> None:
    talk.say("trainer0", m.Publish((whole(1),), ()))
    talk.say("rollout0", m.WeightsStaged(MODEL, 1))
    talk.say("rollout0", m.WeightsActivated(MODEL, 1))
    talk.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    talk.offer()
    talk.event(WorkerConnected(WorkerId("rollout1"), "rollout", "host"))
    fetches = talk.heard(talk.say("rollout1", m.WeightsActivated(MODEL, 0)), m.ReceiveWeights)
    assert talk.pull("rollout1", "rollout") is None, "it began with the weights of the start"
    [(who, fetch)] = fetches
    assert (who, fetch.turn.sender, fetch.weights.version) == ("rollout1", "rollout0", 1)
    talk.say("rollout1", m.WeightsStaged(MODEL, 1))
    granted = talk.heard(talk.say("rollout1", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout1"]


def test_an_observer_that_joins_does_not_put_off_the_end_of_a_stalled_run() -> None:
    talk = CoreDriver(steps=4)
    talk.configure(no_progress_timeout_s=5.0, worker_timeout_s=1e9)
    talk.now = 4.0
    talk.event(WorkerConnected(WorkerId("observer-1"), "observer", "host"))
    talk.now = 6.0
    talk.event(Tick())
    assert talk.core.ended is not None
    assert talk.core.ended.code == 3


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
