"""Who fetches what from whom after something went wrong, message by message."""

import itertools

import pytest

from flowrt.controller.events import Command, EndRun, Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, whole

FIRST, SECOND = "rollout0", "rollout1"


def fetches(driver: CoreDriver, commands: list[Command]) -> list[tuple[str, str]]:
    """(receiver, sender) of every fetch that is ordered."""
    return [(who, fetch.turn.sender) for who, fetch in driver.sent(commands, m.ReceiveWeights)]


def published(driver: CoreDriver) -> dict[str, m.ReceiveWeights]:
    """Version 1 is on its way from the trainer to the first receiver, and from there to the second."""
    orders = driver.sent(driver.send("trainer0", m.Publish((whole(1),), ())), m.ReceiveWeights)
    assert [(who, order.turn.sender) for who, order in orders] == [(FIRST, "trainer0"), (SECOND, FIRST)]
    return dict(orders)


def failed(order: m.ReceiveWeights) -> m.FetchFailed:
    return m.FetchFailed(order.turn, order.weights, "the lane broke")


def test_a_relay_that_failed_does_not_fetch_from_the_one_that_waits_for_it() -> None:
    driver = CoreDriver()
    orders = published(driver)
    assert fetches(driver, driver.send(FIRST, failed(orders[FIRST]))) == [(FIRST, "trainer0")]


def test_a_relay_is_not_to_blame_for_what_failed_above_it() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, failed(orders[FIRST]))
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == [(SECOND, FIRST)]


def test_a_holder_that_did_not_deliver_is_avoided() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, m.WeightsStaged(MODEL, 1))
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == [(SECOND, "trainer0")]


def test_a_failure_is_told_of_one_transfer_only() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, failed(orders[FIRST]))
    again = driver.send(SECOND, failed(orders[SECOND]))
    assert fetches(driver, again) == [(SECOND, FIRST)]
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == []
    assert driver.core.state.models.policy.fetching[WorkerId(SECOND)].holder == FIRST


def test_what_came_whole_from_a_holder_that_is_gone_can_be_fetched_and_retired() -> None:
    driver = CoreDriver()
    published(driver)
    driver.event(WorkerDisconnected(WorkerId(FIRST), ""))
    driver.send("trainer0", m.Publish((whole(2),), ()))
    # All of version 1 had arrived before the holder died; its receiver's next fetch is under way already.
    driver.send(SECOND, m.WeightsStaged(MODEL, 1))
    retired = driver.sent(driver.send(SECOND, m.WeightsStaged(MODEL, 2)), m.EvictVersion)
    assert (SECOND, 1) in [(who, order.version) for who, order in retired]


def test_a_version_that_died_with_its_publisher_is_not_waited_for() -> None:
    driver = CoreDriver(bound=1)
    published(driver)
    for receiver in (FIRST, SECOND):
        driver.send(receiver, m.WeightsStaged(MODEL, 1))
        driver.send(receiver, m.WeightsActivated(MODEL, 1))
    [(_, order), _] = driver.sent(driver.send("trainer0", m.Publish((whole(2),), ())), m.ReceiveWeights)
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    weights = driver.core.state.models.policy
    assert (weights.latest, weights.newest) == (1, 2)
    driver.send(FIRST, failed(order))
    driver.event(WorkerConnected(WorkerId("rollout2"), "rollout", "host"))
    assert fetches(driver, driver.send("rollout2", m.WeightsActivated(MODEL, 0))) == [("rollout2", SECOND)]
    driver.offer()
    assert driver.pull("rollout2", "rollout") is None  # it came in the middle: it begins with what it fetches
    driver.send("rollout2", m.WeightsStaged(MODEL, 1))
    granted = driver.sent(driver.send("rollout2", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout2"]


def test_who_needs_a_version_that_is_gone_waits_for_the_next_and_says_so() -> None:
    driver = CoreDriver()
    published(driver)
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    driver.event(WorkerConnected(WorkerId("trainer1"), "trainer", "host"))
    driver.offer(at_least=1)
    assert driver.pull(FIRST, "rollout") is None
    [wait] = [edge for edge in driver.core.wait_graph(driver.now, request_timeout_s=600.0).waits if edge.who == FIRST]
    assert (wait.limit_s, wait.what.partition(", and ")[2]) == (
        600.0,
        "version 1 is gone with who published it: the next one has to be published",
    )
    driver.assert_illegal("trainer1", m.Publish((whole(1),), ()))
    assert (FIRST, "trainer1") in fetches(driver, driver.send("trainer1", m.Publish((whole(2),), ())))


def test_what_came_whole_just_before_its_publisher_died_is_the_latest_again() -> None:
    driver = CoreDriver()
    published(driver)
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert driver.core.state.models.policy.latest == 0
    assert (
        fetches(driver, driver.send(FIRST, m.WeightsStaged(MODEL, 1))) == []
    )  # the second still waits for it on its broken lane
    assert driver.core.state.models.policy.latest == 1


def test_a_transfer_that_fails_for_ever_is_no_progress() -> None:
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    order = published(driver)[FIRST]
    while driver.core.ended is None:
        driver.now += 1.0
        told = driver.send(FIRST, failed(order))
        commands = driver.event(Tick())  # it is told to try again then, if it was given a rest
        order = dict(driver.sent([*told, *commands], m.ReceiveWeights)).get(FIRST, order)
        assert driver.now < 20.0
    assert [type(command) for command in commands] == [EndRun]


def test_a_receiver_whose_fetches_keep_failing_is_told_to_try_less_and_less_often() -> None:
    driver = CoreDriver()
    orders = published(driver)
    began_s: list[float] = []
    driver.send(SECOND, m.WeightsStaged(MODEL, 1))
    [(_, order)] = driver.sent(
        driver.send(FIRST, failed(orders[FIRST])), m.ReceiveWeights
    )  # of another holder, at once
    while len(began_s) < 9:
        commands = driver.send(FIRST, failed(order))
        while not (again := driver.sent(commands, m.ReceiveWeights)):
            driver.now += 0.05
            commands = driver.event(Tick())
        [(_, order)] = again
        began_s.append(driver.now)
    waited_s = [later - earlier for earlier, later in itertools.pairwise(began_s)]
    assert waited_s == sorted(waited_s)
    assert waited_s[0] == pytest.approx(0.2, abs=0.051)
    assert waited_s[-1] == pytest.approx(5.0, abs=0.051)
    driver.send(FIRST, m.WeightsStaged(MODEL, 1))
    [(_, order), _] = driver.sent(driver.send("trainer0", m.Publish((whole(2),), ())), m.ReceiveWeights)
    assert fetches(driver, driver.send(order.turn.receiver, failed(order)))  # what came since then counts
