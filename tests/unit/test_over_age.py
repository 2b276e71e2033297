"""A sample older than the bound is never trained: it is dropped with a reason and its prompt is generated again."""

from flowrt.controller.events import Record
from flowrt.testing.scenario import MODEL, whole
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m


def test_an_over_age_sample_is_refused_dropped_and_offered_again() -> None:
    talk = Talk(bound=0, groups_per_step=1, steps=3)
    talk.ready_to_train()
    assert talk.pull("trainer0", "train", 0) is not None
    talk.say("trainer0", m.StepDone(0, ()))
    talk.say("trainer0", m.Publish((whole(1),), ()))
    talk.say("rollout0", m.Applied(MODEL, 1))
    talk.offer(prompt=5)
    first = talk.pull("rollout0", "rollout")
    assert first is not None
    assert first.attempts == (0,)
    # It says that old weights made the tokens, although it had newer ones: one version too many for bound 0.
    heard = talk.say("rollout0", talk.generated(first))
    [(_, answer)] = talk.heard(heard, m.Committed)
    assert answer.refused == first.slots
    assert answer.reason == "older than the staleness bound"
    states = [(record.state, record.reason) for record in heard if isinstance(record, Record)]
    assert states == [("dropped", "over-age"), ("in_flight", "offered again")]
    assert talk.core.samples.retreat.dropped == {"over-age": 1}
    again = talk.pull("rollout0", "rollout")
    assert again is not None
    assert (again.slots, again.prompts, again.attempts) == (first.slots, (5,), (1,))


def test_generation_waits_for_the_newest_weights_at_bound_zero() -> None:
    talk = Talk(bound=0, groups_per_step=1, steps=3)
    talk.ready_to_train()
    assert talk.pull("trainer0", "train", 0) is not None
    talk.say("trainer0", m.StepDone(0, ()))
    talk.offer(prompt=5)
    assert talk.pull("rollout1", "rollout") is None
    [(_, reason, _)] = [one for one in talk.core.samples.waiting() if one[0] == "rollout1"]
    assert reason == "newer weights: 1 slots ready for rollout, but version 0 would be too old"
    talk.say("trainer0", m.Publish((whole(1),), ()))
    granted = talk.heard(talk.say("rollout1", m.Applied(MODEL, 1)), m.Grant)
    assert [grant.prompts for _, grant in granted] == [(5,)]
