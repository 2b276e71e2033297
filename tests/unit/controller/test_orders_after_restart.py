"""A restarted controller carries on with the orders of the earlier one: drains, preemption, guards."""

from typing import Any

import pytest

from flowrt.controller.events import PreemptRun, Send, Tick, WorkerConnected, WorkerDisconnected
from flowrt.controller.policies.guards import GuardRule
from flowrt.errors import EXIT_GUARD
from flowrt.ids import OBSERVER, WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part
from tests.simulation.restarted_driver import RestartedDriver

PROMPT = (Part("prompt", (0,), (4,)), Part("answer", (0,), (1,)))
WORKERS = ("source0", "rollout0", "rollout1", "reward0", "evaluate0", "trainer0")
ORDER = PreemptRun("interrupted (SIGTERM)", 143)


def new_driver(**scenario: Any) -> RestartedDriver:
    driver = RestartedDriver(**{"steps": 4} | scenario)
    driver.configure(replaceable_roles=("rollout", "reward"), critical_roles=("trainer",))
    driver.event(WorkerConnected(WorkerId("watcher"), OBSERVER, "host"))
    return driver


def rejoin_all(driver: RestartedDriver, *but: str, **parts: tuple[Part, ...]) -> list[Any]:
    return [
        command for worker in WORKERS if worker not in but for command in driver.rejoin(worker, *parts.get(worker, ()))
    ]


def train_step(driver: RestartedDriver, step: int) -> None:
    """Train a step with a loss of 9."""
    driver.offer(prompt=step)
    grant = driver.pull("rollout1", "rollout")
    assert grant is not None
    driver.send("rollout1", driver.generated(grant))
    driver.score()
    assert driver.pull("trainer0", "train", step=step) is not None
    driver.send("trainer0", m.StepCompleted(step, (("loss", 9.0),)))


# ---- drains


def test_a_drain_goes_on_after_a_restart() -> None:
    driver = new_driver()
    driver.send("watcher", m.Drain(1, "rollout0"))
    driver.restart()
    assert driver.core.state.membership.drained == {"rollout0"}
    commands = rejoin_all(driver)
    assert driver.sent(commands, m.Drain) == [("rollout0", m.Drain(0, "rollout0"))]
    driver.offer()
    pull = m.Pull(request=1, stage="rollout", slots=1, tokens=0, step=-1)
    [(_, rejected)] = driver.sent(driver.send("rollout0", pull), m.Rejected)
    assert rejected.reason == "rollout0 is leaving the run"
    [(worker, stop)] = driver.sent(driver.event(Tick()), m.Stop)
    assert (worker, stop.code) == ("rollout0", 0)
    driver.send("rollout0", m.Leave(""))
    assert driver.core.ended is None


def test_a_worker_that_an_operator_drained_is_not_replaced_after_a_restart() -> None:
    driver = new_driver()
    driver.send("watcher", m.Drain(1, "rollout0"))
    driver.event(Tick())
    driver.send("rollout0", m.Leave(""))
    driver.restart()
    rejoin_all(driver, "rollout0")
    assert driver.core.state.membership.drained == {"rollout0"}
    driver.event(WorkerConnected(WorkerId("rollout0"), "rollout", "host"))
    assert not driver.core.state.membership.is_leaving(WorkerId("rollout0"))
    driver.restart()
    assert driver.core.state.membership.drained == set()


@pytest.mark.parametrize("is_gone_before", [True, False])
def test_a_replacement_does_not_drain(is_gone_before: bool) -> None:
    driver = new_driver()
    driver.send("reward0", m.Drain(0, "reward0"))
    if is_gone_before:
        driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.restart()
    rejoin_all(driver, "reward0")
    driver.time_out_recovery()
    driver.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    driver.restart()
    assert driver.sent(rejoin_all(driver), m.Drain) == []


# ---- preemption


def test_preemption_goes_on_after_a_restart() -> None:
    driver = new_driver()
    train_step(driver, 0)
    driver.event(ORDER)
    driver.restart()
    assert driver.sent(rejoin_all(driver), m.Drain) == [("trainer0", m.Drain(0, "trainer0"))]
    driver.send("trainer0", m.RoleCompleted())
    assert driver.core.ended is not None
    assert (driver.core.ended.reason, driver.core.ended.code) == ("interrupted (SIGTERM); saved after 1 steps", 143)


def test_the_order_to_leave_comes_before_the_rejection_of_a_pull() -> None:
    """A worker that was not told to leave would fail at the rejection."""
    driver = new_driver()
    train_step(driver, 0)
    driver.event(ORDER)
    driver.restart()
    commands = driver.rejoin("trainer0", is_late=True)
    commands += driver.send("trainer0", m.Pull(request=1, stage="train", slots=0, tokens=0, step=1))
    assert [type(command.message) for command in commands if isinstance(command, Send)] == [m.Drain, m.Rejected]


def test_trainers_that_saved_before_the_restart_end_the_run() -> None:
    driver = new_driver()
    train_step(driver, 0)
    driver.event(ORDER)
    driver.restart()
    driver.rejoin("trainer0", is_late=True)
    driver.send("trainer0", m.RoleCompleted())
    driver.send("trainer0", m.Inventory((), ()))
    rejoin_all(driver, "trainer0")
    assert driver.core.ended is not None
    assert driver.core.ended.code == 143


def test_the_time_to_save_begins_anew_after_a_restart() -> None:
    driver = new_driver()
    train_step(driver, 0)
    driver.event(ORDER)
    driver.restart()
    driver.now += 10_000.0
    rejoin_all(driver)
    assert driver.event(Tick()) == []
    driver.now += driver.core.settings.preemption_save_timeout_s + 1
    driver.event(Tick())
    assert driver.core.ended is not None
    assert driver.core.ended.code == 143


def test_a_step_whose_end_a_rank_waits_for_is_known_after_a_restart() -> None:
    driver = new_driver()
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    end = driver.pull("trainer0", "train", step=0)
    assert end is not None
    assert end.closed
    driver.restart()
    assert driver.core.state.window.share_ended_step == 0


# ---- guards


STOP = GuardRule("loss", above=1.0, steps=2, action="stop")


def test_a_stop_of_a_guard_ends_with_its_code_after_a_restart() -> None:
    driver = new_driver(guards=(STOP,), bound=3)
    train_step(driver, 0)
    train_step(driver, 1)
    assert driver.core.state.preemption.is_ordered
    driver.restart()
    rejoin_all(driver)
    driver.send("trainer0", m.RoleCompleted())
    assert driver.core.ended is not None
    assert driver.core.ended.code == EXIT_GUARD
    assert "loss" in driver.core.ended.reason


def test_violations_of_a_guard_are_counted_over_a_restart() -> None:
    driver = new_driver(guards=(STOP,), bound=3)
    train_step(driver, 0)
    driver.restart()
    assert driver.core.state.guards.violations == [1]
    rejoin_all(driver)
    train_step(driver, 1)
    assert driver.core.state.preemption.is_ordered


# ---- roles and sources


def test_a_role_that_was_vacant_is_vacant_after_a_restart() -> None:
    driver = new_driver()
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.restart()
    assert "reward" in driver.core.state.membership.joined_roles
    rejoin_all(driver, "reward0")
    driver.event(Tick())
    vacancies = {"reward": (0.0, "there was none when the controller came back")}
    assert driver.core.state.membership.vacancies(driver.now) == vacancies
    driver.event(WorkerConnected(WorkerId("reward0"), "reward", "host"))
    driver.restart()
    rejoin_all(driver)
    assert driver.core.state.membership.vacancies(driver.now) == {}


def test_a_role_that_was_completed_is_not_vacant_after_a_restart() -> None:
    driver = new_driver()
    driver.send("reward0", m.RoleCompleted())
    driver.send("reward0", m.Leave(""))
    driver.restart()
    rejoin_all(driver, "reward0")
    driver.event(Tick())
    assert driver.core.state.membership.vacancies(driver.now) == {}


def test_a_source_is_known_to_have_offered_after_a_restart() -> None:
    """Only such a source is told of evaluations that are lost."""
    driver = new_driver()
    driver.offer()
    driver.restart()
    rejoin_all(driver, source0=PROMPT)
    assert list(driver.core.state.requests.offerers) == ["source0"]
