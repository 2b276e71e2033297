"""The exit code of a run whose trainer fails: 2 where the trainer says that the input is bad, otherwise 1."""

import pytest

from flowrt.controller.events import WorkerDisconnected
from flowrt.errors import EXIT_BAD_INPUT, EXIT_DISMISSED, EXIT_FAILED, EXIT_OK
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver


@pytest.fixture
def driver() -> CoreDriver:
    driver = CoreDriver(steps=4)
    driver.configure(replaceable_roles=("rollout", "reward"), critical_roles=("trainer",))
    return driver


@pytest.mark.parametrize(
    ("code", "of_run"),
    [
        (EXIT_BAD_INPUT, EXIT_BAD_INPUT),
        (EXIT_FAILED, EXIT_FAILED),
        (EXIT_OK, EXIT_FAILED),
        (EXIT_DISMISSED, EXIT_FAILED),
        (-1, EXIT_FAILED),
    ],
)
def test_a_run_ends_with_bad_input_only_if_its_trainer_does(driver: CoreDriver, code: int, of_run: int) -> None:
    driver.send("trainer0", m.Leave("rollout and trainer disagree", code))
    assert driver.core.ended is not None
    assert driver.core.ended.code == of_run
    assert "rollout and trainer disagree" in driver.core.ended.reason


def test_a_lost_trainer_is_no_bad_input(driver: CoreDriver) -> None:
    driver.event(WorkerDisconnected(WorkerId("trainer0"), "its connection broke"))
    assert driver.core.ended is not None
    assert driver.core.ended.code == EXIT_FAILED


def test_a_replaceable_worker_with_bad_input_does_not_end_the_run(driver: CoreDriver) -> None:
    driver.send("rollout0", m.Leave("no memory", EXIT_BAD_INPUT))
    assert driver.core.ended is None
