"""A time in which the controller did not run counts against no worker, lease or role."""

import pytest

from flowrt.controller.events import ControllerStalled, Dismiss, EndRun, PreemptRun, Tick, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver

TIMEOUT_S, STALL_S = 30.0, 600.0


@pytest.fixture
def driver() -> CoreDriver:
    """Every deadline has `TIMEOUT_S`."""
    driver = CoreDriver(steps=4)
    driver.configure(
        worker_timeout_s=TIMEOUT_S,
        no_progress_timeout_s=TIMEOUT_S,
        role_vacancy_timeout_s=TIMEOUT_S,
        lease_s=TIMEOUT_S,
        preemption_save_timeout_s=TIMEOUT_S,
        replaceable_roles=("reward",),
        critical_roles=("trainer",),
    )
    driver.core.state.membership._timeout_s = TIMEOUT_S
    return driver


def stall(driver: CoreDriver) -> None:
    driver.now += STALL_S
    assert driver.event(ControllerStalled(STALL_S)) == []


def dismissed(driver: CoreDriver) -> int:
    return sum(isinstance(command, Dismiss) for command in driver.event(Tick()))


def test_workers_are_not_silent_and_leases_do_not_expire_while_the_controller_does_not_run(driver: CoreDriver) -> None:
    driver.offer()
    assert driver.pull("rollout0", "rollout") is not None
    driver.now += TIMEOUT_S - 1
    stall(driver)
    assert dismissed(driver) == 0
    assert len(driver.core.state.table.leases) == 1
    assert driver.core.ended is None
    driver.now += 2.0
    assert dismissed(driver) > 0


def test_a_role_is_not_vacant_for_a_time_in_which_the_controller_does_not_run(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("reward0"), "killed"))
    driver.now += TIMEOUT_S - 1
    stall(driver)
    driver.event(Tick())
    assert driver.core.ended is None


def test_a_checkpoint_is_awaited_by_time_in_which_the_controller_runs(driver: CoreDriver) -> None:
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.event(PreemptRun("the time limit", 130))
    driver.now += TIMEOUT_S - 1
    stall(driver)
    for worker in ("source0", "rollout0", "rollout1", "reward0", "evaluate0", "trainer0"):
        driver.send(worker, m.Heartbeat())
    assert driver.core.ended is None
    driver.now += 2.0
    assert any(isinstance(command, EndRun) for command in driver.event(Tick()))
