"""The end of data: the last step is smaller, and later offers are answered when it has ended."""

from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver


def test_end_of_data_closes_the_last_step_with_fewer_groups() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    assert driver.pull("trainer0", "train", 0) is None  # the step needs one more group
    granted = driver.sent(driver.send("source0", m.EndOfData("train")), m.Grant)
    assert [(worker, grant.closed) for worker, grant in granted] == [("trainer0", True)]
    assert driver.core.state.window.quota == 1


def test_an_offer_after_the_end_of_data_is_answered_when_the_last_step_ends() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.ready_to_train()
    driver.send("source0", m.EndOfData("train"))
    assert not driver.sent(driver.offer(prompt=9), m.OfferAccepted)
    assert driver.pull("trainer0", "train", 0) is not None
    assert not driver.core.state.window.over
    closed = driver.send("trainer0", m.StepCompleted(0, ()))
    assert [opened.first for _, opened in driver.sent(closed, m.OfferAccepted)] == [-1]
    assert driver.core.state.window.over


def test_a_run_without_data_is_over_at_once() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.send("source0", m.EndOfData("train"))
    assert [opened.first for _, opened in driver.sent(driver.offer(prompt=9), m.OfferAccepted)] == [-1]
    grant = driver.pull("trainer0", "train", 0)
    assert grant is not None
    assert grant.closed
