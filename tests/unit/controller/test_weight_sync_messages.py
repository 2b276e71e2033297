"""Weight sync policies in a run, message by message: which workers fetch which version, and which fetch early."""

from typing import Any

import pytest

from flowrt.controller.events import Command, Send, WorkerConnected
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling, WeightSyncPolicy
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, offered_lengths, whole

ROLLOUTS = ("rollout0", "rollout1", "rollout2")


def three_receivers(policy: WeightSyncPolicy, **scenario: Any) -> CoreDriver:
    """Three receivers; admission blocks none of them unless the scenario sets a smaller bound."""
    driver = CoreDriver(weight_sync=policy, **{"bound": 9, "steps": 9} | scenario)
    driver.event(WorkerConnected(WorkerId("rollout2"), "rollout", "host"))
    driver.send("rollout2", m.WeightsActivated(MODEL, 0))
    return driver


def fetching(driver: CoreDriver, commands: list[Command]) -> list[str]:
    return [who for who, _ in driver.sent(commands, m.ReceiveWeights)]


def publish(driver: CoreDriver, version: int, divergence: dict[int, float] | None = None) -> list[str]:
    """Publish a version; returns the workers that are ordered to fetch."""
    return fetching(driver, driver.send("trainer0", m.Publish((whole(version),), tuple((divergence or {}).items()))))


def offer_for(driver: CoreDriver, version: int, prompts: int) -> list[str]:
    """Offer prompts that require at least this version; returns the workers that are ordered to fetch."""
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


# ---- workers that admission blocks fetch early


def test_every_worker_blocked_by_admission_fetches() -> None:
    driver = three_receivers(EveryN(50), bound=0)
    assert [driver.pull(who, "rollout") for who in ROLLOUTS] == [None] * 3
    assert publish(driver, 1) == []  # no slot is ready that it would unblock
    assert offer_for(driver, 1, prompts=4) == [*ROLLOUTS]


def test_workers_that_wait_for_a_version_fetch_it_when_it_is_published() -> None:
    driver = three_receivers(EveryN(50), bound=0)
    assert [driver.pull(who, "rollout") for who in ROLLOUTS] == [None] * 3
    assert offer_for(driver, 1, prompts=4) == []  # the version is not published yet
    assert publish(driver, 1) == [*ROLLOUTS]


def test_only_waiting_workers_blocked_by_their_version_fetch_early() -> None:
    driver = three_receivers(EveryN(50), bound=0)
    for version in (1, 2):
        assert publish(driver, version) == []
    driver.send("rollout1", m.WeightsActivated(MODEL, 1))  # it loaded that version from elsewhere
    assert [driver.pull(who, "rollout") for who in ROLLOUTS[:2]] == [None] * 2
    assert offer_for(driver, 1, prompts=4) == ["rollout0"]  # rollout1 is new enough, rollout2 has no open pull


# ---- a return to an older version, for an evaluation


def test_versions_are_evicted_before_the_older_version_is_fetched_again() -> None:
    driver = CoreDriver(weight_sync=DelayedUpdate(), bound=9, steps=9)
    publish(driver, 1)
    for who in ("rollout0", "rollout1"):
        driver.send(who, m.WeightsStaged(MODEL, 1))
        driver.send(who, m.WeightsActivated(MODEL, 1))
    publish(driver, 2)
    offer = m.Offer(
        request=0,
        flow="eval",
        prompts=(0,),
        epoch=1,
        members=1,
        at_least=1,
        lengths=offered_lengths(4, 1),
        tags=(),
        at_most=1,
    )
    driver.send("source0", offer)
    commands = driver.send("rollout0", m.WeightsStaged(MODEL, 2))  # it is pinned to version 1
    orders = [
        (
            type(command.message),
            command.message.version if isinstance(command.message, m.EvictVersion) else command.message.older,
        )
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, m.EvictVersion | m.ReceiveWeights)
        if command.worker == "rollout0"
    ]
    assert orders == [(m.EvictVersion, 1), (m.EvictVersion, 2), (m.ReceiveWeights, True)]


# ---- the policies


def test_a_rolling_update_limits_the_workers_between_fetch_and_activation() -> None:
    driver = three_receivers(Rolling(1))
    assert publish(driver, 1) == ["rollout0"]
    for current, following in zip(ROLLOUTS, [["rollout1"], ["rollout2"], []], strict=True):
        assert fetching(driver, driver.send(current, m.WeightsStaged(MODEL, 1))) == []
        assert fetching(driver, driver.send(current, m.WeightsActivated(MODEL, 1))) == following


def test_workers_too_far_behind_do_not_wait_for_a_rolling_update() -> None:
    driver = three_receivers(Rolling(1, max_behind=1))
    assert publish(driver, 1) == ["rollout0"]
    assert publish(driver, 2) == ["rollout1", "rollout2"]


def test_every_n_skips_the_versions_in_between() -> None:
    driver = three_receivers(EveryN(3))
    for version in range(1, 7):
        due = [*ROLLOUTS] if version in (3, 6) else []
        assert publish(driver, version) == due
        for who in due:
            assert fetching(driver, driver.send(who, m.WeightsStaged(MODEL, version))) == []
            assert fetching(driver, driver.send(who, m.WeightsActivated(MODEL, version))) == []


def test_a_version_is_fetched_when_the_reported_divergence_is_too_large() -> None:
    driver = three_receivers(Divergence(0.1, 100))
    assert publish(driver, 1, {0: 0.01}) == []
    driver.send("rollout2", m.WeightsActivated(MODEL, 1))  # its divergence from later versions is not measured
    assert publish(driver, 2, {0: 0.05}) == []
    assert publish(driver, 3, {0: 0.2}) == ["rollout0", "rollout1"]


@pytest.mark.parametrize("policy", [Divergence(0.1, 3), Divergence(float("inf"), 3)])
def test_without_a_measured_divergence_the_latest_is_fetched_at_max_age(policy: Divergence) -> None:
    driver = three_receivers(policy)
    assert [publish(driver, version) for version in (1, 2, 3)] == [[], [], [*ROLLOUTS]]
