"""How prompts get in: admission for those to train on, a budget of rows and bytes for all others."""

from collections.abc import Sequence

from flowrt.controller.board import Board
from flowrt.controller.events import Command, Keep, Send
from flowrt.controller.retreat import Retreat
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.slots import Group
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.waits import Parked
from flowrt.controller.walk import Begun, Recollection
from flowrt.ids import GroupId, WorkerId
from flowrt.wire.messages import Free, Offer, Opened
from flowrt.wire.positions import unpack
from flowrt.wire.records import ITEM_BYTES

MOST_ROWS = 1_000_000
"""Of one offer to train on: what is opened takes memory here, row by row."""


class Opening:
    """Turns offers into groups, or says what keeps them waiting."""

    def __init__(
        self,
        board: Board,
        window: TrainingWindow,
        retreat: Retreat,
        settings: Settings,
        flow: Dataflow,
        policies: Policies,
        out: list[Command],
    ) -> None:
        self._board = board
        self._window = window
        self._retreat = retreat
        self._settings = settings
        self._flow = flow
        self._policies = policies
        self._out = out
        self._group_columns = {column.name: column for column in flow.columns if column.scope == "group"}
        self._tags = frozenset(flow.tags)
        self._passed = unpack(settings.position.passed)
        self._exhausted: dict[str, set[WorkerId]] = {}  # by flow that was offered to, who said so
        self._ender: WorkerId | None = None  # who said so of the flow to train on

    # ---- what can never be opened

    def fault(self, offer: Offer) -> str:
        """Why this offer is refused; empty when it may be parked."""
        columns = {one.column: one.lengths for one in offer.lengths}
        tags = {one.column: one.values for one in offer.tags}
        count, rows = len(offer.prompts), len(offer.prompts) * offer.members
        if not offer.flow or rows < 1 or columns.keys() != self._group_columns.keys() or tags.keys() != self._tags:
            return (
                f"{_name(offer)} has {rows} rows, columns {sorted(columns)} and tags {sorted(tags)}; the dataflow "
                f"wants columns {sorted(self._group_columns)} and tags {sorted(self._flow.tags)}"
            )
        if len(columns) != len(offer.lengths) or len(tags) != len(offer.tags):
            return f"{_name(offer)} names a column twice"
        sizes_fit = not columns or all(len(one) == count and min(one) >= 0 for one in columns.values())
        if not sizes_fit or any(len(one) != rows for one in tags.values()):
            return f"{_name(offer)} is malformed: its columns and tags have not one number for each of its rows"
        if self.is_exhausted(offer.flow):
            return f"{_name(offer)} came after the flow was said to be exhausted"
        passed = self._passed.get(offer.epoch) if offer.flow == self._flow.train_flow else None
        if passed and (again := sorted(passed.intersection(offer.prompts))):
            return f"{_name(offer)} brings prompts {again[:3]} of epoch {offer.epoch}, which the run is done with"
        return self._too_large(offer)

    def _too_large(self, offer: Offer) -> str:
        count = len(offer.prompts)
        if offer.flow == self._flow.train_flow:
            if count * offer.members > MOST_ROWS:
                return f"{_name(offer)} has {count * offer.members} rows, over {MOST_ROWS}; offer fewer at a time"
            if not self._policies.admission.may_open(count - 1, self._settings.groups_per_step):
                return f"{_name(offer)} has {count} groups, more than admission ever lets live at once; offer fewer"
            return ""
        rows, size = count * offer.members, self.bytes_of(offer)
        limit_rows, limit_bytes = self._settings.budget_rows, self._settings.budget_bytes
        if rows > limit_rows or (limit_bytes and size > limit_bytes):
            return (
                f"{_name(offer)} has {rows} rows and {size} bytes, over the whole budget of {limit_rows} rows and "
                f"{limit_bytes or 'any number of'} bytes; offer fewer, or raise budget_rows or budget_bytes"
            )
        return ""

    def bytes_of(self, offer: Offer) -> int:
        """Bytes of the tensors that come with the offer."""
        if not offer.lengths:
            return 0
        return sum(sum(one.lengths) * ITEM_BYTES[self._group_columns[one.column].dtype] for one in offer.lengths)

    # ---- what has to wait

    def obstacle(self, offer: Offer) -> str:
        """What an offer waits for; empty when it can be opened (or answered) now."""
        if offer.flow != self._flow.train_flow:
            return self._no_room(offer)
        window = self._window
        if window.over:
            return ""
        if window.exhausted:
            return "the end of the last step: the prompts are exhausted"
        if window.enough_opened():
            return "a free place: enough prompts are open to complete the run"
        last, size = window.live + len(offer.prompts) - 1, self._settings.groups_per_step
        # What the step in training cannot be filled without is opened whole, even if some of it comes too early.
        if window.live >= size and not self._policies.admission.may_open(last, size):
            return f"admission: {window.live} groups live, step {window.step} in training"
        return ""

    def _no_room(self, offer: Offer) -> str:
        flow = self._flow.train_flow
        rows = sum(self._board.rows.values()) - (self._board.rows[flow] if flow else 0)
        limit_rows, limit_bytes = self._settings.budget_rows, self._settings.budget_bytes
        if rows and rows + len(offer.prompts) * offer.members > limit_rows:
            return f"room: {rows} of {limit_rows} rows live"
        if rows and limit_bytes:
            size = sum(self._board.bytes.values()) - (self._board.bytes[flow] if flow else 0)
            if size + self.bytes_of(offer) > limit_bytes:
                return f"room: {size} of {limit_bytes} bytes live"
        return ""

    def open(self, parked: Parked[Offer]) -> bool:
        """Open the offer if nothing is in its way."""
        offer, worker = parked.request, parked.worker
        if self.obstacle(offer):
            return False
        training = offer.flow == self._flow.train_flow
        if training and self._window.over:
            self._out.append(Send(worker, Opened(offer.request, -1)))
            return True
        groups = self._board.open(
            offer.flow,
            offer.prompts,
            offer.epoch,
            offer.members,
            self._window.step if offer.at_least < 0 else offer.at_least,
            worker,
            {one.column: one.lengths for one in offer.lengths},
            {one.column: one.values for one in offer.tags},
        )
        if self._flow.train_stage:
            self._out.append(Keep(self._begun(offer, worker, groups)))
        if training:
            self._window.enter(groups)
            for group in groups:
                self._retreat.record(group, "in_flight")
        else:
            self._exhausted.setdefault(offer.flow, set())
        self._out.append(Send(worker, Opened(offer.request, groups[0].id)))
        return True

    @staticmethod
    def _begun(offer: Offer, worker: WorkerId, groups: Sequence[Group]) -> Begun:
        """What is kept of an offer that was opened."""
        first = groups[0]
        size = (offer.flow, offer.prompts, offer.epoch, offer.members, first.at_least)
        numbers = (first.id, first.slots[0].id)
        return Begun(worker, offer.request, *size, offer.lengths, offer.tags, *numbers)

    def confirm(self, worker: WorkerId, offer: Offer, recalled: Recollection) -> bool:
        """Whether this offer was opened by the controller before, and only the answer was lost: it is given again."""
        begun = recalled.offers.get((worker, offer.request))
        if begun is None or (begun.flow, begun.epoch, begun.prompts) != (offer.flow, offer.epoch, offer.prompts):
            return False
        self._out.append(Send(worker, Opened(offer.request, begun.group)))
        gone = []
        for number in range(begun.group, begun.group + len(begun.prompts)):
            group = self._board.groups.get(GroupId(number))
            if group is None:
                gone.append(number)
                continue
            for holding in group.tensors.values():
                holding.owners.add(worker)
        if gone:
            self._out.append(Send(worker, Free((), (), tuple(gone))))
        return True

    # ---- the end of a stream

    def exhaust(self, worker: WorkerId, flow: str) -> None:
        """This worker has no more prompts for the flow."""
        if flow == self._flow.train_flow:
            self._window.exhaust()
            self._ender = worker
        else:
            self._exhausted.setdefault(flow, set()).add(worker)
            self._board.changed.update(stage.name for stage in self._board.flows.of(flow))

    def failed(self, worker: WorkerId) -> None:
        """This worker is gone in the middle of its part. What it opened last may be unread again: there is more."""
        if worker == self._ender:
            self._ender = None
            self._window.exhausted, self._window.changed = False, True

    def is_exhausted(self, flow: str) -> bool:
        """All its sources have said so."""
        return len(self._exhausted.get(flow, ())) >= self._settings.sources

    def is_over(self, stage: str) -> bool:
        """Nothing more will ever become ready for this stage, nor come back to it."""
        flow, train = self._board.stages[stage].flow, self._flow.train_flow
        if not self._exhausted or self._board.undone[stage] or (train and flow in ("", train)):
            return False
        return all(self.is_exhausted(one) for one in ([flow] if flow else self._exhausted))


def _name(offer: Offer) -> str:
    return f"offer of prompts {offer.prompts[:3]} to flow {offer.flow[:80]!r}"
