"""Refresh policies in a run, message by message: who is told to fetch which version, and who is hurried."""

from typing import Any

import pytest

from flowrt.controller.events import Command, WorkerConnected
from flowrt.controller.policies.weight_sync import Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, offered_lengths, whole

ROLLOUTS = ("rollout0", "rollout1", "rollout2")


def three(refresh: WeightSyncPolicy, **scenario: Any) -> CoreDriver:
    """Three receivers, whom admission does not keep from anything unless the scenario says so."""
    driver = CoreDriver(refresh=refresh, **{"bound": 9, "steps": 9} | scenario)
    driver.event(WorkerConnected(WorkerId("rollout2"), "rollout", "host"))
    driver.send("rollout2", m.WeightsActivated(MODEL, 0))
    return driver


def fetching(driver: CoreDriver, commands: list[Command]) -> list[str]:
    return [who for who, _ in driver.sent(commands, m.ReceiveWeights)]


def publish(driver: CoreDriver, version: int, divergence: dict[int, float] | None = None) -> list[str]:
    """Who is told to fetch when this version is published."""
    return fetching(driver, driver.send("trainer0", m.Publish((whole(version),), tuple((divergence or {}).items()))))


def offer_for(driver: CoreDriver, version: int, prompts: int) -> list[str]:
    """Prompts that may not be answered by older versions are offered: who is told to fetch."""
    offer = m.Offer(
        request=0,
        flow="eval",
        prompts=tuple(range(prompts)),
        epoch=0,
        members=1,
        at_least=version,
        lengths=offered_lengths(4, 1, prompts=prompts),
        tags=(),
    )
    return fetching(driver, driver.send("source0", offer))


# ---- everybody whom admission stops is hurried


def test_everybody_whom_admission_stops_fetches_not_only_the_first_in_line() -> None:
    driver = three(EveryN(50), bound=0)
    assert [driver.pull(who, "rollout") for who in ROLLOUTS] == [None] * 3
    assert publish(driver, 1) == []  # there is nothing that it would let anybody start
    assert offer_for(driver, 1, prompts=4) == [*ROLLOUTS]


def test_whoever_waited_before_the_version_came_fetches_when_it_comes() -> None:
    driver = three(EveryN(50), bound=0)
    assert [driver.pull(who, "rollout") for who in ROLLOUTS] == [None] * 3
    assert offer_for(driver, 1, prompts=4) == []  # and there is nothing to fetch
    assert publish(driver, 1) == [*ROLLOUTS]


def test_whoever_is_stopped_by_what_is_ready_is_hurried_and_the_others_are_not() -> None:
    driver = three(EveryN(50), bound=0)
    for version in (1, 2):
        assert publish(driver, version) == []
    driver.send("rollout1", m.WeightsActivated(MODEL, 1))  # it read that version from somewhere else
    assert [driver.pull(who, "rollout") for who in ROLLOUTS[:2]] == [None] * 2
    assert offer_for(driver, 1, prompts=4) == ["rollout0"]  # what the second one has will do, the third has not asked


# ---- the policies


def test_a_rolling_refresh_has_so_many_at_a_time_from_their_fetch_until_their_swap() -> None:
    driver = three(Rolling(1))
    assert publish(driver, 1) == ["rollout0"]
    for now, following in zip(ROLLOUTS, [["rollout1"], ["rollout2"], []], strict=True):
        assert fetching(driver, driver.send(now, m.WeightsStaged(MODEL, 1))) == []
        assert fetching(driver, driver.send(now, m.WeightsActivated(MODEL, 1))) == following


def test_in_a_rolling_refresh_whoever_is_too_far_behind_does_not_wait_for_its_turn() -> None:
    driver = three(Rolling(1, max_behind=1))
    assert publish(driver, 1) == ["rollout0"]
    assert publish(driver, 2) == ["rollout1", "rollout2"]


def test_a_refresh_every_three_versions_skips_those_between() -> None:
    driver = three(EveryN(3))
    for version in range(1, 7):
        due = [*ROLLOUTS] if version in (3, 6) else []
        assert publish(driver, version) == due
        for who in due:
            assert fetching(driver, driver.send(who, m.WeightsStaged(MODEL, version))) == []
            assert fetching(driver, driver.send(who, m.WeightsActivated(MODEL, version))) == []


def test_a_version_is_fetched_when_the_trainer_says_that_it_has_moved_away_from_the_one_in_use() -> None:
    driver = three(Divergence(0.1, 100))
    assert publish(driver, 1, {0: 0.01}) == []
    driver.send("rollout2", m.WeightsActivated(MODEL, 1))  # nobody has measured how far that is from the later ones
    assert publish(driver, 2, {0: 0.05}) == []
    assert publish(driver, 3, {0: 0.2}) == ["rollout0", "rollout1"]


@pytest.mark.parametrize("refresh", [Divergence(0.1, 3), Divergence(float("inf"), 3)])
def test_what_nobody_has_measured_is_fetched_when_it_is_too_old(refresh: Divergence) -> None:
    driver = three(refresh)
    assert [publish(driver, version) for version in (1, 2, 3)] == [[], [], [*ROLLOUTS]]
