"""Leases: their numbers after a controller has come back, and their length beside that of a stall."""

from flowrt.controller.settings import Settings
from flowrt.recipes.load import parse
from flowrt.testing.talk import Talk
from flowrt.wire import messages as m


def test_a_lease_of_before_has_a_number_of_before() -> None:
    """Else the same number would be given to somebody else one day, and take the first one's slots out of the world."""
    talk = Talk()
    talk.offer()
    (slot,) = talk.core.samples.board.slots.values()
    for number in (talk.core.samples.board.first_lease, talk.core.samples.board.first_lease + 5):
        talk.assert_illegal("rollout0", m.Renew(number, "rollout", -1, (slot.id,), (slot.attempt,)))
    grant = talk.pull("rollout1", "rollout")
    assert grant is not None
    assert grant.slots == (slot.id,)


def test_work_that_is_held_comes_back_before_a_run_counts_as_stalled() -> None:
    """A rollout worker that hangs is one of several: its lease ends, and somebody else does it."""
    controller = parse([]).controller
    assert controller.lease_s < controller.stall_s
    assert Settings().lease_s < Settings().stall_s
