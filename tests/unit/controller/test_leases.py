"""Leases: their numbers after a controller restart, and their duration relative to the no-progress timeout."""

from flowrt.controller.settings import Settings
from flowrt.protocol import messages as m
from flowrt.recipes.config_io import parse
from tests.simulation.core_driver import CoreDriver


def test_renewing_a_lease_numbered_from_first_lease_on_is_illegal() -> None:
    """The number would be issued to another worker later, and the slots of the renewed lease would be lost."""
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


def test_leases_expire_before_the_no_progress_timeout() -> None:
    """The lease of a hung rollout worker ends in time for another worker to do its work."""
    controller = parse([]).controller
    assert controller.lease_s < controller.no_progress_timeout_s
    assert Settings().lease_s < Settings().no_progress_timeout_s
