"""How long a restarted controller waits for the workers of its predecessor."""

from flowrt.controller.events import Tick
from flowrt.protocol import messages as m
from flowrt.recipes import grpo
from flowrt.recipes.config_io import defaults
from tests.property.test_fuzz_rejoin import restarted


def test_a_busy_worker_is_awaited_for_as_long_as_it_may_be_silent() -> None:
    """A trainer that holds the interpreter notices late that its controller was restarted."""
    settings = grpo.settings(defaults("arithmetic"))
    driver, _ = restarted()
    driver.configure(
        rejoin_timeout_s=settings.rejoin_timeout_s,
        worker_timeout_s=settings.worker_timeout_s,
        critical_roles=settings.critical_roles,
    )
    driver.event(Tick())
    driver.now += 0.9 * settings.worker_timeout_s
    driver.event(Tick())
    driver.send("trainer0", m.Inventory((), ()))
    assert driver.core.ended is None
