"""Leases: their numbers after a controller has come back, and their length beside that of a stall."""

from flowrt.controller.settings import Settings
from flowrt.protocol import messages as m
from flowrt.recipes.config_io import parse
from tests.simulation.core_driver import CoreDriver


def test_a_lease_of_before_has_a_number_of_before() -> None:
    """Else the same number would be given to somebody else one day, and take the first one's slots out of the world."""
    driver = CoreDriver()
    driver.offer()
    (slot,) = driver.core.state.table.slots.values()
    for number in (driver.core.state.table.first_lease, driver.core.state.table.first_lease + 5):
        driver.assert_illegal(
            "rollout0", m.RenewLease(lease=number, stage="rollout", step=-1, slots=(slot.id,), attempts=(slot.attempt,))
        )
    grant = driver.pull("rollout1", "rollout")
    assert grant is not None
    assert grant.slots == (slot.id,)


def test_work_that_is_held_comes_back_before_a_run_counts_as_stalled() -> None:
    """A rollout worker that hangs is one of several: its lease ends, and somebody else does it."""
    controller = parse([]).controller
    assert controller.lease_s < controller.no_progress_timeout_s
    assert Settings().lease_s < Settings().no_progress_timeout_s
