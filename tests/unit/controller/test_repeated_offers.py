"""Prompts that are offered twice, by two sources, by one after its restart, or over restarts of the controller."""

from typing import Any

import pytest

from flowrt.controller.events import Command, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import NO_LIMIT, WORD_BITS
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import offered_lengths

REQUESTS = iter(range(100, 10**6))


def driver_of(**scenario: Any) -> CoreDriver:
    """A driver with two sources."""
    driver = CoreDriver(bound=8, **scenario)
    driver.configure(source_roles=("source", "source1"))
    join(driver, "source1")
    return driver


def join(driver: CoreDriver, worker: str) -> None:
    driver.event(WorkerConnected(WorkerId(worker), worker.rstrip("0"), "host"))


def offer(
    driver: CoreDriver, source: str, *prompts: int, flow: str = "train", version: int = NO_LIMIT
) -> list[Command]:
    message = m.Offer(
        request=next(REQUESTS),
        flow=flow,
        prompts=prompts,
        epoch=0,
        members=1,
        at_least=0,
        lengths=offered_lengths(4, 1, prompts=len(prompts)),
        tags=(),
        at_most=version,
    )
    return driver.send(source, message)


def accepted(driver: CoreDriver, commands: list[Command]) -> list[tuple[str, int]]:
    return [(worker, message.first) for worker, message in driver.sent(commands, m.OfferAccepted)]


def refusal(driver: CoreDriver, commands: list[Command]) -> str:
    [(_, message)] = driver.sent(commands, m.Rejected)
    return str(message.reason)


@pytest.mark.parametrize("second", ["source0", "source1"])
def test_a_prompt_is_opened_once_in_an_epoch(second: str) -> None:
    driver = driver_of()
    assert accepted(driver, offer(driver, "source0", 0)) == [("source0", 0)]
    assert "prompts [0] of epoch 0, which were offered before" in refusal(driver, offer(driver, second, 0))
    assert accepted(driver, offer(driver, second, WORD_BITS)) == [(second, 1)]
    assert len(driver.core.state.window.waiting) == 2


def test_an_offer_that_names_a_prompt_twice_is_refused() -> None:
    driver = driver_of()
    assert "names a prompt twice" in refusal(driver, offer(driver, "source0", 3, 3))


def test_a_trained_prompt_is_refused() -> None:
    driver = driver_of()
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", step=0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    assert not driver.core.state.table.groups
    assert "offered before" in refusal(driver, offer(driver, "source1", 0))


def test_an_offer_that_waits_is_refused_when_another_source_has_opened_its_prompt() -> None:
    driver = CoreDriver(bound=0)
    driver.configure(source_roles=("source", "source1"))
    join(driver, "source1")
    driver.ready_to_train()
    assert offer(driver, "source0", 1) == []
    assert offer(driver, "source1", 1) == []
    assert driver.pull("trainer0", "train", step=0) is not None
    commands = driver.send("trainer0", m.StepCompleted(0, ()))
    assert accepted(driver, commands) == [("source0", 1)]
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert [group.prompt for group in driver.core.state.table.groups.values()] == [1]


def test_a_prompt_whose_source_left_is_unread_and_may_be_offered_again() -> None:
    driver = driver_of()
    offer(driver, "source0", 0)
    driver.event(WorkerDisconnected(WorkerId("source0"), "killed"))
    assert accepted(driver, offer(driver, "source1", 0)) == [("source1", 1)]


def test_an_evaluation_that_another_source_waits_for_is_refused() -> None:
    driver = driver_of()
    assert accepted(driver, offer(driver, "source0", 0, 1, flow="eval", version=0)) == [("source0", 0)]
    reason = refusal(driver, offer(driver, "source1", 1, flow="eval", version=0))
    assert "source0 has offered it and waits for its results" in reason
    driver.event(WorkerDisconnected(WorkerId("source0"), "killed"))
    assert not driver.core.state.table.groups
    assert accepted(driver, offer(driver, "source1", 0, 1, flow="eval", version=0)) == [("source1", 2)]


def test_an_evaluation_that_its_source_offers_again_replaces_the_first() -> None:
    """The source has not received the answer to its first offer, because the controller was restarted."""
    driver = driver_of()
    offer(driver, "source0", 0, flow="eval", version=0)
    assert accepted(driver, offer(driver, "source0", 0, flow="eval", version=0)) == [("source0", 1)]
    assert list(driver.core.state.table.groups) == [1]


def test_a_generated_sample_is_scored_without_its_source() -> None:
    """The worker that generated it holds all group columns, also those that only the reward stage needs."""
    driver = driver_of()
    offer(driver, "source0", 0)
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    assert {part.column for part in grant.parts} == {"prompt", "answer"}
    driver.send("rollout0", driver.generated(grant))
    driver.event(WorkerDisconnected(WorkerId("source0"), "killed"))
    scoring = driver.pull("reward0", "reward")
    assert scoring is not None
    assert {incoming.turn.sender for incoming in scoring.incoming} == {"rollout0"}
    assert {part.column for incoming in scoring.incoming for part in incoming.parts} == {"answer", "response"}
