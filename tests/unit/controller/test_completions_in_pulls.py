"""Completion of a batch in the pull for the next one: stages that write no columns need no commit."""

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


class ControllerHarness:
    """The core of a controller, and three workers."""

    def __init__(self) -> None:
        self.core = Core(Settings(lease_s=LEASE_S), FLOW, POLICIES)
        self.now = 0.0
        for worker in (MAKER, READER, OTHER):
            self.core.handle(WorkerConnected(worker, "any", "host"), self.now)

    def event(self, event: Any) -> list[tuple[WorkerId, m.Message]]:
        commands = self.core.handle(event, self.now)
        self.core.check()
        return [(command.worker, command.message) for command in commands if isinstance(command, Send)]

    def send(self, worker: WorkerId, message: m.Message) -> Any:
        """The answer to a message; None while the request is parked."""
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


def test_a_pull_marks_an_earlier_batch_as_done() -> None:
    harness = ControllerHarness()
    harness.offer(4)
    first = harness.pull(READER, "read", 2)
    second = harness.pull(READER, "read", 2, first.lease)
    assert (first.slots, second.slots, second.refused) == ((0, 1), (2, 3), ())
    table = harness.core.state.table
    assert [table.is_done(slot, "read") for slot in table.slots.values()] == [True, True, False, False]
    assert list(table.leases) == [second.lease]


def test_rows_done_in_every_stage_leave_the_table() -> None:
    harness = ControllerHarness()
    harness.offer(3)
    scored = harness.pull(OTHER, "score", 3)
    read = harness.pull(READER, "read", 3)
    commit = m.Commit(
        request=3,
        stage="score",
        slots=scored.slots,
        leases=(scored.lease,) * 3,
        parts=(),
        inline=(Values("y", (0.0,) * 3),),
        spans=(),
    )
    assert harness.send(OTHER, commit).refused == ()
    assert harness.pull(READER, "read", 3, read.lease) is None  # parked: no row is left
    table = harness.core.state.table
    assert (table.groups, table.slots, table.leases, table.rows["rows"]) == ({}, {}, {}, 0)


def test_a_completion_after_the_lease_expired_is_refused_in_the_grant() -> None:
    harness = ControllerHarness()
    harness.offer(2)
    first = harness.pull(READER, "read", 2)
    harness.now += LEASE_S + 1
    harness.event(Tick())
    again = harness.pull(OTHER, "read", 1)
    answer = harness.pull(READER, "read", 1, first.lease)
    assert (again.slots, answer.slots, answer.refused) == ((0,), (1,), (first.lease,))


def test_completing_the_lease_of_another_worker_raises_and_keeps_the_lease() -> None:
    harness = ControllerHarness()
    harness.offer(2)
    first = harness.pull(READER, "read", 1)
    with pytest.raises(RemoteProtocolError, match="which is of reader"):
        harness.core.transition(
            MessageReceived(OTHER, m.Pull(request=2, stage="read", slots=1, tokens=0, step=-1, done=(first.lease,))),
            harness.now,
        )
    assert first.lease in harness.core.state.table.leases


def test_a_parked_pull_reports_refused_completions_in_its_grant() -> None:
    harness = ControllerHarness()
    harness.offer(1)
    first = harness.pull(READER, "read", 1)
    harness.event(WorkerDisconnected(READER, "killed"))
    harness.core.handle(WorkerConnected(READER, "any", "host"), harness.now)
    assert harness.pull(OTHER, "read", 1).slots == first.slots
    assert harness.pull(READER, "read", 1, first.lease) is None
    values = (Values("x", (1.0,)),)
    answers = harness.event(
        MessageReceived(
            MAKER,
            m.Offer(request=1, flow="rows", prompts=(1,), epoch=0, members=1, at_least=0, lengths=(), tags=values),
        )
    )
    (grant,) = [message for _, message in answers if isinstance(message, m.Grant)]
    assert (grant.slots, grant.refused) == ((1,), (first.lease,))


def test_a_cancelled_pull_reports_refused_completions() -> None:
    harness = ControllerHarness()
    harness.offer(1)
    first = harness.pull(READER, "read", 1)
    assert harness.pull(READER, "read", 1, first.lease) is None
    harness.send(READER, m.CancelRequest(2))
    assert harness.pull(READER, "read", 1, first.lease) is None
    assert f"the leases ({first.lease},)" in harness.send(READER, m.CancelRequest(2)).reason


def test_a_stage_that_writes_columns_cannot_be_completed_by_a_pull() -> None:
    harness = ControllerHarness()
    harness.offer(1)
    grant = harness.pull(OTHER, "score", 1)
    refused = harness.pull(OTHER, "score", 1, grant.lease)
    assert isinstance(refused, m.Rejected)
    assert "commit" in refused.reason
    assert grant.lease in harness.core.state.table.leases
