"""The word that a batch is done, in the pull for the next one: stages that make nothing need no commit."""

from typing import Any

import pytest

from flowrt.controller.core import Core
from flowrt.controller.events import MessageReceived, Send, Tick, WorkerConnected, WorkerDisconnected
from flowrt.controller.policies.admission import StrictLag
from flowrt.controller.policies.batching import GroupCount
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.weight_sync import DelayedUpdate
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.protocol import messages as m
from flowrt.protocol.messages import Stage, Values

LEASE_S = 10.0
MAKER, READER, OTHER = WorkerId("maker"), WorkerId("reader"), WorkerId("other")
POLICIES = Policies(StrictLag(0), Fifo(), GroupCount(1), DelayedUpdate())
FLOW = Dataflow(
    columns=(),
    stages=(Stage("score", ("x",), ("y",)), Stage("read", ("x",), ())),
    train_stage="",
    train_flow="",
    token_columns=(),
    tags=("x",),
)


class Desk:
    """A controller's mind and three workers."""

    def __init__(self) -> None:
        self.core = Core(Settings(lease_s=LEASE_S), FLOW, POLICIES)
        self.now = 0.0
        for worker in (MAKER, READER, OTHER):
            self.core.handle(WorkerConnected(worker, "any", "host"), self.now)

    def event(self, event: Any) -> list[tuple[WorkerId, m.Message]]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        return [(one.worker, one.message) for one in commands if isinstance(one, Send)]

    def send(self, worker: WorkerId, message: m.Message) -> Any:
        """The one answer to it; None while it is parked."""
        answers = self.event(MessageReceived(worker, message))
        return answers[0][1] if answers else None

    def offer(self, rows: int) -> None:
        values = (Values("x", tuple(map(float, range(rows)))),)
        assert isinstance(
            self.send(
                MAKER,
                m.Offer(
                    request=1,
                    flow="rows",
                    prompts=tuple(range(rows)),
                    epoch=0,
                    members=1,
                    at_least=0,
                    lengths=(),
                    tags=values,
                ),
            ),
            m.OfferAccepted,
        )

    def pull(self, worker: WorkerId, stage: str, slots: int, *done: int) -> Any:
        return self.send(worker, m.Pull(request=2, stage=stage, slots=slots, tokens=0, step=-1, done=done))


def test_a_pull_says_that_an_earlier_batch_is_done() -> None:
    desk = Desk()
    desk.offer(4)
    first = desk.pull(READER, "read", 2)
    second = desk.pull(READER, "read", 2, first.lease)
    assert (first.slots, second.slots, second.refused) == ((0, 1), (2, 3), ())
    table = desk.core.state.table
    assert [table.is_done(slot, "read") for slot in table.slots.values()] == [True, True, False, False]
    assert list(table.leases) == [second.lease]


def test_rows_of_which_everything_is_done_leave_the_board() -> None:
    desk = Desk()
    desk.offer(3)
    scored = desk.pull(OTHER, "score", 3)
    read = desk.pull(READER, "read", 3)
    commit = m.Commit(
        request=3,
        stage="score",
        slots=scored.slots,
        leases=(scored.lease,) * 3,
        parts=(),
        inline=(Values("y", (0.0,) * 3),),
        spans=(),
    )
    assert desk.send(OTHER, commit).refused == ()
    assert desk.pull(READER, "read", 3, read.lease) is None  # parked: there is nothing more
    table = desk.core.state.table
    assert (table.groups, table.slots, table.leases, table.rows["rows"]) == ({}, {}, {}, 0)


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
    with pytest.raises(RemoteProtocolError, match="which is of reader"):
        desk.core.transition(
            MessageReceived(OTHER, m.Pull(request=2, stage="read", slots=1, tokens=0, step=-1, done=(first.lease,))),
            desk.now,
        )
    assert first.lease in desk.core.state.table.leases


def test_a_parked_pull_still_says_what_was_refused() -> None:
    desk = Desk()
    desk.offer(1)
    first = desk.pull(READER, "read", 1)
    desk.event(WorkerDisconnected(READER, "killed"))
    desk.core.handle(WorkerConnected(READER, "any", "host"), desk.now)
    assert desk.pull(OTHER, "read", 1).slots == first.slots
    assert desk.pull(READER, "read", 1, first.lease) is None
    values = (Values("x", (1.0,)),)
    answers = desk.event(
        MessageReceived(
            MAKER,
            m.Offer(request=1, flow="rows", prompts=(1,), epoch=0, members=1, at_least=0, lengths=(), tags=values),
        )
    )
    (grant,) = [message for _, message in answers if isinstance(message, m.Grant)]
    assert (grant.slots, grant.refused) == ((1,), (first.lease,))


def test_a_withdrawn_pull_too() -> None:
    desk = Desk()
    desk.offer(1)
    first = desk.pull(READER, "read", 1)
    assert desk.pull(READER, "read", 1, first.lease) is None
    desk.send(READER, m.CancelRequest(2))
    assert desk.pull(READER, "read", 1, first.lease) is None
    assert f"the leases ({first.lease},)" in desk.send(READER, m.CancelRequest(2)).reason


def test_what_makes_columns_is_not_done_by_a_pull() -> None:
    desk = Desk()
    desk.offer(1)
    grant = desk.pull(OTHER, "score", 1)
    refused = desk.pull(OTHER, "score", 1, grant.lease)
    assert isinstance(refused, m.Rejected)
    assert "commit" in refused.reason
    assert grant.lease in desk.core.state.table.leases
