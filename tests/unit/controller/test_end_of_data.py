"""When the prompts run out the last step is smaller, and whoever offers more is told only at the end."""

from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver


def test_the_last_step_takes_what_is_there() -> None:
    talk = CoreDriver(groups_per_step=2, steps=5)
    talk.ready_to_train()
    assert talk.pull("trainer0", "train", 0) is not None
    assert talk.pull("trainer0", "train", 0) is None  # the step has a place left: it waits for another group
    granted = talk.heard(talk.say("source0", m.EndOfData("train")), m.Grant)
    assert [(who, grant.closed) for who, grant in granted] == [("trainer0", True)]
    assert talk.core.state.window.quota == 1


def test_an_offer_after_the_last_prompt_is_answered_by_the_end_of_the_last_step() -> None:
    talk = CoreDriver(groups_per_step=2, steps=5)
    talk.ready_to_train()
    talk.say("source0", m.EndOfData("train"))
    assert not talk.heard(talk.offer(prompt=9), m.OfferAccepted)
    assert talk.pull("trainer0", "train", 0) is not None
    assert not talk.core.state.window.over
    closed = talk.say("trainer0", m.StepCompleted(0, ()))
    assert [opened.first for _, opened in talk.heard(closed, m.OfferAccepted)] == [-1]
    assert talk.core.state.window.over


def test_nothing_to_train_at_all_is_over_at_once() -> None:
    talk = CoreDriver(groups_per_step=2, steps=5)
    talk.say("source0", m.EndOfData("train"))
    assert [opened.first for _, opened in talk.heard(talk.offer(prompt=9), m.OfferAccepted)] == [-1]
    grant = talk.pull("trainer0", "train", 0)
    assert grant is not None
    assert grant.closed
