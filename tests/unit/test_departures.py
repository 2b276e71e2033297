"""Workers that are to leave: what they still get, when they may go, and who may not."""

import dataclasses

import pytest

from flowrt.controller.events import Gone, Joined, Tick
from flowrt.ids import WorkerId
from flowrt.testing.scenario import MODEL, whole
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m

OBSERVER = "observer"


@pytest.fixture
def talk() -> Talk:
    """Everybody is in, somebody watches, and rollout workers and a trainer are needed."""
    talk = Talk(steps=4)
    settings = dataclasses.replace(talk.core.settings, needed_roles=("rollout", "reward"), vital_roles=("trainer",))
    talk.core.settings = talk.core.departures._settings = settings
    talk.event(Joined(WorkerId("watcher"), OBSERVER, "host"))
    return talk


def test_it_finishes_what_it_has_and_goes_when_nothing_is_lost_with_it(talk: Talk) -> None:
    talk.offer()
    grant = talk.pull("rollout0", "rollout")
    assert grant is not None
    parked = m.Pull(9, "rollout", 1, 0, -1)
    talk.say("rollout0", parked)
    told = talk.say("watcher", m.Drain(1, "rollout0"))
    assert talk.heard(told, m.Drain) == [("rollout0", m.Drain(1, "rollout0"))]
    [(who, refusal)] = talk.heard(told, m.Refused)
    assert (who, refusal.request, refusal.reason) == ("rollout0", 9, "rollout0 is leaving the run")
    # It is at work, then it alone has what it made.
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    assert talk.heard(talk.say("rollout0", talk.generated(grant)), m.Committed)[0][1].refused == ()
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    talk.score()
    trained = talk.pull("trainer0", "train", step=0)
    assert trained is not None
    assert talk.heard(talk.event(Tick()), m.Stop) == []
    talk.say("trainer0", m.StepDone(0, ()))
    [(who, stop)] = talk.heard(talk.event(Tick()), m.Stop)
    assert (who, stop.code) == ("rollout0", 0)
    assert talk.heard(talk.event(Tick()), m.Stop) == []  # once
    talk.say("rollout0", m.Bye(""))
    assert talk.core.ended is None
    assert dict(talk.core.samples.retreat.dropped) == {}


def test_it_gets_nothing_new(talk: Talk) -> None:
    talk.say("watcher", m.Drain(1, "rollout0"))
    talk.offer()
    assert talk.pull("rollout0", "rollout") is None
    assert talk.pull("rollout1", "rollout") is not None


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("nobody", "there is no worker 'nobody' in this run"),
        ("reward0", "reward0 is the only reward worker; start another one first"),
        ("trainer0", "the work of a trainer cannot be passed on"),
        ("source0", "the work of a source cannot be passed on"),
    ],
)
def test_who_cannot_leave_stays_and_the_asker_hears_why(talk: Talk, worker: str, reason: str) -> None:
    said = talk.say("watcher", m.Drain(5, worker))
    [(who, refusal)] = talk.heard(said, m.Refused)
    assert (who, refusal.request) == ("watcher", 5)
    assert reason in refusal.reason
    assert talk.heard(said, m.Drain) == []


def test_whoever_has_to_go_itself_is_not_kept(talk: Talk) -> None:
    assert talk.heard(talk.say("reward0", m.Drain(0, "reward0")), m.Drain) == [("reward0", m.Drain(0, "reward0"))]
    assert talk.heard(talk.event(Tick()), m.Stop)[0][0] == "reward0"


def test_only_observers_send_others_away(talk: Talk) -> None:
    talk.assert_illegal("reward0", m.Drain(0, "rollout0"))


# ---- roles that are empty for a while


def test_a_needed_role_may_be_empty_for_a_while(talk: Talk) -> None:
    talk.event(Gone(WorkerId("reward0"), "killed"))
    talk.now += talk.core.settings.absence_s - 1
    talk.event(Tick())
    assert talk.core.ended is None
    talk.event(Joined(WorkerId("reward0"), "reward", "host"))
    talk.now += talk.core.settings.absence_s + 1
    talk.event(Tick())
    assert talk.core.ended is None


def test_a_needed_role_that_stays_empty_ends_the_run_with_the_reason(talk: Talk) -> None:
    talk.event(Gone(WorkerId("reward0"), "killed"))
    talk.now += talk.core.settings.absence_s + 1
    talk.event(Tick())
    assert talk.core.ended is not None
    assert "no reward worker for 61 s: reward0: killed" in talk.core.ended.reason


def test_a_vital_worker_ends_the_run_at_once(talk: Talk) -> None:
    talk.event(Gone(WorkerId("trainer0"), "killed"))
    assert talk.core.ended is not None
    assert talk.core.ended.reason == "trainer0: killed (on host 'host')"


# ---- rollout workers that come late


def test_a_late_worker_catches_up_from_a_neighbour_before_it_begins(talk: Talk) -> None:
    talk.say("trainer0", m.Publish((whole(1),), ()))
    talk.say("rollout0", m.Staged(MODEL, 1))
    talk.say("rollout0", m.Applied(MODEL, 1))
    talk.event(Gone(WorkerId("rollout1"), "killed"))
    talk.offer()
    talk.event(Joined(WorkerId("rollout1"), "rollout", "host"))
    fetches = talk.heard(talk.say("rollout1", m.Applied(MODEL, 0)), m.Fetch)
    assert talk.pull("rollout1", "rollout") is None, "it began with the weights of the start"
    [(who, fetch)] = fetches
    assert (who, fetch.turn.sender, fetch.weights.version) == ("rollout1", "rollout0", 1)
    talk.say("rollout1", m.Staged(MODEL, 1))
    granted = talk.heard(talk.say("rollout1", m.Applied(MODEL, 1)), m.Grant)
    assert [who for who, _ in granted] == ["rollout1"]
