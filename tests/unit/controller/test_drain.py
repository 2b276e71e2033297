"""Draining workers: what they may finish, when they are stopped, and which workers cannot drain."""

import dataclasses
from typing import Any

import pytest

from flowrt.controller.events import Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.recipes import grpo
from flowrt.recipes.config_io import defaults
from tests.property.test_fuzz_rejoin import restarted
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, whole

OBSERVER = "observer"
PROMPTS = tuple(m.Part(column, (0, 1), (length, length)) for column, length in (("prompt", 4), ("answer", 1)))


@pytest.fixture
def driver() -> CoreDriver:
    """All workers and an observer have joined; rollout and reward workers are replaceable, the trainer is critical."""
    driver = CoreDriver(steps=4)
    driver.configure(replaceable_roles=("rollout", "reward"), critical_roles=("trainer",))
    driver.event(WorkerConnected(WorkerId("watcher"), OBSERVER, "host"))
    return driver


def test_a_draining_worker_stops_after_its_samples_are_trained(driver: CoreDriver) -> None:
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    parked = m.Pull(request=9, stage="rollout", slots=1, tokens=0, step=-1)
    driver.send("rollout0", parked)
    commands = driver.send("watcher", m.Drain(1, "rollout0"))
    assert driver.sent(commands, m.Drain) == [("rollout0", m.Drain(1, "rollout0"))]
    [(receiver, refusal)] = driver.sent(commands, m.Rejected)
    assert (receiver, refusal.request, refusal.reason) == ("rollout0", 9, "rollout0 is leaving the run")
    # First it generates, then it is the only holder of its tensors.
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    assert driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)[0][1].refused == ()
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    driver.score()
    trained = driver.pull("trainer0", "train", step=0)
    assert trained is not None
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    driver.send("trainer0", m.StepCompleted(0, ()))
    [(receiver, stop)] = driver.sent(driver.event(Tick()), m.Stop)
    assert (receiver, stop.code) == ("rollout0", 0)
    assert driver.sent(driver.event(Tick()), m.Stop) == []  # sent only once
    driver.send("rollout0", m.Leave(""))
    assert driver.core.ended is None
    assert dict(driver.core.state.dropped) == {}


def test_a_worker_that_drains_is_not_stopped_before_a_restarted_controller_knows_what_it_holds() -> None:
    driver, _ = restarted()
    driver.send("rollout0", m.Drain(0, "rollout0"))
    assert driver.sent(driver.event(Tick()), m.Stop) == []
    for worker in ("rollout0", "rollout1", "source0", "reward0", "evaluate0", "trainer0"):
        parts = (m.Part("response", (0,), (3,)), m.Part("logprobs", (0,), (3,))) if worker == "rollout0" else ()
        driver.send(worker, m.Inventory((*parts, *PROMPTS) if worker == "source0" else parts, ()))
    assert not driver.core.state.recovery.is_active
    assert driver.sent(driver.event(Tick()), m.Stop) == []  # the trainer needs its samples
    trained = driver.pull("trainer0", "train", step=0)
    assert trained is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    assert [worker for worker, _ in driver.sent(driver.event(Tick()), m.Stop)] == ["rollout0"]


def test_a_draining_worker_gets_no_new_slots(driver: CoreDriver) -> None:
    driver.send("watcher", m.Drain(1, "rollout0"))
    driver.offer()
    assert driver.pull("rollout0", "rollout") is None
    assert driver.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("absent", "there is no worker 'absent' in this run"),
        ("reward0", "reward0 is the only reward worker; start another one first"),
        ("trainer0", "the work of a trainer cannot be passed on"),
        ("source0", "the work of a source cannot be passed on"),
    ],
)
def test_an_impossible_drain_is_rejected_with_the_reason(driver: CoreDriver, worker: str, reason: str) -> None:
    commands = driver.send("watcher", m.Drain(5, worker))
    [(receiver, refusal)] = driver.sent(commands, m.Rejected)
    assert (receiver, refusal.request) == ("watcher", 5)
    assert reason in refusal.reason
    assert "watcher" not in refusal.reason  # no worker of the run
    assert driver.sent(commands, m.Drain) == []


def test_the_only_worker_of_a_role_may_drain_itself(driver: CoreDriver) -> None:
    assert driver.sent(driver.send("reward0", m.Drain(0, "reward0")), m.Drain) == [("reward0", m.Drain(0, "reward0"))]
    assert driver.sent(driver.event(Tick()), m.Stop)[0][0] == "reward0"


def test_only_an_observer_drains_other_workers(driver: CoreDriver) -> None:
    driver.assert_illegal("reward0", m.Drain(0, "rollout0"))


# ---- vacant roles


def test_a_required_role_may_be_vacant_until_the_timeout(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.now += driver.core.settings.role_vacancy_timeout_s - 1
    driver.event(Tick())
    assert driver.core.ended is None
    driver.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is None


def test_a_role_vacant_beyond_the_timeout_ends_the_run_with_the_reason(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.now += driver.core.settings.role_vacancy_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is not None
    assert "no reward worker for 61 s: reward0: killed" in driver.core.ended.reason


def test_the_loss_of_a_critical_worker_ends_the_run_at_once(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("trainer0"), "killed"))
    assert driver.core.ended is not None
    assert driver.core.ended.reason == "trainer0: killed (on host 'host')"


def test_a_role_whose_last_worker_drains_is_vacant_at_once(driver: CoreDriver) -> None:
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


def test_the_last_rollout_worker_stops_before_its_samples_are_trained(driver: CoreDriver) -> None:
    """It holds a sample that the trainer needs, but without a replacement no worker takes the next prompt."""
    driver.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    driver.offer(prompt=0)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    driver.send("rollout0", m.Drain(0, "rollout0"))
    driver.offer(prompt=1)
    assert driver.sent(driver.event(Tick()), m.Stop) == [], "it still generates"
    driver.send("rollout0", driver.generated(grant))
    [(receiver, stop)] = driver.sent(driver.event(Tick()), m.Stop)
    assert (receiver, stop.code) == ("rollout0", 0)


def test_a_drained_worker_is_remembered_until_it_joins_again(driver: CoreDriver) -> None:
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


def test_the_no_progress_timeout_starts_once_every_role_has_joined() -> None:
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


def test_a_run_that_a_role_never_joins_ends_and_names_the_role() -> None:
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


# ---- rollout workers that join late


def test_a_late_worker_fetches_the_newest_weights_before_it_gets_slots(driver: CoreDriver) -> None:
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.send("rollout0", m.WeightsStaged(MODEL, 1))
    driver.send("rollout0", m.WeightsActivated(MODEL, 1))
    driver.event(WorkerDisconnected(WorkerId("rollout1"), "killed"))
    driver.offer()
    driver.event(WorkerConnected(WorkerId("rollout1"), "rollout", "host"))
    fetches = driver.sent(driver.send("rollout1", m.WeightsActivated(MODEL, 0)), m.ReceiveWeights)
    assert driver.pull("rollout1", "rollout") is None, "it generates with the initial weights"
    [(receiver, fetch)] = fetches
    assert (receiver, fetch.turn.sender, fetch.weights.version) == ("rollout1", "rollout0", 1)
    driver.send("rollout1", m.WeightsStaged(MODEL, 1))
    granted = driver.sent(driver.send("rollout1", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [receiver for receiver, _ in granted] == ["rollout1"]


def test_an_observer_that_joins_does_not_delay_the_end_of_a_stalled_run() -> None:
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
def test_controller_settings_are_taken_from_the_configuration(name: str) -> None:
    base = defaults("arithmetic")
    change: dict[str, Any] = {name: "gloo" if name == "lanes" else 1234.5}
    changed = dataclasses.replace(base, controller=dataclasses.replace(base.controller, **change))
    assert getattr(grpo.settings(changed), name) == change[name]
