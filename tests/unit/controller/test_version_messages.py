"""Weight fetches after failures, message by message: receiver, sender and version."""

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


def test_a_failed_relay_does_not_fetch_from_the_receiver_that_waits_for_it() -> None:
    driver = CoreDriver()
    orders = published(driver)
    assert fetches(driver, driver.send(FIRST, failed(orders[FIRST]))) == [(FIRST, "trainer0")]


def test_a_relay_is_not_avoided_after_a_failure_upstream() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, failed(orders[FIRST]))
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == [(SECOND, FIRST)]


def test_a_holder_that_did_not_deliver_is_avoided() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, m.WeightsStaged(MODEL, 1))
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == [(SECOND, "trainer0")]


def test_a_repeated_failure_report_of_one_transfer_is_ignored() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.send(FIRST, failed(orders[FIRST]))
    again = driver.send(SECOND, failed(orders[SECOND]))
    assert fetches(driver, again) == [(SECOND, FIRST)]
    assert fetches(driver, driver.send(SECOND, failed(orders[SECOND]))) == []
    assert driver.core.state.models.policy.fetching[WorkerId(SECOND)].holder == FIRST


def test_a_version_staged_from_a_disconnected_holder_can_be_evicted() -> None:
    driver = CoreDriver()
    published(driver)
    driver.event(WorkerDisconnected(WorkerId(FIRST), ""))
    driver.send("trainer0", m.Publish((whole(2),), ()))
    # All of version 1 arrived before the holder disconnected; the next fetch is in progress.
    driver.send(SECOND, m.WeightsStaged(MODEL, 1))
    evictions = driver.sent(driver.send(SECOND, m.WeightsStaged(MODEL, 2)), m.EvictVersion)
    assert (SECOND, 1) in [(who, order.version) for who, order in evictions]


def test_a_version_lost_with_its_publisher_is_not_waited_for() -> None:
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
    assert (
        driver.pull("rollout2", "rollout") is None
    )  # it joined during the run and starts with the version that it fetches
    driver.send("rollout2", m.WeightsStaged(MODEL, 1))
    granted = driver.sent(driver.send("rollout2", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout2"]


def test_a_wait_for_a_lost_version_is_reported_and_ends_with_the_next_one() -> None:
    driver = CoreDriver()
    orders = published(driver)
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    for receiver in (FIRST, SECOND):
        driver.send(receiver, failed(orders[receiver]))
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


def test_a_version_staged_after_its_publisher_died_becomes_the_latest() -> None:
    driver = CoreDriver()
    published(driver)
    driver.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert driver.core.state.models.policy.latest == 0
    assert (
        fetches(driver, driver.send(FIRST, m.WeightsStaged(MODEL, 1))) == []
    )  # the second still waits for it on its broken lane
    assert driver.core.state.models.policy.latest == 1


def test_a_transfer_that_always_fails_does_not_count_as_progress() -> None:
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=10.0)
    order = published(driver)[FIRST]
    while driver.core.ended is None:
        driver.now += 1.0
        replies = driver.send(FIRST, failed(order))
        commands = driver.event(Tick())  # sends the retry, if it was delayed
        order = dict(driver.sent([*replies, *commands], m.ReceiveWeights)).get(FIRST, order)
        assert driver.now < 20.0
    assert [type(command) for command in commands] == [EndRun]


def test_the_retry_delay_of_failing_fetches_grows_up_to_a_limit() -> None:
    driver = CoreDriver()
    orders = published(driver)
    started_s: list[float] = []
    driver.send(SECOND, m.WeightsStaged(MODEL, 1))
    [(_, order)] = driver.sent(
        driver.send(FIRST, failed(orders[FIRST])), m.ReceiveWeights
    )  # from another holder, without delay
    while len(started_s) < 9:
        commands = driver.send(FIRST, failed(order))
        while not (again := driver.sent(commands, m.ReceiveWeights)):
            driver.now += 0.05
            commands = driver.event(Tick())
        [(_, order)] = again
        started_s.append(driver.now)
    delays_s = [later - earlier for earlier, later in itertools.pairwise(started_s)]
    assert delays_s == sorted(delays_s)
    assert delays_s[0] == pytest.approx(0.2, abs=0.051)
    assert delays_s[-1] == pytest.approx(5.0, abs=0.051)
    driver.send(FIRST, m.WeightsStaged(MODEL, 1))
    [(_, order), _] = driver.sent(driver.send("trainer0", m.Publish((whole(2),), ())), m.ReceiveWeights)
    assert fetches(driver, driver.send(order.turn.receiver, failed(order)))  # a success resets the delay
