"""A restarted controller, and what workers report to it that they held or did under the earlier one."""

from typing import Any

import pytest

from flowrt.controller.events import (
    KernelAlive,
    Send,
    WorkerConnected,
)
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Part
from tests.simulation.core_driver import CoreDriver
from tests.simulation.restarted_driver import RestartedDriver
from tests.simulation.scenario import whole

OTHERS = ("rollout1", "reward0", "evaluate0", "trainer0")
PROMPT = (Part("prompt", (0,), (4,)), Part("answer", (0,), (1,)))
RESPONSE = (Part("response", (0,), (3,)), Part("logprobs", (0,), (3,)))


@pytest.fixture
def driver() -> RestartedDriver:
    """rollout0 has generated a sample. The controller is restarted; all have rejoined, but its inventory is late."""
    driver = RestartedDriver(steps=4)
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert grant.slots == (0,)
    driver.send("rollout0", driver.generated(grant))
    driver.restart()
    driver.rejoin("source0", *PROMPT)
    for worker in OTHERS:
        driver.rejoin(worker)
    driver.rejoin("rollout0", is_late=True)
    driver.time_out_recovery()
    return driver


def test_a_late_inventory_makes_no_stale_column_current(driver: RestartedDriver) -> None:
    again = driver.pull("rollout1", "rollout")
    assert again is not None
    driver.send("rollout1", driver.generated(again))
    commands = driver.send("rollout0", m.Inventory(RESPONSE, ()))
    released = driver.sent(commands, m.ReleaseTensors)
    assert sorted(released, key=repr) == [
        ("rollout0", m.ReleaseTensors(("logprobs",), (0,), (0,))),
        ("rollout0", m.ReleaseTensors(("response",), (0,), (0,))),
    ]
    owners = {
        column: holding.owners for column, holding in driver.core.state.table.slots[again_slot(again)].tensors.items()
    }
    assert owners == {"response": {"rollout1"}, "logprobs": {"rollout1"}}


def again_slot(grant: m.Grant) -> Any:
    (slot,) = grant.slots
    return slot


def test_a_worker_gets_no_work_before_its_inventory(driver: RestartedDriver) -> None:
    """The order to free its older tensors would free those that it makes in the meantime."""
    assert driver.pull("rollout0", "rollout") is None
    [(worker, what, _)] = driver.core.waiting()
    assert (worker, what) == ("rollout0", "the inventory of rollout0, which came back from an earlier controller")
    assert driver.core.deadlock(driver.now + 1000.0, (), 0.0) == ""
    commands = driver.send("rollout0", m.Inventory(RESPONSE, ()))
    orders = [
        (type(command.message), command.message)
        for command in commands
        if isinstance(command, Send) and command.worker == "rollout0"
    ]
    assert [kind for kind, _ in orders] == [m.ReleaseTensors, m.ReleaseTensors, m.Grant]


def test_a_worker_without_its_inventory_blocks_no_other(driver: RestartedDriver) -> None:
    assert driver.pull("rollout0", "rollout") is None
    assert driver.pull("rollout1", "rollout") is not None


def test_a_late_inventory_does_not_replace_the_publisher(driver: RestartedDriver) -> None:
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.send("rollout0", m.Inventory((), ()))
    driver.event(WorkerConnected(WorkerId("trainer1"), "trainer", "host", (), 1))
    driver.send("trainer1", m.Inventory((), (whole(0),)))
    assert driver.core.state.models.policy.publisher == "trainer0"


def test_the_step_of_a_trainer_is_not_renewed_after_recovery() -> None:
    """Its samples may have been made again."""
    driver = RestartedDriver(steps=4)
    driver.ready_to_train()
    grant = driver.pull("trainer0", "train", step=0)
    assert grant is not None
    driver.restart()
    driver.rejoin("source0", *PROMPT)
    for worker in ("rollout1", "reward0", "evaluate0"):
        driver.rejoin(worker)
    driver.rejoin("rollout0", *RESPONSE)
    driver.rejoin("trainer0", is_late=True)
    driver.time_out_recovery()
    driver.send("trainer0", m.RenewLease(grant.lease, "train", 0, grant.slots, grant.attempts))
    assert driver.core.ended is not None
    assert "it came back too late, its work on step 0 is not its own" in driver.core.ended.reason


def test_a_late_sign_of_life_does_not_make_a_worker_silent() -> None:
    driver = CoreDriver(steps=4)
    driver.now = 50.0
    driver.send("rollout0", m.Heartbeat(1.0, 0.0, 0.0))
    driver.event(KernelAlive(WorkerId("rollout0"), 20.0))
    [member] = [member for member in driver.core.state.membership.members() if member.id == "rollout0"]
    assert member.seen_s == 50.0
