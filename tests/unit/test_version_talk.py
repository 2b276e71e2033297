"""Who fetches what from whom after something went wrong, message by message."""

import dataclasses

from flowrt.controller.events import Command, End, Gone, Tick
from flowrt.ids import WorkerId
from flowrt.testing.scenario import MODEL, whole
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m

FIRST, SECOND = "rollout0", "rollout1"


def fetches(talk: Talk, commands: list[Command]) -> list[tuple[str, str]]:
    """(receiver, sender) of every fetch that is ordered."""
    return [(who, fetch.turn.sender) for who, fetch in talk.heard(commands, m.Fetch)]


def published(talk: Talk) -> dict[str, m.Fetch]:
    """Version 1 is on its way from the trainer to the first receiver, and from there to the second."""
    orders = talk.heard(talk.say("trainer0", m.Publish((whole(1),), ())), m.Fetch)
    assert [(who, order.turn.sender) for who, order in orders] == [(FIRST, "trainer0"), (SECOND, FIRST)]
    return dict(orders)


def failed(order: m.Fetch) -> m.FetchFailed:
    return m.FetchFailed(order.turn, order.weights, "the lane broke")


def test_a_relay_that_failed_does_not_fetch_from_the_one_that_waits_for_it() -> None:
    talk = Talk()
    orders = published(talk)
    assert fetches(talk, talk.say(FIRST, failed(orders[FIRST]))) == [(FIRST, "trainer0")]


def test_a_relay_is_not_to_blame_for_what_failed_above_it() -> None:
    talk = Talk()
    orders = published(talk)
    talk.say(FIRST, failed(orders[FIRST]))
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == [(SECOND, FIRST)]


def test_a_holder_that_did_not_deliver_is_avoided() -> None:
    talk = Talk()
    orders = published(talk)
    talk.say(FIRST, m.Staged(MODEL, 1))
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == [(SECOND, "trainer0")]


def test_a_failure_is_told_of_one_transfer_only() -> None:
    talk = Talk()
    orders = published(talk)
    talk.say(FIRST, failed(orders[FIRST]))
    again = talk.say(SECOND, failed(orders[SECOND]))
    assert fetches(talk, again) == [(SECOND, FIRST)]
    assert fetches(talk, talk.say(SECOND, failed(orders[SECOND]))) == []
    assert talk.core.weights.fetching[WorkerId(SECOND)].holder == FIRST


def test_what_came_whole_from_a_holder_that_is_gone_can_be_fetched_and_retired() -> None:
    talk = Talk()
    published(talk)
    talk.event(Gone(WorkerId(FIRST), ""))
    talk.say("trainer0", m.Publish((whole(2),), ()))
    # All of version 1 had arrived before the holder died; its receiver's next fetch is under way already.
    talk.say(SECOND, m.Staged(MODEL, 1))
    retired = talk.heard(talk.say(SECOND, m.Staged(MODEL, 2)), m.Retire)
    assert (SECOND, 1) in [(who, order.version) for who, order in retired]


def test_a_transfer_that_fails_for_ever_is_no_progress() -> None:
    talk = Talk()
    talk.core.settings = dataclasses.replace(talk.core.settings, stall_s=10.0)
    order = published(talk)[FIRST]
    while talk.core.ended is None:
        talk.now += 1.0
        again = dict(talk.heard(talk.say(FIRST, failed(order)), m.Fetch))
        order = again[FIRST]
        commands = talk.event(Tick())
        assert talk.now < 20.0
    assert [type(command) for command in commands] == [End]
