"""The walk of a sample: offers become groups, pulls become grants, commits move slots on, steps train them."""

from collections.abc import Iterable

from flowrt.controller.board import Board
from flowrt.controller.events import Command, Record, Send, StepClosed
from flowrt.controller.grants import grant
from flowrt.controller.retreat import Retreat, frees
from flowrt.controller.settings import Dataflow, Policies, Settings
from flowrt.controller.slots import Group, Lease, Slot
from flowrt.controller.steps import TrainingWindow
from flowrt.controller.transfers import Lanes
from flowrt.controller.versions import ModelVersions
from flowrt.controller.waits import Parked, WaitingRoom
from flowrt.errors import RemoteProtocolError
from flowrt.ids import WorkerId
from flowrt.wire.messages import Commit, Committed, Free, Offer, Opened, Pull, Refused, StepDone
from flowrt.wire.records import Stage


class Samples:
    """Owns the board, the training window and the waiting room; appends its commands to ``out``."""

    def __init__(
        self,
        settings: Settings,
        flow: Dataflow,
        policies: Policies,
        weights: ModelVersions,
        out: list[Command],
    ) -> None:
        self._settings = settings
        self._flow = flow
        self._policies = policies
        self._weights = weights
        self._out = out
        self.board = Board(flow.columns, flow.stages)
        self.window = TrainingWindow(settings.groups_per_step, settings.steps, settings.in_order)
        self.room = WaitingRoom()
        self.lanes = Lanes()
        self.retreat = Retreat(self.board, self.window, self.lanes, policies.admission, flow, out)

    # ---- offers

    def offer(self, worker: WorkerId, message: Offer, now: float) -> None:
        wanted = {column.name for column in self._flow.columns if column.scope == "group"}
        fits = len(message.columns) == len(message.lengths) == len(wanted) and set(message.columns) == wanted
        if message.members < 1 or not fits or min(message.lengths, default=0) < 0:
            self._refuse(worker, message.request, f"offer of prompt {message.prompt} is malformed")
            return
        self.room.park_offer(worker, message, now)

    def _open(self, parked: Parked[Offer]) -> bool:
        offer, training = parked.request, parked.request.flow == self._flow.train_flow
        if training and self.window.over:
            self._send(parked.worker, Opened(offer.request, -1))
            return True
        if training and self.window.exhausted:
            parked.waits_for = "the end of the last step: the prompts are exhausted"
            return False
        if training and self.window.enough_opened():
            parked.waits_for = "a free place: enough prompts are open to complete the run"
            return False
        if training and not self._policies.admission.may_open(self.window.live, self._settings.groups_per_step):
            parked.waits_for = f"admission: {self.window.live} groups live, step {self.window.step} in training"
            return False
        lengths = dict(zip(offer.columns, offer.lengths, strict=True))
        at_least = self.window.step if offer.at_least < 0 else offer.at_least
        group = self.board.open(offer.flow, offer.prompt, offer.epoch, offer.members, at_least, parked.worker, lengths)
        if training:
            self.window.enter(group)
            self._record(group, "in_flight")
        self._send(parked.worker, Opened(offer.request, group.id))
        return True

    # ---- pulls

    def pull(self, worker: WorkerId, message: Pull, now: float) -> None:
        if message.stage not in self.board.stages:
            self._refuse(worker, message.request, f"there is no stage {message.stage!r} in this dataflow")
        elif message.stage == self._flow.train_stage and message.step < self.window.step and not self.window.over:
            reason = f"step {message.step} is closed, step {self.window.step} is in training"
            self._refuse(worker, message.request, reason)
        else:
            self.room.park_pull(worker, message, now)

    def _serve_slots(self, parked: Parked[Pull], now: float) -> bool:
        pull, worker = parked.request, parked.worker
        stage = self.board.stages[pull.stage]
        version = self._weights.applied_version(worker)

        def may_start(slot: Slot) -> bool:
            if not stage.generates:
                return True
            if slot.group.flow != self._flow.train_flow:
                return True
            return self._policies.admission.may_start(self.window.expected_step(slot.group), version)

        ready = self.board.ready_slots(pull.stage)
        # Who waits for a version of its own holds up nobody else.
        startable = (slot for slot in ready if not stage.generates or version >= slot.group.at_least)
        chosen = self._policies.dispatch.choose(startable, pull.slots, may_start)
        startable.close()
        ready.close()  # type: ignore[attr-defined]
        if not chosen:
            parked.waits_for = self._why_not(pull.stage, version)
            return False
        leases = self.board.lease(pull.stage, chosen, worker, now + self._settings.lease_s, version)
        self._grant(parked, chosen, leases, closed=False)
        return True

    def _why_not(self, stage: str, version: int) -> str:
        count = len(self.board.ready[stage])
        if count:
            return f"newer weights: {count} slots ready for {stage}, but version {version} would be too old"
        return f"slots ready for {stage}"

    def _serve_step(self, parked: Parked[Pull]) -> bool:
        pull, window = parked.request, self.window
        if not window.over and pull.step > window.step:
            parked.waits_for = f"the end of step {window.step}"
            return False
        if window.over or window.places == 0:
            self._grant(parked, [], [], closed=True)
            return True
        groups = window.choose(
            self.board.ready_groups(pull.stage),
            lambda: [g for i in window.waiting if (g := self.board.groups[i]).id not in self.board.ready[pull.stage]],
            self._policies.admission,
            self._policies.batcher,
            self.tokens_of,
        )
        if not groups:
            ready = len(self.board.ready[pull.stage])
            parked.waits_for = f"a full micro-batch of step {window.step}: {ready} of {window.places} groups complete"
            return False
        window.take(groups)
        slots = [slot for group in groups for slot in group.slots]
        # No deadline: what a trainer was told is in its step cannot be taken back, and a lost trainer gives it back.
        leases = self.board.lease(pull.stage, slots, parked.worker, float("inf"), 0, window.step)
        for group in groups:
            self._record(group, "leased")
        self._grant(parked, slots, leases, closed=False)
        return True

    def _grant(self, parked: Parked[Pull], slots: list[Slot], leases: list[Lease], closed: bool) -> None:
        self._out.extend(grant(self.board, self.lanes, parked.worker, parked.request, slots, leases, closed))

    def tokens_of(self, group: Group) -> int:
        """Tokens of all samples of the group, prompts included."""
        columns = [self.board.columns[name] for name in self._flow.token_columns]
        return sum(
            self.board.length(column.name, group.id if column.scope == "group" else slot.id)
            for slot in group.slots
            for column in columns
        )

    # ---- commits

    def commit(self, worker: WorkerId, message: Commit, now: float) -> None:  # noqa: ARG002
        try:
            rows = _rows(message, self.board.stages[message.stage], set(self.board.columns), self._weights.latest)
        except (KeyError, ValueError) as error:
            raise RemoteProtocolError(f"commit of stage {message.stage!r} by {worker}: {error}") from error
        refused, reasons = [], set()
        for slot_id, lease_id, lengths, inline, spans in rows:
            lease = self.board.find_lease(lease_id, worker)
            if lease is None or lease.slot != slot_id or lease.stage != message.stage:
                refused.append(slot_id)
                reasons.add(f"the lease on stage {message.stage} had ended")
                continue
            slot = self.board.commit(lease, lengths, inline, spans)
            if self.retreat.expired(slot):
                self.retreat.drop(slot, "over-age")
                refused.append(slot_id)
                reasons.add("older than the staleness bound")
            self._after_commit(slot.group)
        self._send(worker, Committed(message.request, tuple(refused), "; ".join(sorted(reasons))))

    def _after_commit(self, group: Group) -> None:
        if group.flow == self._flow.train_flow:
            if group.id in self.board.ready[self._flow.train_stage]:
                self._record(group, "ready")
        elif self.board.is_complete(group):
            self._close([group])

    # ---- steps

    def step_done(self, worker: WorkerId, message: StepDone) -> None:
        window = self.window
        if message.step != window.step or window.places != 0 or window.over:
            raise RemoteProtocolError(
                f"{worker} ended step {message.step}, but step {window.step} is in training with {window.places} "
                "places open"
            )
        trained = window.close()
        slots = [slot for group in trained for slot in group.slots]
        lags = tuple(message.step - (slot.oldest_version() or 0) for slot in slots)
        columns = sorted({column for slot in slots for column in slot.inline})
        means = tuple((name, sum(slot.inline[name] for slot in slots) / len(slots)) for name in columns)
        tokens = sum(self.tokens_of(group) for group in trained)
        closed = StepClosed(message.step, len(trained), len(slots), tokens, lags, means, message.metrics)
        for group in trained:
            self._record(group, "trained", step=message.step)
        self._out.append(closed)
        self._close(trained)
        self.retreat.drop_expired()

    def _close(self, groups: list[Group]) -> None:
        for worker, free in frees(groups).items():
            self._send(worker, free)
        for group in groups:
            self.board.close(group)

    # ---- after every event

    def settle(self, now: float) -> None:
        """Answer whatever can be answered now."""
        self.room.serve_offers(self._open)
        for name in self.board.stages:
            if name == self._flow.train_stage:
                self.room.serve_pulls(name, self._serve_step)
            else:
                self.room.serve_pulls(name, lambda parked: self._serve_slots(parked, now))

    def _record(self, group: Group, state: str, reason: str = "", step: int | None = None) -> None:
        step = self.window.step if step is None else step
        self._out.append(Record(group.prompt, group.epoch, state, step, reason))

    def _refuse(self, worker: WorkerId, request: int, reason: str) -> None:
        self._send(worker, Refused(request, reason))

    def _send(self, worker: WorkerId, message: Opened | Refused | Committed | Free) -> None:
        self._out.append(Send(worker, message))


Row = tuple[int, int, dict[str, int], dict[str, float], tuple[int, ...]]


def _rows(message: Commit, stage: Stage, tensors: set[str], latest: int) -> Iterable[Row]:
    """The commit as one row a slot. Raises ValueError when its columns do not fit the stage or each other."""
    count = len(message.slots)
    if stage.whole_groups:
        raise ValueError("what takes whole groups ends with its step")
    given = [part.column for part in message.parts], [values.column for values in message.inline]
    made = sorted(set(stage.makes) & tensors), sorted(set(stage.makes) - tensors)
    if (sorted(given[0]), sorted(given[1])) != made:
        raise ValueError(
            f"it brings tensors {given[0]} and numbers {given[1]}, the stage makes {made[0]} and {made[1]}"
        )
    sizes = [len(message.leases), *(len(p.lengths) for p in message.parts), *(len(v.values) for v in message.inline)]
    if any(size != count for size in sizes):
        raise ValueError(f"its columns have {sizes} rows for {count} slots")
    if any(part.ids != message.slots or min(part.lengths, default=0) < 0 for part in message.parts):
        raise ValueError("its parts are not of its slots, or of negative length")
    if len(message.spans) != (count if stage.generates else 0):
        raise ValueError(f"it has {len(message.spans)} spans for {count} slots")
    for span in message.spans:
        if not span or len(span) % 2 or not all(0 <= version <= latest for version in span[::2]):
            raise ValueError(f"span {span} is not pairs of a published version and its tokens")
    spans = message.spans or ((),) * count
    return [
        (
            message.slots[row],
            message.leases[row],
            {part.column: part.lengths[row] for part in message.parts},
            {values.column: values.values[row] for values in message.inline},
            spans[row],
        )
        for row in range(count)
    ]
