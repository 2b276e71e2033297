"""A lane that one end retires while turns are issued: both ends run every turn once, in order, of one incarnation."""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.controller.state.transfers import Lanes
from flowrt.ids import WorkerId
from flowrt.protocol.messages import LaneTurn, RetireLane
from tests.effort import examples

A, B = WorkerId("a"), WorkerId("b")
STEPS = st.lists(
    st.sampled_from(["issue", "controller", "deliver a", "deliver b", "run", "ask a", "ask b"]), max_size=80
)


class End:
    """One end of the lane: messages in order of arrival, and the turns that it has not run."""

    def __init__(self) -> None:
        self.inbox: deque[LaneTurn | RetireLane] = deque()
        self.waiting: deque[LaneTurn] = deque()
        self.last: LaneTurn | None = None
        self.closed: set[int] = set()

    def deliver(self) -> None:
        if not self.inbox:
            return
        message = self.inbox.popleft()
        if isinstance(message, RetireLane):
            self.closed.add(message.turn.incarnation)
            if self.last is not None and self.last.incarnation == message.turn.incarnation:
                self.last = None
        else:
            assert message.incarnation not in self.closed, "a turn of a lane that was retired"
            self.waiting.append(message)
            self.last = message


class Model:
    """A controller and both ends, with messages on their way."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.ends = {A: End(), B: End()}
        self.requests: deque[RetireLane] = deque()
        self.issued: list[LaneTurn] = []
        self.run: list[LaneTurn] = []

    def act(self, step: str) -> None:
        if step == "issue":
            turn = self.lanes.next_turn(A, B, "samples")
            self.issued.append(turn)
            for end in self.ends.values():
                end.inbox.append(turn)
        elif step == "controller":
            self._answer()
        elif step == "run":
            if all(end.waiting for end in self.ends.values()):
                first, second = (end.waiting.popleft() for end in self.ends.values())
                assert first == second
                self.run.append(first)
        else:
            what, _, name = step.partition(" ")
            end = self.ends[WorkerId(name)]
            if what == "deliver":
                end.deliver()
            elif not end.waiting and end.last is not None:
                self.requests.append(RetireLane(end.last))

    def _answer(self) -> None:
        if not self.requests:
            return
        request = self.requests.popleft()
        if self.lanes.retire(request.turn):
            for end in self.ends.values():
                end.inbox.append(request)

    def is_busy(self) -> bool:
        return bool(self.requests) or any(end.inbox or end.waiting for end in self.ends.values())


@settings(max_examples=examples(300))
@given(STEPS)
def test_no_turn_is_lost_or_meets_a_closed_lane(steps: list[str]) -> None:
    model = Model()
    for step in steps:
        model.act(step)
    while model.is_busy():
        for step in ("controller", "deliver a", "deliver b", "run"):
            model.act(step)
    assert model.run == model.issued
    for before, after in zip(model.issued, model.issued[1:], strict=False):
        continues = after.incarnation == before.incarnation and after.sequence == before.sequence + 1
        assert continues or (after.incarnation > before.incarnation and after.sequence == 0)
