"""A sample older than the bound is never trained: it is dropped with a reason and its prompt is generated again."""

import msgspec
import pytest

from flowrt.controller.events import AppendLedger, WorkerDisconnected
from flowrt.controller.settings import OnLostSample
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from tests.simulation.core_driver import CoreDriver
from tests.simulation.scenario import MODEL, offer_one, offered_lengths, whole


def test_an_over_age_sample_is_refused_dropped_and_offered_again() -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.send("rollout0", m.WeightsActivated(MODEL, 1))
    driver.offer(prompt=5)
    first = driver.pull("rollout0", "rollout")
    assert first is not None
    assert first.attempts == (0,)
    # The commit reports that version 0 generated the tokens: one version too old for bound 0.
    commands = driver.send("rollout0", driver.generated(first))
    [(_, answer)] = driver.sent(commands, m.Committed)
    assert answer.refused == first.slots
    assert answer.reason == "older than the staleness bound"
    states = [(record.state, record.reason) for record in commands if isinstance(record, AppendLedger)]
    assert states == [("dropped", "over-age"), ("in_flight", "offered again")]
    assert driver.core.state.dropped == {"over-age": 1}
    again = driver.pull("rollout0", "rollout")
    assert again is not None
    assert (again.slots, again.prompts, again.attempts) == (first.slots, (5,), (1,))


def test_generation_waits_for_the_newest_weights_at_bound_zero() -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.offer(prompt=5)
    assert driver.pull("rollout1", "rollout") is None
    [(_, reason, _)] = [wait for wait in driver.core.waiting() if wait[0] == "rollout1"]
    assert reason == "newer weights: 1 slots ready for rollout, but version 0 would be too old"
    driver.send("trainer0", m.Publish((whole(1),), ()))
    granted = driver.sent(driver.send("rollout1", m.WeightsActivated(MODEL, 1)), m.Grant)
    assert [grant.prompts for _, grant in granted] == [(5,)]


@pytest.mark.parametrize("policy", OnLostSample)
def test_an_over_age_member_follows_the_policy(policy: OnLostSample) -> None:
    driver = CoreDriver(bound=0, groups_per_step=1, steps=3, members=3, on_lost_sample=policy)
    driver.ready_to_train()
    assert driver.pull("trainer0", "train", 0) is not None
    driver.send("trainer0", m.StepCompleted(0, ()))
    driver.send("trainer0", m.Publish((whole(1),), ()))
    driver.send("rollout0", m.WeightsActivated(MODEL, 1))
    driver.send(
        "source0",
        offer_one(request=9, prompt=5, members=3),
    )
    grants = [driver.pull("rollout0", "rollout") for _ in range(3)]
    granted = [grant for grant in grants if grant is not None]
    # Version 0 generated the first member, version 1 the others.
    answers = [
        answer
        for grant, version in zip(granted, (0, 1, 1), strict=True)
        for _, answer in driver.sent(
            driver.send("rollout0", msgspec.structs.replace(driver.generated(grant), spans=((version, 3),))),
            m.Committed,
        )
    ]
    alive = 2 if policy is not OnLostSample.DROP_GROUP else 0
    assert [len(answer.refused) for answer in answers] == [1, *[0 if alive else 1] * 2]
    for _ in range(alive):
        driver.score()
    trained = driver.pull("trainer0", "train", 1)
    members = {OnLostSample.REGENERATE: None, OnLostSample.DROP_GROUP: None, OnLostSample.TRAIN_REMAINING: (1, 2)}[
        policy
    ]
    assert (trained and trained.members) == members
    again = driver.pull("rollout0", "rollout")
    assert (again and (again.members, again.attempts)) == (((0,), (1,)) if policy is OnLostSample.REGENERATE else None)
    assert driver.core.state.dropped == {"over-age": 1}


def test_the_last_offer_may_open_more_groups_than_the_run_needs() -> None:
    driver = CoreDriver(bound=0, groups_per_step=3, steps=1)
    for number, prompts in enumerate([(0, 1), (2, 3)]):
        offer = m.Offer(
            request=number,
            flow="train",
            prompts=prompts,
            epoch=0,
            members=1,
            at_least=0,
            lengths=offered_lengths(4, 1, prompts=2),
            tags=(),
        )
        assert len(driver.sent(driver.send("source0", offer), m.OfferAccepted)) == 1
    assert driver.sent(driver.offer(prompt=5), m.OfferAccepted) == []


def test_a_returned_group_without_a_source_and_an_owner_is_dropped() -> None:
    driver = CoreDriver()
    driver.ready_to_train()
    grant = driver.pull("trainer0", "train", 0)
    assert grant is not None
    for holder in ("source0", "rollout0"):
        driver.event(WorkerDisconnected(WorkerId(holder), ""))
    driver.undelivered("trainer0", "train", grant)
    assert driver.core.state.table.groups == {}
    assert driver.core.state.dropped == {"its source left": 1}
