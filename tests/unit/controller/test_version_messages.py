"""Who fetches what from whom after something went wrong, message by message."""

import itertools

import pytest

from flowrt.controller.events import Command, EndRun, Tick, WorkerConnected, WorkerDisconnected
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, whole

FIRST, SECOND = "rollout0", "rollout1"


def fetches(talk: CoreDriver, commands: list[Command]) -> list[tuple[str, str]]:
    """(receiver, sender) of every fetch that is ordered."""
    return [(who, fetch.turn.sender) for who, fetch in talk.heard(commands, m.ReceiveWeights)]


def published(talk: CoreDriver) -> dict[str, m.ReceiveWeights]:
    """Version 1 is on its way from the trainer to the first receiver, and from there to the second."""
    orders = talk.heard(talk.say("trainer0", m.Publish((whole(1),), ())), m.ReceiveWeights)
    assert [(who, order.turn.sender) for who, order in orders] == [(FIRST, "trainer0"), (SECOND, FIRST)]
    return dict(orders)


def failed(order: m.ReceiveWeights) -> m.FetchFailed:
    return m.FetchFailed(order.turn, order.weights, "the lane broke")


def test_a_relay_that_failed_does_not_fetch_from_the_one_that_waits_for_it() -> None:
    talk = CoreDriver()
    orders = published(talk)
    assert fetches(talk, talk.say(FIRST, failed(orders[FIRST]))) == [(FIRST, "trainer0")]


def test_a_relay_is_not_to_blame_for_what_failed_above_it() -> None:
    talk = CoreDriver()
    orders = published(talk)
    talk.say(FIRST, failed(orders[FIRST]))
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == [(SECOND, FIRST)]


def test_a_holder_that_did_not_deliver_is_avoided() -> None:
    talk = CoreDriver()
    orders = published(talk)
    talk.say(FIRST, m.WeightsStaged(MODEL, 1))
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == [(SECOND, "trainer0")]


def test_a_failure_is_told_of_one_transfer_only() -> None:
    talk = CoreDriver()
    orders = published(talk)
    talk.say(FIRST, failed(orders[FIRST]))
    again = talk.say(SECOND, failed(orders[SECOND]))
    assert fetches(talk, again) == [(SECOND, FIRST)]
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == []
    assert talk.core.state.models.policy.fetching[WorkerId(SECOND)].holder == FIRST


def test_what_came_whole_from_a_holder_that_is_gone_can_be_fetched_and_retired() -> None:
    talk = CoreDriver()
    published(talk)
    talk.event(WorkerDisconnected(WorkerId(FIRST), ""))
    talk.say("trainer0", m.Publish((whole(2),), ()))
    # All of version 1 had arrived before the holder died; its receiver's next fetch is under way already.
    talk.say(SECOND, m.WeightsStaged(MODEL, 1))
    retired = talk.heard(talk.say(SECOND, m.WeightsStaged(MODEL, 2)), m.EvictVersion)
    assert (SECOND, 1) in [(who, order.version) for who, order in retired]


def test_a_version_that_died_with_its_publisher_is_not_waited_for() -> None:
    talk = CoreDriver(bound=1)
    published(talk)
    for receiver in (FIRST, SECOND):
        talk.say(receiver, m.WeightsStaged(MODEL, 1))
        talk.say(receiver, m.WeightsActivated(MODEL, 1))
    [(_, order), _] = talk.heard(talk.say("trainer0", m.Publish((whole(2),), ())), m.ReceiveWeights)
    talk.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    weights = talk.core.state.models.policy
    assert (weights.latest, weights.newest) == (1, 2)
    talk.say(FIRST, failed(order))
    talk.event(WorkerConnected(WorkerId("rollout2"), "rollout", "host"))
    assert fetches(talk, talk.say("rollout2", m.WeightsActivated(MODEL, 0))) == [("rollout2", SECOND)]
    talk.offer()
    assert talk.pull("rollout2", "rollout") is None  # it came in the middle: it begins with what it fetches
    talk.say("rollout2", m.WeightsStaged(MODEL, 1))
    granted = talk.heard(talk.say("rollout2", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout2"]


def test_who_needs_a_version_that_is_gone_waits_for_the_next_and_says_so() -> None:
    talk = CoreDriver()
    published(talk)
    talk.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    talk.event(WorkerConnected(WorkerId("trainer1"), "trainer", "host"))
    talk.offer(at_least=1)
    assert talk.pull(FIRST, "rollout") is None
    [wait] = [edge for edge in talk.core.wait_graph(talk.now, request_timeout_s=600.0).waits if edge.who == FIRST]
    assert (wait.limit_s, wait.what.partition(", and ")[2]) == (
        600.0,
        "version 1 is gone with who published it: the next one has to be published",
    )
    talk.assert_illegal("trainer1", m.Publish((whole(1),), ()))
    assert (FIRST, "trainer1") in fetches(talk, talk.say("trainer1", m.Publish((whole(2),), ())))


def test_what_came_whole_just_before_its_publisher_died_is_the_latest_again() -> None:
    talk = CoreDriver()
    published(talk)
    talk.event(WorkerDisconnected(WorkerId("trainer0"), ""))
    assert talk.core.state.models.policy.latest == 0
    assert (
        fetches(talk, talk.say(FIRST, m.WeightsStaged(MODEL, 1))) == []
    )  # the second still waits for it on its broken lane
    assert talk.core.state.models.policy.latest == 1


def test_a_transfer_that_fails_for_ever_is_no_progress() -> None:
    talk = CoreDriver()
    talk.configure(no_progress_timeout_s=10.0)
    order = published(talk)[FIRST]
    while talk.core.ended is None:
        talk.now += 1.0
        told = talk.say(FIRST, failed(order))
        commands = talk.event(Tick())  # it is told to try again then, if it was given a rest
        order = dict(talk.heard([*told, *commands], m.ReceiveWeights)).get(FIRST, order)
        assert talk.now < 20.0
    assert [type(command) for command in commands] == [EndRun]


def test_a_receiver_whose_fetches_keep_failing_is_told_to_try_less_and_less_often() -> None:
    talk = CoreDriver()
    orders = published(talk)
    began_s: list[float] = []
    talk.say(SECOND, m.WeightsStaged(MODEL, 1))
    [(_, order)] = talk.heard(talk.say(FIRST, failed(orders[FIRST])), m.ReceiveWeights)  # of another holder, at once
    while len(began_s) < 9:
        commands = talk.say(FIRST, failed(order))
        while not (again := talk.heard(commands, m.ReceiveWeights)):
            talk.now += 0.05
            commands = talk.event(Tick())
        [(_, order)] = again
        began_s.append(talk.now)
    waited_s = [later - earlier for earlier, later in itertools.pairwise(began_s)]
    assert waited_s == sorted(waited_s)
    assert waited_s[0] == pytest.approx(0.2, abs=0.051)
    assert waited_s[-1] == pytest.approx(5.0, abs=0.051)
    talk.say(FIRST, m.WeightsStaged(MODEL, 1))
    [(_, order), _] = talk.heard(talk.say("trainer0", m.Publish((whole(2),), ())), m.ReceiveWeights)
    assert fetches(talk, talk.say(order.turn.receiver, failed(order)))  # what came since then counts
