"""The word that a batch is done, in the pull for the next one: stages that make nothing need no commit."""

from typing import Any

from flowrt.controller.admission import StrictLag
from flowrt.controller.batchers import GroupCount
from flowrt.controller.core import Core
from flowrt.controller.dispatch import Fifo
from flowrt.controller.events import Gone, Joined, Said, Send, Tick
from flowrt.controller.refresh import DelayedUpdate
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.ids import WorkerId
from flowrt.wire import messages as m
from flowrt.wire.records import Stage, Values

LEASE_S = 10.0
MAKER, READER, OTHER = WorkerId("maker"), WorkerId("reader"), WorkerId("other")
POLICIES = Policies(StrictLag(0), Fifo(), GroupCount(1), DelayedUpdate())
FLOW = Dataflow((), (Stage("score", ("x",), ("y",)), Stage("read", ("x",), ())), "", "", (), tags=("x",))


class Desk:
    """A controller's mind and three workers."""

    def __init__(self) -> None:
        self.core = Core(Settings(lease_s=LEASE_S), FLOW, POLICIES)
        self.now = 0.0
        for worker in (MAKER, READER, OTHER):
            self.core.handle(Joined(worker, "any", "host"), self.now)

    def event(self, event: Any) -> list[tuple[WorkerId, m.Message]]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        return [(one.worker, one.message) for one in commands if isinstance(one, Send)]

    def say(self, worker: WorkerId, message: m.Message) -> Any:
        """The one answer to it; None while it is parked."""
        answers = self.event(Said(worker, message))
        return answers[0][1] if answers else None

    def offer(self, rows: int) -> None:
        values = (Values("x", tuple(map(float, range(rows)))),)
        assert isinstance(self.say(MAKER, m.Offer(1, "rows", tuple(range(rows)), 0, 1, 0, (), values)), m.Opened)

    def pull(self, worker: WorkerId, stage: str, slots: int, *done: int) -> Any:
        return self.say(worker, m.Pull(2, stage, slots, 0, -1, done))


def test_a_pull_says_that_an_earlier_batch_is_done() -> None:
    desk = Desk()
    desk.offer(4)
    first = desk.pull(READER, "read", 2)
    second = desk.pull(READER, "read", 2, first.lease)
    assert (first.slots, second.slots, second.refused) == ((0, 1), (2, 3), ())
    board = desk.core.samples.board
    assert [board.is_done(slot, "read") for slot in board.slots.values()] == [True, True, False, False]
    assert list(board.leases) == [second.lease]


def test_rows_of_which_everything_is_done_leave_the_board() -> None:
    desk = Desk()
    desk.offer(3)
    scored = desk.pull(OTHER, "score", 3)
    read = desk.pull(READER, "read", 3)
    commit = m.Commit(3, "score", scored.slots, (scored.lease,) * 3, (), (Values("y", (0.0,) * 3),), ())
    assert desk.say(OTHER, commit).refused == ()
    assert desk.pull(READER, "read", 3, read.lease) is None  # parked: there is nothing more
    board = desk.core.samples.board
    assert (board.groups, board.slots, board.leases, board.rows["rows"]) == ({}, {}, {}, 0)


def test_done_too_late_is_refused_and_says_so() -> None:
    desk = Desk()
    desk.offer(2)
    first = desk.pull(READER, "read", 2)
    desk.now += LEASE_S + 1
    desk.event(Tick())
    again = desk.pull(OTHER, "read", 1)
    answer = desk.pull(READER, "read", 1, first.lease)
    assert (again.slots, answer.slots, answer.refused) == ((0,), (1,), (first.lease,))


def test_somebody_elses_lease_is_not_ended() -> None:
    desk = Desk()
    desk.offer(2)
    first = desk.pull(READER, "read", 1)
    answer = desk.pull(OTHER, "read", 1, first.lease)
    assert answer.refused == (first.lease,)
    assert first.lease in desk.core.samples.board.leases


def test_a_parked_pull_still_says_what_was_refused() -> None:
    desk = Desk()
    desk.offer(1)
    first = desk.pull(READER, "read", 1)
    desk.event(Gone(READER, "killed"))
    desk.core.handle(Joined(READER, "any", "host"), desk.now)
    assert desk.pull(OTHER, "read", 1).slots == first.slots
    assert desk.pull(READER, "read", 1, first.lease) is None
    values = (Values("x", (1.0,)),)
    answers = desk.event(Said(MAKER, m.Offer(1, "rows", (1,), 0, 1, 0, (), values)))
    (grant,) = [message for _, message in answers if isinstance(message, m.Grant)]
    assert (grant.slots, grant.refused) == ((1,), (first.lease,))


def test_a_withdrawn_pull_too() -> None:
    desk = Desk()
    assert desk.pull(READER, "read", 1, 7) is None
    assert "7" in desk.say(READER, m.Withdraw(2)).reason


def test_what_makes_columns_is_not_done_by_a_pull() -> None:
    desk = Desk()
    desk.offer(1)
    grant = desk.pull(OTHER, "score", 1)
    refused = desk.pull(OTHER, "score", 1, grant.lease)
    assert isinstance(refused, m.Refused)
    assert "commit" in refused.reason
    assert grant.lease in desk.core.samples.board.leases
