"""When the prompts run out the last step is smaller, and whoever offers more is told only at the end."""

from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver


def test_the_last_step_takes_what_is_there() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    assert driver.pull("trainer0", "train", 0) is None  # the step has a place left: it waits for another group
    granted = driver.sent(driver.send("source0", m.EndOfData("train")), m.Grant)
    assert [(who, grant.closed) for who, grant in granted] == [("trainer0", True)]
    assert driver.core.state.window.quota == 1


def test_an_offer_after_the_last_prompt_is_answered_by_the_end_of_the_last_step() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.ready_to_train()
    driver.send("source0", m.EndOfData("train"))
    assert not driver.sent(driver.offer(prompt=9), m.OfferAccepted)
    assert driver.pull("trainer0", "train", 0) is not None
    assert not driver.core.state.window.over
    closed = driver.send("trainer0", m.StepCompleted(0, ()))
    assert [opened.first for _, opened in driver.sent(closed, m.OfferAccepted)] == [-1]
    assert driver.core.state.window.over


def test_nothing_to_train_at_all_is_over_at_once() -> None:
    driver = CoreDriver(groups_per_step=2, steps=5)
    driver.send("source0", m.EndOfData("train"))
    assert [opened.first for _, opened in driver.sent(driver.offer(prompt=9), m.OfferAccepted)] == [-1]
    grant = driver.pull("trainer0", "train", 0)
    assert grant is not None
    assert grant.closed
